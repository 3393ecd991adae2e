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
