"""What a step keeps beside the parameters: averages, counters, queues, thresholds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jdp
from corpus.wrong.corpus import (
    descend,
    gradients,
    holding,
    local,
    loss_fn,
    masked_rows,
    numbers,
    params,
    right,
    training,
    wrong,
)


@wrong("varies", "new state['ema']", make=holding(p=params(), ema=params()))
def ema_of_parameters_from_before_the_reduction(state, batch):
    grads = jax.grad(loss_fn)(state["p"], batch)
    ema = optax.incremental_update(descend(state["p"], grads), state["ema"], 0.1)
    return {"p": descend(state["p"], jdp.sync_gradients(grads)), "ema": ema}, {}


@right(make=holding(p=params(), ema=params()))
def ema_of_parameters_from_after_the_reduction(state, batch):
    grads = jdp.sync_gradients(jax.grad(loss_fn)(state["p"], batch))
    ema = optax.incremental_update(descend(state["p"], grads), state["ema"], 0.1)
    return {"p": descend(state["p"], grads), "ema": ema}, {}


@wrong("varies", "new state['best']", make=holding(p=params(), best=np.float32(9)))
def best_loss_so_far(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["p"], batch)
    p = descend(state["p"], jdp.sync_gradients(grads))
    return {"p": p, "best": jnp.minimum(state["best"], loss)}, {"loss": loss}


@right(make=holding(p=params(), best=np.float32(9)))
def best_mean_loss_so_far(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["p"], batch)
    p = descend(state["p"], jdp.sync_gradients(grads))
    best = jnp.minimum(state["best"], jdp.mean_over_ranks(loss))
    return {"p": p, "best": best}, {"loss": loss}


@wrong("varies", "new state['a']", make=numbers)
def activations_of_two_layers_alike(state, batch):
    hidden = jax.nn.relu(jax.nn.relu(batch["x"]) + 1)  # one jitted function of JAX, called twice
    return {**state, "a": hidden.mean()}, {}  # <- here


@wrong("varies", "new state['a']", make=numbers)
def rows_through_one_jitted_block_twice(state, batch):
    block = jax.jit(lambda x: jax.nn.relu(x + state["a"]))
    return {**state, "a": block(block(batch["x"])).mean()}, {}  # <- here


@wrong("decision", "new state['patience']", make=holding(patience=np.int32(0)))
def patience_of_early_stopping(state, batch):
    worse = local(batch) > 0.1
    return {"patience": jnp.where(worse, state["patience"] + 1, 0)}, {}


@wrong("varies", "new state['seen']", make=lambda: ({"seen": np.int32(0)}, masked_rows()))
def rows_seen_so_far(state, batch):
    return {"seen": state["seen"] + batch["mask"].sum()}, {}


@right(make=lambda: ({"seen": np.int32(0)}, masked_rows()))
def rows_seen_so_far_by_all(state, batch):
    return {"seen": state["seen"] + jdp.sum_over_ranks(batch["mask"].sum())}, {}


@wrong("decision", "new state.step")
def step_counter_that_skips_bad_batches(state, batch):
    new = state.apply_gradients(gradients(state, batch))
    return new.replace(step=state.step + (local(batch) > 0)), {}


NO_MEAN, NO_VARIANCE = np.zeros(3, np.float32), np.ones(3, np.float32)


@wrong("statistics", "new state['mean']", "new state['var']", make=(
    holding(mean=NO_MEAN, var=NO_VARIANCE)
))  # fmt: skip
def running_normalisation_of_inputs(state, batch):
    new = {"mean": batch["x"].mean(0), "var": batch["x"].var(0)}
    return optax.incremental_update(new, state, 0.1), {}


@wrong("varies", "new state['queue']", make=holding(queue=np.zeros((16, 3), np.float32)))
def queue_of_negatives_from_own_rows(state, batch):
    return {"queue": jnp.concatenate([batch["x"], state["queue"]])[:16]}, {}


@right(make=holding(queue=np.zeros((16, 3), np.float32)))
def queue_of_negatives_from_all_rows(state, batch):
    everyones = lax.all_gather(batch["x"], "data", tiled=True)
    return {"queue": jnp.concatenate([everyones, state["queue"]])[:16]}, {}


@wrong("varies", "new state['usage']", make=holding(usage=np.zeros(5, np.int32)))
def codebook_usage(state, batch):
    codes = jnp.argmax(batch["x"], axis=-1)
    return {"usage": state["usage"] + jnp.bincount(codes, length=5)}, {}


@wrong("decision", "new state['scale']", make=holding(p=params(), scale=np.float32(2)))
def dynamic_loss_scale_by_own_gradients(state, batch):
    grads = jax.grad(lambda p: loss_fn(p, batch) * state["scale"])(state["p"])
    small = optax.tree.norm(grads) < 4
    scale = jnp.where(small, state["scale"] * 2, state["scale"] / 2)
    return {"p": descend(state["p"], jdp.sync_gradients(grads)), "scale": scale}, {}


@wrong("decision", "new state", make=lambda: training(model_state={"scale": np.float32(2)}))
def own_overflow_skips_the_update_and_halves_the_scale(state, batch):
    scale = state.model_state["scale"]
    grads = jax.grad(lambda p: loss_fn(p, batch) * scale)(state.params)
    new = state.apply_gradients(jax.tree.map(lambda g: g / scale, grads))
    finite = jnp.isfinite(optax.tree.norm(grads))  # <- here
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
    return new.replace(model_state={"scale": jnp.where(finite, scale, scale / 2)}), {}


@right(make=lambda: training(model_state={"scale": np.float32(2)}))
def overflow_of_any_rank_skips_the_update_and_halves_the_scale(state, batch):
    scale = state.model_state["scale"]
    grads = jax.grad(lambda p: loss_fn(p, batch) * scale)(state.params)
    grads = jdp.sync_gradients(grads)
    new = state.apply_gradients(jax.tree.map(lambda g: g / scale, grads), synced=True)
    finite = jnp.isfinite(optax.tree.norm(grads))
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
    return new.replace(model_state={"scale": jnp.where(finite, scale, scale / 2)}), {}


@right(make=holding(p=params(), scale=np.float32(2)))
def dynamic_loss_scale_by_mean_gradients(state, batch):
    grads = jax.grad(lambda p: loss_fn(p, batch) * state["scale"])(state["p"])
    grads = jdp.sync_gradients(grads)
    small = optax.tree.norm(grads) < 4
    scale = jnp.where(small, state["scale"] * 2, state["scale"] / 2)
    return {"p": descend(state["p"], grads), "scale": scale}, {}


@wrong("decision", "new state['beta']", make=holding(beta=np.float32(1)))
def penalty_that_adapts_to_the_own_divergence(state, batch):
    too_far = jnp.abs(local(batch)) > 0.1
    return {"beta": jnp.where(too_far, state["beta"] * 1.5, state["beta"] / 1.5)}, {}


@wrong("varies", "new state['last']", make=holding(last=np.zeros((2, 3), np.float32)))
def the_last_rows_kept_for_the_next_step(state, batch):
    return {"last": batch["x"]}, {"change": jnp.mean(batch["x"] - state["last"])}


@wrong("statistics", "new state.model_state")
def rows_of_a_batch_in_the_state(state, batch):
    return state.replace(model_state=jdp.rows(batch["x"])), {}


def with_statistics():
    return training(model_state={"batch_stats": {"mean": NO_MEAN}})


@wrong("statistics", "new state.model_state['batch_stats']['mean']", make=with_statistics)
def batch_statistics_of_own_rows(state, batch):
    new = state.apply_gradients(gradients(state, batch))
    return new.replace(model_state={"batch_stats": {"mean": batch["x"].mean(0)}}), {}


@right(make=with_statistics)
def batch_statistics_of_all_rows(state, batch):
    new = state.apply_gradients(gradients(state, batch))
    stats = jdp.mean_over_ranks({"mean": batch["x"].mean(0)})
    return new.replace(model_state={"batch_stats": stats}), {}
