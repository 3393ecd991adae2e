"""Gradients that were reduced before they come to the optimizer, which reduces them.

A sum is n times too large then. A mean stays what it is, and only costs a second reduction.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.flatten_util import ravel_pytree

import jdp
from corpus.wrong import corpus
from corpus.wrong.corpus import gradients, loss_fn, masked_rows, predict, right, rows, sgd, training

W, B = "['w']", "['b']"
wrong = functools.partial(corpus.wrong, "reduced twice")
twice = corpus.twice


def pmean(tree):
    return lax.pmean(tree, "data")


def psum(tree):
    return lax.psum(tree, "data")


@twice(W, B)
def pmean_as_under_pmap(state, batch):
    grads = pmean(gradients(state, batch))
    return state.apply_gradients(grads), {}  # <- here


@wrong(W, B)
def psum_as_under_pmap(state, batch):
    grads = psum(gradients(state, batch))
    return state.apply_gradients(grads), {}  # <- here


@twice(W, B)
def synced_and_not_said_so(state, batch):
    grads = jdp.sync_gradients(gradients(state, batch))
    return state.apply_gradients(grads), {"norm": optax.tree.norm(grads)}


@right()
def synced_and_said_so(state, batch):
    grads = jdp.sync_gradients(gradients(state, batch))
    return state.apply_gradients(grads, synced=True), {"norm": optax.tree.norm(grads)}


@twice(W, B)
def synced_twice(state, batch):
    grads = jdp.sync_gradients(gradients(state, batch))
    grads = jdp.sync_gradients(grads)  # <- here
    return state.apply_gradients(grads, synced=True), {}


@twice(W, B)
def synced_by_a_ring_first(state, batch):
    grads = jdp.sync_gradients(gradients(state, batch), all_reduce=jdp.collectives.ring)
    return state.apply_gradients(grads), {}


@twice(W, B, make=lambda: training(tx=sgd(all_reduce=jdp.collectives.ring)))
def reduced_before_a_ring(state, batch):
    return state.apply_gradients(pmean(gradients(state, batch))), {}


@twice(W, B, make=lambda: training(batch=masked_rows()), weight=lambda b: b["mask"].sum())
def synced_by_weight_first(state, batch):
    def loss(p):
        errors = (predict(p, batch["x"]) - batch["y"]) ** 2
        return (errors * batch["mask"]).sum() / batch["mask"].sum()

    grads = jdp.sync_gradients(jax.grad(loss)(state.params))
    return state.apply_gradients(grads), {}


@twice(W, B)
def mean_over_ranks_first(state, batch):
    return state.apply_gradients(jdp.mean_over_ranks(gradients(state, batch))), {}


@twice(W, B)
def gradient_of_a_global_mean(state, batch):
    grads = jax.grad(jdp.global_mean(loss_fn))(state.params, batch)
    return state.apply_gradients(grads), {}


@right()
def gradient_of_a_global_mean_and_said_so(state, batch):
    grads = jax.grad(jdp.global_mean(loss_fn))(state.params, batch)
    return state.apply_gradients(grads, synced=True), {}


@right()
def one_leaf_reduced(state, batch):
    grads = gradients(state, batch)
    return state.apply_gradients({**grads, "b": pmean(grads["b"])}), {}


@twice(W, B, make=lambda: ({"a": training()[0], "b": training()[0]}, rows()))
def one_of_two_states(state, batch):
    a = state["a"].apply_gradients(gradients(state["a"], batch))
    b = state["b"].apply_gradients(pmean(gradients(state["b"], batch)))  # <- here
    return {"a": a, "b": b}, {}


@right()
def gradients_that_are_uniform_without_a_reduction(state, batch):
    # Of weight decay alone: the mean of what is the same everywhere is itself.
    grads = jax.grad(lambda p: optax.tree.norm(p, squared=True))(state.params)
    return state.apply_gradients(grads), {}


# What may be done to a sum on its way


@twice(W, B)
def then_divided_by_hand(state, batch):
    grads = jax.tree.map(lambda g: g / lax.axis_size("data"), psum(gradients(state, batch)))
    return state.apply_gradients(grads), {}


@wrong(W, B)
def then_cast_back_from_bfloat16(state, batch):
    half = jax.tree.map(lambda g: g.astype(jnp.bfloat16), gradients(state, batch))
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), psum(half))
    return state.apply_gradients(grads), {}


@wrong(W)
def then_reshaped_and_transposed(state, batch):
    grads = gradients(state, batch)
    w = psum(grads["w"].reshape(1, 3)).T.squeeze(1)
    return state.apply_gradients({**grads, "w": w}), {}


@wrong(W, B)
def then_clipped_by_its_norm(state, batch):
    grads = psum(gradients(state, batch))
    factor = jnp.minimum(1, 1 / optax.tree.norm(grads))
    return state.apply_gradients(jax.tree.map(lambda g: g * factor, grads)), {}


@wrong(W, B, make=lambda: training(batch=masked_rows()))
def then_divided_by_the_number_of_all_rows(state, batch):
    total = psum(batch["mask"].sum().astype(jnp.float32))
    grads = jax.tree.map(lambda g: g / total, psum(gradients(state, batch)))
    return state.apply_gradients(grads), {}


@wrong(W, B)
def then_set_to_zero_where_not_finite(state, batch):
    grads = psum(gradients(state, batch))
    grads = jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), g, 0), grads)
    return state.apply_gradients(grads), {}


@wrong(W, B)
def then_only_used_if_finite(state, batch):
    grads = psum(gradients(state, batch))
    finite = jnp.isfinite(optax.tree.norm(grads))
    zeros = jax.tree.map(jnp.zeros_like, grads)
    return state.apply_gradients(lax.cond(finite, lambda: grads, lambda: zeros)), {}


@wrong(W, B)
def through_one_flat_vector(state, batch):
    flat, unravel = ravel_pytree(gradients(state, batch))
    return state.apply_gradients(unravel(psum(flat))), {}


@wrong(W, B)
def through_an_optimization_barrier(state, batch):
    grads = lax.optimization_barrier(psum(gradients(state, batch)))
    return state.apply_gradients(grads), {}


@wrong(W, B)
def through_a_name_for_rematerialisation(state, batch):
    grads = jax.tree.map(lambda g: checkpoint_name(g, "grads"), psum(gradients(state, batch)))
    return state.apply_gradients(grads), {}


@wrong(W, B)
def through_a_jit(state, batch):
    grads = jax.jit(lambda p: psum(jax.grad(loss_fn)(p, batch)))(state.params)
    return state.apply_gradients(grads), {}


@wrong(W, B)
def through_a_ref(state, batch):
    grads = jax.tree.map(lambda g: jax.freeze(jax.new_ref(g)), psum(gradients(state, batch)))
    return state.apply_gradients(grads), {}


@wrong(W, B)
def through_a_while_loop(state, batch):
    grads = psum(gradients(state, batch))
    halve = functools.partial(jax.tree.map, lambda g: g / 2)
    grads = lax.while_loop(lambda g: optax.tree.norm(g) > 1, halve, grads)
    return state.apply_gradients(grads), {}


@wrong(W, B)
def through_the_last_round_of_a_scan(state, batch):
    def body(carry, _):
        return psum(gradients(state, batch)), None

    zeros = jax.tree.map(jnp.zeros_like, state.params)
    return state.apply_gradients(lax.scan(body, zeros, None, length=2)[0]), {}


@wrong(W, B)
def in_a_step_that_is_scanned(state, batch):
    def body(state, _):
        return state.apply_gradients(psum(gradients(state, batch))), None  # <- here

    return lax.scan(body, state, None, length=2)[0], {}


@wrong(W, B)
def in_a_step_that_is_conditional(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)

    def update():
        return state.apply_gradients(psum(grads))  # <- here

    return lax.cond(jdp.mean_over_ranks(loss) < 9, update, lambda: state), {}


# In the backward pass


@jax.custom_vjp
def reduced_backward(p):
    return p


reduced_backward.defvjp(lambda p: (p, None), lambda _, ct: (psum(ct),))


def hooked(p, batch):
    return loss_fn(reduced_backward(p), batch)


@wrong(W, B)
def by_a_hook(state, batch):
    return state.apply_gradients(jax.grad(hooked)(state.params, batch)), {}


@wrong(W, B)
def by_a_hook_in_a_remat(state, batch):
    return state.apply_gradients(jax.grad(jax.checkpoint(hooked))(state.params, batch)), {}


@wrong(W, B)
def by_a_hook_in_micro_batches(state, batch):
    _, grads = jdp.value_and_grad(hooked, accumulate=2)(state.params, batch)
    return state.apply_gradients(grads), {}  # <- here


@wrong(W, B)
def by_two_hooks_of_the_same_parameters(state, batch):
    def loss(p):
        first_rows = jax.tree.map(lambda x: x[:1], batch)
        return hooked(p, batch) + hooked(p, first_rows)

    return state.apply_gradients(jax.grad(loss)(state.params)), {}


@wrong(W, B)
def in_every_micro_batch_by_hand(state, batch):
    def body(sums, row):
        grads = psum(jax.grad(loss_fn)(state.params, jax.tree.map(lambda x: x[None], row)))
        return jax.tree.map(jnp.add, sums, grads), None

    zeros = jax.tree.map(jnp.zeros_like, state.params)
    return state.apply_gradients(lax.scan(body, zeros, batch)[0]), {}  # <- here


@right()
def after_all_micro_batches_by_hand(state, batch):
    def body(sums, row):
        grads = jax.grad(loss_fn)(state.params, jax.tree.map(lambda x: x[None], row))
        return jax.tree.map(jnp.add, sums, grads), None

    zeros = jax.tree.map(jnp.zeros_like, state.params)
    return state.apply_gradients(lax.scan(body, zeros, batch)[0]), {}


@right()
def without_a_hook_in_micro_batches(state, batch):
    _, grads = jdp.value_and_grad(loss_fn, accumulate=2)(state.params, batch)
    return state.apply_gradients(grads), {}
