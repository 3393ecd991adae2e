"""Loops and branches around whole updates, all in step on every rank."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jdp
from corpus.right.corpus import loss_fn, plain, predict, right, state


def with_number():
    return state(model_state=np.float32(0))


@right()
def three_steps_in_a_scan(state, batch):
    state, metrics = lax.scan(lambda s, _: plain(s, batch), state, None, length=3)
    return state, jax.tree.map(jdp.mean_over_ranks, metrics)


@right()
def epochs_over_shuffled_rows(state, batch):
    """PPO: each rank goes through its rows one by one, in an order of its own."""

    def one_row(state, row):
        rows = jax.tree.map(lambda x: x[None], row)
        return plain(state, rows)

    mine = {key: batch[key] for key in ("rows", "targets")}
    order = jax.random.permutation(state.key, batch["rows"].shape[0])
    state, metrics = lax.scan(one_row, state, jax.tree.map(lambda x: x[order], mine))
    return state, jax.tree.map(jdp.mean_over_ranks, metrics)


@right()
def until_the_mean_loss_is_low(state, batch):
    def body(carry):
        state, _, i = carry
        state, metrics = plain(state, batch)
        return state, jdp.mean_over_ranks(metrics["loss"]), i + 1

    def high(carry):
        return (carry[1] > 0.1) & (carry[2] < 3)

    state, loss, _ = lax.while_loop(high, body, (state, jnp.float32(jnp.inf), 0))
    return state, {"loss": loss}


@right(with_number)
def skipped_after_a_spike(state, batch):
    """Compares the mean loss with its own average, and skips the whole step."""
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    loss = jdp.mean_over_ranks(loss)
    usual = 0.9 * state.model_state + 0.1 * loss
    new = lax.cond(loss < 10 * usual, lambda: state.apply_gradients(grads), lambda: state)
    return new.replace(model_state=usual), {"loss": loss}


@right()
def alternating_by_the_step_number(state, batch):
    """Switches between two losses."""

    def absolute(p, batch):
        return jnp.mean(jnp.abs(predict(p, batch["rows"]) - batch["targets"]))

    branches = [jax.value_and_grad(loss_fn), jax.value_and_grad(absolute)]
    loss, grads = lax.switch(state.step % 2, branches, state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


@right()
def stochastic_depth_by_the_shared_key(state, batch):
    """All ranks leave the same layer out, and its gradients are summed in the branch."""
    grads = jax.grad(loss_fn)(state.params, batch)
    kept = jax.random.bernoulli(state.shared_key)
    grads = lax.cond(kept, jdp.sync_gradients, lambda g: jax.tree.map(jnp.zeros_like, g), grads)
    return state.apply_gradients(grads, synced=True), {}


@right(lambda: state(model_state={"scale": np.float32(2.0), "good": np.int32(0)}))
def dynamic_loss_scale(state, batch):
    """Mixed precision in float16: a step whose mean gradients overflow is left out."""
    scale, good = state.model_state["scale"], state.model_state["good"]

    def scaled_loss(p):
        half = jax.tree.map(lambda x: x.astype(jnp.float16), p)
        rows = {key: batch[key].astype(jnp.float16) for key in ("rows", "targets")}
        return loss_fn(half, rows).astype(jnp.float32) * scale

    loss, grads = jax.value_and_grad(scaled_loss)(state.params)
    grads = jdp.sync_gradients(jax.tree.map(lambda g: g / scale, grads))
    finite = jnp.isfinite(optax.tree.norm(grads))
    stepped = state.apply_gradients(grads, synced=True)
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), stepped, state)
    scale = jnp.where(finite, jnp.where(good > 10, scale * 2, scale), scale / 2)
    good = jnp.where(finite & (good <= 10), good + 1, 0)
    return new.replace(model_state={"scale": scale, "good": good}), {"loss": loss / scale}
