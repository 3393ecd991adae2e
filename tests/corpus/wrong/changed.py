"""Sums over the ranks that are n times too large, and were changed before they are handed on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from corpus.wrong import corpus
from corpus.wrong.corpus import gradients, right, training
from corpus.wrong.reduced_twice import psum, reduced_backward
from corpus.wrong.scaled import WEIGHED, B, W, masked_gradients

undivided = functools.partial(corpus.wrong, "not divided")
twice = functools.partial(corpus.wrong, "reduced twice")
unweighted = functools.partial(corpus.wrong, "unweighted")


def clipped(grads):
    return jax.tree.map(lambda g: jnp.clip(g, -9, 9), grads)


def updated_by(tx, grads):
    return tx.update(grads, tx.init(grads))[0]


# Clipped


@undivided(W, B)
def sum_that_is_clipped_by_element(state, batch):
    grads = lax.psum(gradients(state, batch), "data")  # <- here
    return state.apply_gradients(updated_by(optax.clip(9.0), grads), synced=True), {}


@undivided(W, B)
def sum_that_is_clipped_by_its_norm(state, batch):
    grads = lax.psum(gradients(state, batch), "data")  # <- here
    grads = updated_by(optax.clip_by_global_norm(50.0), grads)
    return state.apply_gradients(grads, synced=True), {}


@undivided(W, B)
def sum_of_a_hook_that_is_clipped(state, batch):
    def loss(p):
        return corpus.loss_fn(reduced_backward(p), batch)  # reduced_twice.py

    grads = clipped(jax.grad(loss)(state.params))
    return state.apply_gradients(grads, synced=True), {}  # <- here


@twice(W, B)
def sum_that_is_clipped_and_averaged(state, batch):
    grads = lax.psum(gradients(state, batch), "data")  # <- here
    return state.apply_gradients(clipped(grads)), {}


@right()
def mean_that_is_clipped(state, batch):
    grads = clipped(lax.pmean(gradients(state, batch), "data"))
    return state.apply_gradients(grads, synced=True), {}


# Put together with something else


@undivided(W, B)
def sum_with_decay(state, batch):
    grads = lax.psum(gradients(state, batch), "data")  # <- here
    grads = jax.tree.map(lambda g, p: g + 1e-3 * p, grads, state.params)
    return state.apply_gradients(grads, synced=True), {}


@right()
def sum_of_clipped_gradients_with_noise_over_all_rows(state, batch):
    grads = updated_by(optax.clip_by_global_norm(1.0), gradients(state, batch))
    key = state.shared_key
    noisy = jax.tree.map(lambda g: g + jax.random.normal(key, g.shape), psum(grads))
    num_rows = lax.psum(batch["x"].shape[0], "data")
    return state.apply_gradients(jax.tree.map(lambda g: g / num_rows, noisy), synced=True), {}


# By other collectives


@twice(W, B)
def sum_of_gathered_gradients(state, batch):
    grads = lax.all_gather(gradients(state, batch), "data")
    return state.apply_gradients(jax.tree.map(lambda g: g.sum(0), grads)), {}  # <- here


# Averaged without the weight of the step


@unweighted(W, B, **WEIGHED)
def unweighted_mean_that_is_clipped(state, batch):
    grads = clipped(lax.pmean(masked_gradients(state, batch), "data"))  # <- here
    return state.apply_gradients(grads, synced=True), {}


@unweighted(W, B, **WEIGHED)
def sum_that_is_divided_after_it_was_clipped_though_ranks_weigh(state, batch):
    grads = clipped(lax.psum(masked_gradients(state, batch), "data"))  # <- here
    grads = jax.tree.map(lambda g: g / lax.axis_size("data"), grads)
    return state.apply_gradients(grads, synced=True), {}


# What only looks like it


@right()
def gradients_of_sums_over_all_rows(state, batch):
    xx, xy = lax.psum((batch["x"].T @ batch["x"], batch["x"].T @ batch["y"]), "data")
    w = xx @ state.params["w"] - xy
    b = lax.pmean(gradients(state, batch)["b"], "data")
    return state.apply_gradients({"w": w, "b": b}, synced=True), {}


# Divided by a number that is computed


@right(make=lambda: (*training(), np.float32(128)))
def sum_divided_by_the_ranks_times_a_scale(state, batch, scale):
    grads = jax.grad(lambda p: corpus.loss_fn(p, batch) * scale)(state.params)
    by = scale * lax.axis_size("data")
    return state.apply_gradients(jax.tree.map(lambda g: g / by, psum(grads)), synced=True), {}


@right()
def sum_divided_by_an_array_of_the_ranks(state, batch):
    def divided(g):
        return g / jnp.full_like(g, lax.axis_size("data"))

    grads = jax.tree.map(divided, psum(gradients(state, batch)))
    return state.apply_gradients(grads, synced=True), {}


# The transpose of pmean divides by n and adds up over n ranks: it scales by one.


def mean_loss(batch):
    return lambda params: lax.pmean(corpus.loss_fn(params, batch), "data")


@undivided(W, B)
def sum_of_gradients_of_a_mean(state, batch):
    grads = lax.psum(jax.grad(mean_loss(batch))(state.params), "data")  # <- here
    return state.apply_gradients(grads, synced=True), {}


@right()
def mean_of_gradients_of_a_mean(state, batch):
    grads = lax.pmean(jax.grad(mean_loss(batch))(state.params), "data")
    return state.apply_gradients(grads, synced=True), {}


@right()
def sum_of_gradients_of_a_mean_that_is_divided(state, batch):
    def loss(params):
        return mean_loss(batch)(params) / lax.axis_size("data")

    grads = lax.psum(jax.grad(loss)(state.params), "data")
    return state.apply_gradients(grads, synced=True), {}


def sum_of_shares(batch):
    size = lax.axis_size("data")
    return lambda params: lax.psum(corpus.loss_fn(params, batch) / size, "data")


@undivided(W, B)
def sum_of_gradients_of_a_sum_of_shares(state, batch):
    grads = lax.psum(jax.grad(sum_of_shares(batch))(state.params), "data")  # <- here
    return state.apply_gradients(grads, synced=True), {}


@right()
def mean_of_gradients_of_a_sum_of_shares(state, batch):
    grads = lax.pmean(jax.grad(sum_of_shares(batch))(state.params), "data")
    return state.apply_gradients(grads, synced=True), {}


@undivided(W, B)
def sum_of_gradients_that_are_divided_and_multiplied_again(state, batch):
    size = lax.axis_size("data")
    grads = jax.grad(lambda p: corpus.loss_fn(p, batch) * size / size)(state.params)
    return state.apply_gradients(lax.psum(grads, "data"), synced=True), {}  # <- here
