"""Sums and means over ranks in a gradient: each has the scale that one rank would give it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jdp
from corpus.right.corpus import SGD, loss, loss_fn, params, predict, right, state

COUNTS = {"weight": lambda batch: batch["counts"].sum()}


def with_multiplier():
    return {**params(), "v": np.float32(0.5)}


def with_groups():
    return {**params(), "v": np.array([0.2, 0.3, 0.5], np.float32)}


def violation(p, batch):
    return jnp.mean(predict(p, batch["rows"]) ** 2)


def row_losses(p, batch):
    return jnp.mean((predict(p, batch["rows"]) - batch["targets"]) ** 2, axis=-1)


@loss(with_multiplier, uniform=False, runs=True)
def lagrange_multiplier_of_a_mean(p, batch):
    return loss_fn(p, batch) + p["v"] * lax.pmean(violation(p, batch), "data")


@loss(with_multiplier, uniform=False, runs=True)
def lagrange_multiplier_of_a_mean_without_gradient(p, batch):
    constraint = lax.stop_gradient(jdp.mean_over_ranks(violation(p, batch)))
    return loss_fn(p, batch) - p["v"] * constraint


@loss(with_multiplier, uniform=False, runs=True)
def multiplier_of_a_ratio_of_sums(p, batch):
    rows = lax.stop_gradient(row_losses(p, batch))
    total = lax.psum(jnp.sum(rows * batch["counts"]), "data")
    return loss_fn(p, batch) + p["v"] * total / lax.psum(batch["counts"].sum(), "data")


@loss(with_multiplier, uniform=False, runs=True)
def multiplier_of_a_sum_divided_by_the_ranks(p, batch):
    total = lax.psum(lax.stop_gradient(violation(p, batch)), "data")
    return loss_fn(p, batch) + p["v"] * total / lax.axis_size("data")


@loss(with_multiplier, uniform=False, runs=True, **COUNTS)
def multiplier_of_a_weighted_mean(p, batch):
    rows, counts = row_losses(p, batch), batch["counts"]
    mean = jnp.sum(rows * counts) / jnp.maximum(counts.sum(), 1)
    return mean + p["v"] * lax.stop_gradient(jdp.mean_over_ranks(mean))


@loss(with_groups, uniform=False, runs=True)
def weights_of_groups(p, batch):
    """Group DRO: the losses of the groups are means over all ranks, put together."""
    groups = [lax.pmean(jnp.mean(batch["targets"][:, i]), "data") for i in range(3)]
    return loss_fn(p, batch) + jnp.sum(p["v"] * jnp.stack(groups))


@loss(with_groups, uniform=False, runs=True)
def weights_of_groups_that_are_cut_out(p, batch):
    means = jdp.mean_over_ranks(batch["rows"].mean(0))
    return loss_fn(p, batch) + jnp.sum(p["v"] * jnp.pad(means[:2], (0, 1)))


@loss(with_multiplier, uniform=False, runs=True)
def multiplier_of_a_regulariser(p, batch):
    """Through psum, which sums what every rank has the same, and is divided by as much."""
    decay = lax.psum(jnp.sum(p["w"] ** 2), "data") / lax.psum(jnp.ones(()), "data")
    return loss_fn(p, batch) + p["v"] * decay**2


def dual():
    return {"primal": state(), "dual": jdp.TrainState.create({"v": np.float32(0.5)}, SGD)}


@right(dual, runs=True)
def dual_ascent_in_a_state_of_its_own(state, batch):
    def lagrangian(p, q):
        return loss_fn(p, batch) + q["v"] * jdp.mean_over_ranks(violation(p, batch))

    grads, slopes = jax.grad(lagrangian, argnums=(0, 1))(
        state["primal"].params, state["dual"].params
    )
    slopes = jax.tree.map(jnp.negative, slopes)
    return {
        "primal": state["primal"].apply_gradients(grads),
        "dual": state["dual"].apply_gradients(slopes),
    }, {}


@right(runs=True)
def sum_over_the_ranks_handed_on_as_the_mean(state, batch):
    grads = lax.psum(jax.grad(loss_fn)(state.params, batch), "data")
    grads = jax.tree.map(lambda g: g / lax.axis_size("data"), grads)
    return state.apply_gradients(grads, synced=True), {}


@right(runs=True)
def divided_by_the_ranks_before_the_sum(state, batch):
    def nth(p):
        return loss_fn(p, batch) / lax.axis_size("data")

    grads = lax.psum(jax.grad(nth)(state.params), "data")
    return state.apply_gradients(grads, synced=True), {}


def an_nth(grads):
    return jax.tree.map(lambda g: g / lax.axis_size("data"), grads)


@right(axes={"data": 2}, runs=True)
def divided_by_the_ranks_that_are_as_many_as_the_micro_batches(state, batch):
    _, grads = jdp.value_and_grad(loss_fn, accumulate=2)(state.params, batch)
    return state.apply_gradients(lax.psum(an_nth(grads), "data"), synced=True), {}


@right(axes={"data": 2}, runs=True)
def divided_by_the_ranks_in_micro_batches_by_hand(state, batch):
    num = 2

    def body(sums, micro_batch):
        grads = jax.grad(lambda p: loss_fn(p, micro_batch) / num)(state.params)
        return jax.tree.map(jnp.add, sums, grads), None

    micro_batches = jax.tree.map(lambda x: x.reshape(num, -1, *x.shape[1:]), batch)
    grads = lax.scan(body, jax.tree.map(jnp.zeros_like, state.params), micro_batches)[0]
    return state.apply_gradients(lax.psum(an_nth(grads), "data"), synced=True), {}


@right(axes={"data": 2}, runs=True)
def divided_by_the_ranks_in_a_loss_of_as_many_features(state, batch):
    def nth(p):
        h = predict(p, batch["rows"])[:, :2]
        h = (h - h.mean(1, keepdims=True)) / jnp.sqrt(1 + h.var(1, keepdims=True))
        return jnp.mean((h - batch["targets"][:, :2]) ** 2) / lax.axis_size("data")

    grads = lax.psum(jax.grad(nth)(state.params), "data")
    return state.apply_gradients(grads, synced=True), {}


@right(runs=True)
def divided_by_the_rows_of_all_before_the_sum(state, batch):
    def share(p):
        counts = batch["counts"]
        return jnp.sum(row_losses(p, batch) * counts) / lax.psum(counts.sum(), "data")

    grads = lax.psum(jax.grad(share)(state.params), "data")
    return state.apply_gradients(grads, synced=True), {}


@right(runs=True)
def divided_by_the_rows_of_all_after_the_sum(state, batch):
    grads = jax.grad(lambda p: jnp.sum(row_losses(p, batch)))(state.params)
    num_rows = lax.psum(batch["rows"].shape[0], "data")
    grads = jax.tree.map(lambda g: lax.psum(g, "data") / num_rows, grads)
    return state.apply_gradients(grads, synced=True), {}


@right(runs=True)
def sum_that_was_asked_for(state, batch):
    num_rows = lax.axis_size("data") * batch["rows"].shape[0]
    grads = jax.grad(lambda p: jnp.sum(row_losses(p, batch)) / num_rows)(state.params)
    grads = jdp.sync_gradients(grads, mean=False)
    return state.apply_gradients(grads, synced=True), {}


@right(lambda: state(tx=jdp.replicated(optax.sgd(0.1), mean=False)), runs=True)
def optimizer_that_sums(state, batch):
    num_rows = lax.axis_size("data") * batch["rows"].shape[0]
    grads = jax.grad(lambda p: jnp.sum(row_losses(p, batch)) / num_rows)(state.params)
    return state.apply_gradients(grads), {}


@right(runs=True, **COUNTS)
def weighted_mean_handed_on(state, batch):
    def mean(p):
        counts = batch["counts"]
        return jnp.sum(row_losses(p, batch) * counts) / jnp.maximum(counts.sum(), 1)

    grads = jdp.sync_gradients(jax.grad(mean)(state.params))
    return state.apply_gradients(grads, synced=True), {}


@right(runs=True)
def one_leaf_is_a_mean_already(state, batch):
    grads = jax.grad(loss_fn)(state.params, batch)
    return state.apply_gradients({**grads, "b": lax.pmean(grads["b"], "data")}), {}


@right(lambda: {"p": params(), "seen": np.float32(0), "first": np.float32(1)}, runs=True)
def sums_that_are_kept(state, batch):
    grads = jdp.sync_gradients(jax.grad(loss_fn)(state["p"], batch))
    is_first = lax.axis_index("data") == 0
    return {
        "p": jax.tree.map(lambda p, g: p - 0.1 * g, state["p"], grads),
        "seen": state["seen"] + jdp.sum_over_ranks(batch["counts"].sum()),
        "first": lax.psum(jnp.where(is_first, 2 * state["first"], 0), "data"),
    }, {}
