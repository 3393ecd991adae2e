"""Gradients and states that are n times too large: sums that nothing divides, or of what is shared.

Every rank ends with the same, and with something else than one rank would.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

import jdp
from corpus.wrong import corpus
from corpus.wrong.corpus import (
    gradients,
    holding,
    local,
    loss_fn,
    masked_rows,
    params,
    predict,
    right,
    rows,
    sgd,
    training,
)
from corpus.wrong.reduced_twice import psum, reduced_backward

W, B, V = "['w']", "['b']", "['v']"
undivided = functools.partial(corpus.wrong, "not divided")
repeated = functools.partial(corpus.wrong, "repeated")
total = functools.partial(corpus.wrong, "reduced twice")
unweighted = functools.partial(corpus.wrong, "unweighted")


# Handed on as the mean


@undivided(W, B)
def sum_handed_on_as_the_mean(state, batch):
    grads = psum(gradients(state, batch))  # reduced_twice.py
    return state.apply_gradients(grads, synced=True), {}  # <- here


def sixteen_rows():
    return corpus.training(
        batch=jax.tree.map(lambda x: np.tile(x, (2,) + (1,) * (x.ndim - 1)), rows())
    )


@undivided(W, B, make=sixteen_rows)
def sum_where_a_rank_has_as_many_rows_as_there_are_ranks(state, batch):
    grads = psum(gradients(state, batch))
    return state.apply_gradients(grads, synced=True), {}  # <- here


@right(make=sixteen_rows)
def nth_where_a_rank_has_as_many_rows_as_there_are_ranks(state, batch):
    grads = jax.grad(lambda p: loss_fn(p, batch) / lax.axis_size("data"))(state.params)
    return state.apply_gradients(psum(grads), synced=True), {}


@undivided(W, B, make=sixteen_rows)
def sum_of_as_many_micro_batches_as_there_are_ranks(state, batch):
    micro_batches = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
    grads = jax.tree.map(lambda g: g / 4, added_up(state, micro_batches))
    return state.apply_gradients(psum(grads), synced=True), {}  # <- here


@right(make=sixteen_rows)
def nth_of_as_many_micro_batches_as_there_are_ranks(state, batch):
    micro_batches = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
    grads = jax.tree.map(lambda g: g / 4, added_up(state, micro_batches))
    grads = jax.tree.map(lambda g: g / lax.axis_size("data"), grads)
    return state.apply_gradients(psum(grads), synced=True), {}


def added_up(state, micro_batches):
    def body(sums, micro_batch):
        return jax.tree.map(jnp.add, sums, gradients(state, micro_batch)), None

    return lax.scan(body, jax.tree.map(jnp.zeros_like, state.params), micro_batches)[0]


@right()
def sum_divided_by_the_ranks(state, batch):
    grads = jax.tree.map(lambda g: g / lax.axis_size("data"), psum(gradients(state, batch)))
    return state.apply_gradients(grads, synced=True), {}


@right()
def sum_that_was_asked_for(state, batch):
    grads = jax.tree.map(lambda g: g / 4, gradients(state, batch))
    grads = jdp.sync_gradients(grads, mean=False)
    return state.apply_gradients(grads, synced=True), {}


@undivided(W, B)
def sum_by_an_algorithm_of_jdp(state, batch):
    grads = gradients(state, batch)
    leaves, treedef = jax.tree.flatten(grads)
    (leaves,) = jdp.collectives.xla([leaves], "data")  # <- here
    return state.apply_gradients(treedef.unflatten(leaves), synced=True), {}


@undivided(W)
def one_leaf_is_a_sum(state, batch):
    grads = gradients(state, batch)
    grads = {"b": lax.pmean(grads["b"], "data"), "w": lax.psum(grads["w"], "data")}  # <- here
    return state.apply_gradients(grads, synced=True), {}


@undivided(W, B)
def sum_of_one_flat_vector(state, batch):
    flat, unravel = ravel_pytree(gradients(state, batch))
    grads = unravel(lax.psum(flat, "data"))  # <- here
    return state.apply_gradients(grads, synced=True), {}


@undivided(W, B)
def sum_in_the_backward_pass(state, batch):
    grads = jax.grad(lambda p: loss_fn(reduced_backward(p), batch))(state.params)
    return state.apply_gradients(grads, synced=True), {}  # <- here


@undivided(W, B, make=lambda: ({"p": params(), "opt": sgd().init(params())}, rows()))
def sum_handed_to_the_optimizer_itself(state, batch):
    grads = lax.psum(jax.grad(loss_fn)(state["p"], batch), "data")  # <- here
    updates, opt = sgd().update(grads, state["opt"], state["p"], synced=True)
    return {"p": optax.apply_updates(state["p"], updates), "opt": opt}, {}


# Parameters that multiply a sum


def with_multiplier():
    p = {**params(), "v": np.float32(0.5)}
    return jdp.TrainState.create(p, sgd()), rows()


@total(V, make=with_multiplier)
def multiplier_of_a_sum_of_means(state, batch):
    def loss(p):
        return loss_fn(p, batch) + p["v"] * lax.psum(local(batch), "data")  # <- here

    return state.apply_gradients(jax.grad(loss)(state.params)), {}


@right(make=with_multiplier)
def multiplier_of_a_mean(state, batch):
    def loss(p):
        return loss_fn(p, batch) + p["v"] * lax.pmean(local(batch), "data")

    return state.apply_gradients(jax.grad(loss)(state.params)), {}


@repeated(V, make=with_multiplier)
def multiplier_of_a_sum_of_global_means(state, batch):
    def loss(p):
        mean = jdp.mean_over_ranks(local(batch))
        return loss_fn(p, batch) + p["v"] * lax.psum(mean, "data")  # <- here

    return state.apply_gradients(jax.grad(loss)(state.params)), {}


@total(V, make=lambda: (
    jdp.TrainState.create({**params(), "v": np.ones(3, np.float32)}, sgd()), rows()
))  # fmt: skip
def weights_of_groups_side_by_side(state, batch):
    def loss(p):
        groups = [lax.psum(batch["x"][:, i].mean(), "data") for i in range(3)]  # <- here
        return loss_fn(p, batch) + jnp.sum(p["v"] * jnp.stack(groups))

    return state.apply_gradients(jax.grad(loss)(state.params)), {}


# Sums of what every rank has the same


@repeated(W, B)
def sum_of_the_mean_gradient(state, batch):
    grads = lax.psum(jdp.sync_gradients(gradients(state, batch)), "data")  # <- here
    return state.apply_gradients(grads, synced=True), {}


@repeated(W, B)
def sum_of_the_mean_gradient_that_is_averaged(state, batch):
    grads = lax.psum(jdp.sync_gradients(gradients(state, batch)), "data")  # <- here
    return state.apply_gradients(grads), {}


@repeated(W, B)
def sum_of_a_gradient_without_rows(state, batch):
    grads = jax.grad(lambda p: optax.tree.norm(p, squared=True))(state.params)
    return state.apply_gradients(lax.psum(grads, "data")), {}  # <- here


@right()
def mean_of_a_gradient_without_rows(state, batch):
    grads = jax.grad(lambda p: optax.tree.norm(p, squared=True))(state.params)
    return state.apply_gradients(lax.pmean(grads, "data")), {}


@repeated("new state['a']", make=holding(a=np.float32(2)))
def sum_of_a_mean_that_is_kept(state, batch):
    mean = jdp.mean_over_ranks(local(batch))
    return {"a": jdp.sum_over_ranks(mean)}, {}  # <- here


@right(make=holding(a=np.float32(2)))
def sum_of_rows_that_is_kept(state, batch):
    return {"a": state["a"] + jdp.sum_over_ranks(batch["y"].sum())}, {}


@repeated("new state['a']", make=holding(a=np.float32(2)))
def decay_by_all_ranks(state, batch):
    return {"a": state["a"] - 0.1 * lax.psum(state["a"], "data")}, {}  # <- here


@repeated("new state['v']", make=holding(v=np.arange(4, dtype=np.float32)))
def average_that_adds_a_sum_of_itself(state, batch):
    return {"v": 0.5 * state["v"] + lax.psum(state["v"], "data")[::-1]}, {}  # <- here


@right(make=holding(v=np.arange(4, dtype=np.float32)))
def sum_of_the_part_of_one_rank(state, batch):
    first = lax.axis_index("data") == 0
    return {"v": lax.psum(jnp.where(first, state["v"], 0), "data")[::-1]}, {}


@repeated("new state['a']", make=holding(a=np.float32(2)))
def function_of_a_sum(state, batch):
    a = jax.nn.sigmoid(lax.psum(state["a"], "data"))  # <- here
    return {"a": 0.9 * state["a"] + 0.1 * a}, {}


@repeated("new state['a']", make=holding(a=np.float32(2)))
def norm_by_all_ranks(state, batch):
    return {"a": jnp.sqrt(lax.psum(state["a"] ** 2, "data"))}, {}  # <- here


@repeated("new state['a']", make=holding(a=np.float32(2)))
def sum_in_groups(state, batch):
    half = lax.axis_size("data") // 2 or 1
    groups = np.arange(lax.axis_size("data")).reshape(-1, half).T
    groups = [list(map(int, group)) for group in groups]
    return {"a": lax.psum(state["a"], "data", axis_index_groups=groups)}, {}  # <- here


@right(make=holding(a=np.float32(2)))
def mean_in_groups(state, batch):
    return {"a": lax.pmean(state["a"], "data", axis_index_groups=[[0, 1], [2, 3]])}, {}


@right(make=holding(a=np.float32(2), b=np.bool_(True), c=np.float32(1)))
def votes_of_all_ranks(state, batch):
    votes = lax.psum((state["a"] > 0).astype(jnp.int32), "data")
    return {
        "a": jnp.sign(lax.psum(state["a"], "data")),
        "b": votes.astype(bool),
        "c": jnp.minimum(votes, 1).astype(jnp.float32),
    }, {}


# Averaged without the weight of the step


WEIGHED = {
    "make": lambda: training(batch=masked_rows()),
    "weight": lambda batch: batch["mask"].sum(),
}


def masked_loss(p, batch):
    errors = (predict(p, batch["x"]) - batch["y"]) ** 2
    return (errors * batch["mask"]).sum() / batch["mask"].sum()


def masked_gradients(state, batch):
    return jax.grad(masked_loss)(state.params, batch)


@unweighted(W, B, **WEIGHED)
def unweighted_mean_handed_on(state, batch):
    grads = lax.pmean(masked_gradients(state, batch), "data")  # <- here
    return state.apply_gradients(grads, synced=True), {}


@unweighted(W, B, **WEIGHED)
def unweighted_mean_that_is_averaged(state, batch):
    grads = lax.pmean(masked_gradients(state, batch), "data")  # <- here
    return state.apply_gradients(grads), {}


@unweighted(W, B, **WEIGHED)
def sum_over_the_ranks_of_what_ranks_weigh(state, batch):
    grads = psum(masked_gradients(state, batch))  # reduced_twice.py
    grads = jax.tree.map(lambda g: g / lax.axis_size("data"), grads)
    return state.apply_gradients(grads, synced=True), {}  # <- here


@unweighted(W, **WEIGHED)
def one_leaf_is_an_unweighted_mean(state, batch):
    grads = masked_gradients(state, batch)
    w = lax.pmean(grads["w"], "data")  # <- here
    grads = {"w": w + 1e-3 * state.params["w"], "b": jdp.sync_gradients(grads["b"])}
    return state.apply_gradients(grads, synced=True), {}


@unweighted(W, B, **WEIGHED)
def unweighted_mean_of_micro_batches(state, batch):
    _, grads = jdp.value_and_grad(masked_loss, accumulate=2)(state.params, batch)
    grads = lax.pmean(grads, "data")  # <- here
    return state.apply_gradients(grads, synced=True), {}


@unweighted(V, make=lambda: (with_multiplier()[0], masked_rows()), weight=WEIGHED["weight"])
def multiplier_of_an_unweighted_mean(state, batch):
    def loss(p):
        mean = lax.pmean(lax.stop_gradient(masked_loss(p, batch)), "data")  # <- here
        return masked_loss(p, batch) + p["v"] * mean

    return state.apply_gradients(jax.grad(loss)(state.params)), {}


@right(**WEIGHED)
def weighted_mean_handed_on(state, batch):
    grads = jdp.sync_gradients(masked_gradients(state, batch))
    return state.apply_gradients(grads, synced=True), {}


@right(**WEIGHED)
def weighted_mean_by_hand(state, batch):
    count = batch["mask"].sum()
    total = jnp.maximum(lax.pmean(count, "data"), 1)
    grads = jax.tree.map(
        lambda g: lax.pmean(jnp.where(count > 0, g * count, 0), "data") / total,
        masked_gradients(state, batch),
    )
    return state.apply_gradients(grads, synced=True), {}


@right(make=WEIGHED["make"])
def mean_that_has_no_weight(state, batch):
    def loss(p):
        errors = (predict(p, batch["x"]) - batch["y"]) ** 2
        return (errors * batch["mask"]).mean() / jdp.mean_over_ranks(batch["mask"].mean())

    grads = lax.pmean(jax.grad(loss)(state.params), "data")
    return state.apply_gradients(grads, synced=True), {}


# In a loop: its first round is what one rank would make of the same state


@undivided(W, B)
def sum_handed_on_in_a_scan(state, batch):
    def body(state, _):
        grads = psum(gradients(state, batch))
        return state.apply_gradients(grads, synced=True), None  # <- here

    return lax.scan(body, state, None, length=2)[0], {}


@undivided(W, B)
def sum_handed_on_in_a_loop_that_counts(state, batch):
    def body(_, state):
        grads = psum(gradients(state, batch))
        return state.apply_gradients(grads, synced=True)  # <- here

    return lax.fori_loop(0, 2, body, state), {}


@unweighted(W, B, **WEIGHED)
def unweighted_mean_in_a_scan(state, batch):
    def body(state, _):
        grads = lax.pmean(masked_gradients(state, batch), "data")  # <- here
        return state.apply_gradients(grads, synced=True), None

    return lax.scan(body, state, None, length=2)[0], {}


@right()
def mean_handed_on_in_a_scan(state, batch):
    def body(state, _):
        grads = lax.pmean(gradients(state, batch), "data")
        return state.apply_gradients(grads, synced=True), None

    return lax.scan(body, state, None, length=2)[0], {}
