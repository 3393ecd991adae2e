"""Mutable arrays (`jax.Ref`) inside of a step."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jdp
from corpus.right.corpus import loss_fn, plain, predict, right, state


@right()
def rows_added_up_in_a_ref(state, batch):
    """The gradient of each row goes into a Ref, and the sum to the optimizer."""
    total = jax.tree.map(lambda x: jax.new_ref(jnp.zeros_like(x)), state.params)

    def add(i, _):
        row = {key: lax.dynamic_slice_in_dim(batch[key], i, 1) for key in ("rows", "targets")}
        grads = jax.grad(loss_fn)(state.params, row)
        jax.tree.map(lambda ref, g: ref.__setitem__(..., ref[...] + g), total, grads)
        return 0

    lax.fori_loop(0, batch["rows"].shape[0], add, 0)
    n = batch["rows"].shape[0]
    return state.apply_gradients(jax.tree.map(lambda ref: jax.freeze(ref) / n, total)), {}


@right(lambda: state(model_state=np.float32(0)))
def moving_average_in_a_ref(state, batch):
    """A Ref that holds what all ranks agree on, written from inside of a jit."""
    average = jax.new_ref(state.model_state)

    @jax.jit
    def note(loss):
        average[...] = 0.9 * average[...] + 0.1 * loss

    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    note(jdp.mean_over_ranks(loss))
    return state.apply_gradients(grads).replace(model_state=average[...]), {"loss": loss}


@right()
def parameters_in_refs(state, batch):
    """Three updates in place, under one loop, with mean gradients."""
    refs = jax.tree.map(jax.new_ref, state.params)

    def body(_, carry):
        p = jax.tree.map(lambda ref: ref[...], refs)
        grads = jdp.sync_gradients(jax.grad(loss_fn)(p, batch))
        jax.tree.map(lambda ref, g: ref.__setitem__(..., ref[...] - 0.1 * g), refs, grads)
        return carry

    lax.fori_loop(0, 3, body, 0)
    return state.replace(params=jax.tree.map(jax.freeze, refs)), {}


@right()
def a_ref_of_this_rank(state, batch):
    """What varies may lie in a Ref, as long as only its mean leaves."""
    largest = jax.new_ref(jnp.float32(0))

    def note(i, _):
        error = jnp.abs(predict(state.params, batch["rows"][i]) - batch["targets"][i]).max()

        def replace():
            largest[...] = error

        lax.cond(error > largest[...], replace, lambda: None)
        return 0

    lax.fori_loop(0, batch["rows"].shape[0], note, 0)
    new, metrics = plain(state, batch)
    return new, {**metrics, "largest": lax.pmax(largest[...], "data")}
