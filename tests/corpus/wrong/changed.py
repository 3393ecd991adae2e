"""Sums over the ranks that are n times too large, and were changed before they are handed on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jdp
from corpus.wrong import corpus
from corpus.wrong.corpus import gradients, right, rows, training
from corpus.wrong.reduced_twice import psum, reduced_backward
from corpus.wrong.scaled import WEIGHED, B, W, masked_gradients, sixteen_rows

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
def sum_that_is_multiplied_by_at_most_one(state, batch):
    grads = lax.psum(gradients(state, batch), "data")  # <- here
    factor = jnp.minimum(1, 50 / optax.tree.norm(grads))
    return state.apply_gradients(jax.tree.map(lambda g: g * factor, grads), synced=True), {}


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


@right()
def sum_that_is_divided_after_it_was_clipped(state, batch):
    grads = clipped(psum(gradients(state, batch)))
    grads = jax.tree.map(lambda g: g / lax.axis_size("data"), grads)
    return state.apply_gradients(grads, synced=True), {}


@right()
def sum_that_was_asked_for_and_is_clipped(state, batch):
    grads = jax.tree.map(lambda g: g / 4, gradients(state, batch))
    grads = clipped(jdp.sync_gradients(grads, mean=False))
    return state.apply_gradients(grads, synced=True), {}


@right()
def sum_by_its_own_length(state, batch):
    grads = psum(gradients(state, batch))
    norm = optax.tree.norm(grads)
    return state.apply_gradients(jax.tree.map(lambda g: g / norm, grads), synced=True), {}


# Put together with something else


@undivided(W, B)
def sum_with_decay(state, batch):
    grads = lax.psum(gradients(state, batch), "data")  # <- here
    grads = jax.tree.map(lambda g, p: g + 1e-3 * p, grads, state.params)
    return state.apply_gradients(grads, synced=True), {}


@twice(W, B)
def sum_with_decay_that_is_averaged(state, batch):
    grads = lax.psum(gradients(state, batch), "data")  # <- here
    grads = jax.tree.map(lambda g, p: g + 1e-3 * p, grads, state.params)
    return state.apply_gradients(grads), {}


@undivided(W, B)
def sum_or_zero(state, batch):
    grads = lax.psum(gradients(state, batch), "data")  # <- here
    grads = jax.tree.map(lambda g, p: jnp.where(jnp.isfinite(g), g, p), grads, state.params)
    return state.apply_gradients(grads, synced=True), {}


@undivided(W)
def sum_beside_a_mean(state, batch):
    grads = gradients(state, batch)
    w = jnp.concatenate([psum(grads["w"][:1]), lax.pmean(grads["w"][1:], "data")])
    grads = {"w": w, "b": jdp.sync_gradients(grads["b"])}
    return state.apply_gradients(grads, synced=True), {}


@undivided(W, B)
def sum_in_a_branch(state, batch):
    grads = lax.psum(gradients(state, batch), "data")  # <- here
    is_early = state.step < 9
    grads = lax.cond(is_early, lambda: clipped(grads), lambda: state.params)
    return state.apply_gradients(grads, synced=True), {}


@undivided(W)
def sum_by_size(state, batch):
    grads = gradients(state, batch)
    w = jnp.sort(lax.psum(grads["w"], "data"))  # <- here
    return state.apply_gradients({"w": w, "b": lax.pmean(grads["b"], "data")}, synced=True), {}


@undivided(W, B)
def sum_in_a_carry(state, batch):
    def body(sums, _):
        return jax.tree.map(lambda s, g: 0.5 * s + jnp.tanh(g), sums, grads), None

    grads = lax.psum(gradients(state, batch), "data")  # <- here
    sums = lax.scan(body, jax.tree.map(jnp.zeros_like, grads), None, length=2)[0]
    return state.apply_gradients(sums, synced=True), {}


@undivided(W, B)
def sum_with_noise(state, batch):
    grads = lax.psum(gradients(state, batch), "data")  # <- here
    key = state.shared_key
    grads = jax.tree.map(lambda g: g + jax.random.normal(key, g.shape), grads)
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


@undivided(W, B)
def sum_of_gathered_gradients_handed_on(state, batch):
    grads = lax.all_gather(gradients(state, batch), "data")  # <- here
    grads = jax.tree.map(lambda g: g.sum(0), grads)
    return state.apply_gradients(grads, synced=True), {}


@right()
def mean_of_gathered_gradients(state, batch):
    grads = lax.all_gather(gradients(state, batch), "data")
    return state.apply_gradients(jax.tree.map(lambda g: g.mean(0), grads), synced=True), {}


@undivided(W, make=lambda: training(batch=sixteen_rows()[1]))
def sum_that_is_scattered_and_gathered(state, batch):
    grads = gradients(state, batch)
    padded = jnp.resize(grads["w"], 12)
    part = lax.psum_scatter(padded, "data", tiled=True)  # <- here
    w = lax.all_gather(part, "data", tiled=True)[:3]
    return state.apply_gradients({"w": w, "b": lax.pmean(grads["b"], "data")}, synced=True), {}


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


@right()
def steps_that_solve_for_sums_of_gradients(state, batch):
    def loss(w):
        return jnp.sum((batch["x"] @ w - batch["y"]) ** 2)

    w = state.params["w"]
    hessian, slope = lax.psum((jax.hessian(loss)(w), jax.grad(loss)(w)), "data")
    b = lax.pmean(gradients(state, batch)["b"], "data")
    grads = {"w": jnp.linalg.solve(hessian + 1e-3 * jnp.eye(3), slope), "b": b}
    return state.apply_gradients(grads, synced=True), {}


@right()
def largest_of_the_sum_chosen_from_the_mean(state, batch):
    local = gradients(state, batch)
    mean = lax.pmean(local, "data")
    _, largest = lax.top_k(jnp.abs(lax.psum(local["w"], "data")), 2)
    w = mean["w"] * jnp.zeros(3).at[largest].set(1.0)
    return state.apply_gradients({**mean, "w": w}, synced=True), {}


@right()
def sum_whose_sign_is_all(state, batch):
    grads = jax.tree.map(jnp.sign, psum(gradients(state, batch)))
    return state.apply_gradients(grads, synced=True), {}


@right()
def mean_where_no_rank_has_an_infinity(state, batch):
    local = gradients(state, batch)
    bad = lax.psum((~jnp.isfinite(optax.tree.norm(local))).astype(jnp.float32), "data")
    mean = lax.pmean(local, "data")
    grads = jax.tree.map(lambda g: g * (1 - jnp.minimum(bad, 1)), mean)
    return state.apply_gradients(grads, synced=True), {}


@right()
def mean_unless_a_sum_is_too_large(state, batch):
    local = gradients(state, batch)
    too_large = lax.psum(optax.tree.norm(local), "data") > 9
    grads = jax.tree.map(lambda g: jnp.where(too_large, 0, g), lax.pmean(local, "data"))
    return state.apply_gradients(grads, synced=True), {}


@right(make=lambda: (training()[0], {**rows(), "m": np.arange(8, dtype=np.float32)}))
def sum_over_the_sum_of_weights(state, batch):
    def loss(p):
        return jnp.sum((corpus.predict(p, batch["x"]) - batch["y"]) ** 2 * batch["m"])

    inverse = 1 / jnp.maximum(lax.psum(batch["m"].sum(), "data"), 1)
    grads = jax.tree.map(lambda g: clipped(psum(g)) * inverse, jax.grad(loss)(state.params))
    return state.apply_gradients(grads, synced=True), {}


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
