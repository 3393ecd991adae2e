"""Functions of the gradient of a rank's rows that are not linear, before the mean over the ranks.

Such steps run, and give other numbers than one device. The right twins are linear, or change the
mean.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

import jdp
from corpus.wrong import corpus

ALL = "grads['b']", "grads['w']"
MATRIX = np.array([[2, 1, 0], [0, 1, 0], [1, 0, 1]], np.float32)


PARAMS = {
    "b": np.array([0.5, -1.0, 0.25, 2.0], np.float32),
    "w": np.array([[1, 0.5, -1, 0], [0.5, -1, 1, 1], [-0.25, 1, 0.5, -1]], np.float32),
}


def matrices() -> tuple:
    tx = jdp.replicated(optax.sgd(0.1, momentum=0.9))
    return jdp.TrainState.create(PARAMS, tx), corpus.rows()


def loss_fn(p, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ p["w"] + p["b"]) - batch["y"][:, None]) ** 2)


def other_loss(p, batch):
    return jnp.mean(jnp.abs(batch["x"] @ p["w"] + p["b"] + batch["y"][:, None]))


def gradients(state, batch):
    return jax.grad(loss_fn)(state.params, batch)


def step_of(change: Callable[[Any], Any], synced: bool = False) -> Callable[..., Any]:
    """Return a step that changes its gradients before the update."""

    def step(state, batch):
        grads = gradients(state, batch)
        if synced:
            grads = jdp.sync_gradients(grads)
        return state.apply_gradients(change(grads), synced=synced), {}

    step.__name__, step.written_as = change.__name__, change
    return step


def bent(change):
    """Record a change that must be warned of, and that it is right after the mean."""
    corpus.bent(*ALL, make=matrices)(step_of(change))
    after = step_of(change, synced=True)
    after.__name__ = f"{change.__name__}_of_the_mean"
    corpus.right(make=matrices)(after)
    return change


def linear(change):
    corpus.right(make=matrices)(step_of(change))
    return change


def each(fn):
    return lambda grads: jax.tree.map(fn, grads)


@bent
def clipped_by_the_parameters(grads):
    tx = optax.adaptive_grad_clip(0.01)
    return tx.update(grads, tx.init(PARAMS), PARAMS)[0]  # <- here


@bent
def signs(grads):
    return jax.tree.map(jnp.sign, grads)  # <- here


@bent
def squashed(grads):
    return jax.tree.map(lambda g: 0.1 * jnp.tanh(g * 10), grads)  # <- here


@bent
def rounded_to_a_grid(grads):
    return jax.tree.map(lambda g: jnp.round(g * 16) / 16, grads)  # <- here


@bent
def cast_to_8_bits_by_hand(grads):
    return jax.tree.map(lambda g: (g * 127).astype(jnp.int8) / 32.0, grads)  # <- here


@bent
def small_elements_dropped(grads):
    return jax.tree.map(lambda g: jnp.where(jnp.abs(g) > 0.05, g, 0), grads)  # <- here


@bent
def largest_elements(grads):
    flat, unravel = ravel_pytree(grads)
    _, chosen = lax.top_k(flat * flat, 5)  # <- here
    return unravel(jnp.zeros_like(flat).at[chosen].set(flat[chosen]))


@bent
def in_its_own_units(grads):
    return jax.tree.map(lambda g: g / jnp.abs(g).max(), grads)  # <- here


@bent
def standardised(grads):
    return jax.tree.map(lambda g: (g - g.mean()) * lax.rsqrt(g.var() + 1e-8), grads)  # <- here


@bent
def clipped_in_a_jit_after_a_scale(grads):
    grads = jax.tree.map(lambda g: g * 0.5, grads)
    return jax.jit(lambda g: optax.clip(0.01).update(g, optax.EmptyState())[0])(grads)  # <- here


@bent
def skipped_if_large(grads):
    size = sum(jnp.abs(g).sum() for g in jax.tree.leaves(grads))  # <- here
    return lax.cond(size > 1.0, each(jnp.zeros_like), lambda g: g, grads)


@corpus.bent("grads['w']", make=matrices)
def polar_factor(state, batch):
    def round_of(_, x):
        return 1.5 * x - 0.5 * x @ x.T @ x  # <- here

    grads = gradients(state, batch)
    w = lax.fori_loop(0, 3, round_of, 2 * grads["w"])
    return state.apply_gradients({**grads, "w": w}), {}


@corpus.bent("grads['w']", make=matrices)
def orthogonal(state, batch):
    grads = gradients(state, batch)
    u, _, v = jnp.linalg.svd(grads["w"], full_matrices=False)  # <- here
    return state.apply_gradients({**grads, "w": u @ v}), {}


@corpus.bent(*ALL, make=matrices)
def conflicts_of_two_tasks_projected_away(state, batch):
    a, b = gradients(state, batch), jax.grad(other_loss)(state.params, batch)
    overlap = jnp.minimum(optax.tree.vdot(a, b), 0) / optax.tree.vdot(b, b)  # <- here
    grads = jax.tree.map(lambda a, b: a + b - overlap * b, a, b)
    return state.apply_gradients(grads), {}


@corpus.right(make=matrices)
def sum_of_two_tasks(state, batch):
    a, b = gradients(state, batch), jax.grad(other_loss)(state.params, batch)
    return state.apply_gradients(jax.tree.map(lambda a, b: a + 0.3 * b, a, b)), {}


@corpus.bent(*ALL, make=matrices)
def clipped_after_micro_batches(state, batch):
    _, grads = jdp.value_and_grad(loss_fn, accumulate=2)(state.params, batch)
    grads = jax.tree.map(lambda g: jnp.clip(g, -1e-2, 1e-2), grads)  # <- here
    return state.apply_gradients(grads), {}


@corpus.right(make=matrices)
def scaled_after_micro_batches(state, batch):
    _, grads = jdp.value_and_grad(loss_fn, accumulate=2)(state.params, batch)
    return state.apply_gradients(jax.tree.map(lambda g: -2 * g.T.T, grads)), {}


def of_rows(state, batch):
    def of_row(x, y):
        return jax.grad(loss_fn)(state.params, {"x": x[None], "y": y[None]})

    return jax.vmap(of_row)(batch["x"], batch["y"])


@corpus.bent(*ALL, make=matrices)
def clipped_after_rows_were_added(state, batch):
    grads = jax.tree.map(lambda g: g.mean(0), of_rows(state, batch))
    grads = jax.tree.map(lambda g: jnp.clip(g, -1e-2, 1e-2), grads)  # <- here
    return state.apply_gradients(grads), {}


@corpus.right(make=matrices)
def clipped_row_by_row(state, batch):
    clipped = jax.tree.map(lambda g: jnp.clip(g, -1e-2, 1e-2).mean(0), of_rows(state, batch))
    return state.apply_gradients(clipped), {}


@corpus.right(make=matrices)
def clipped_row_by_row_in_a_loop(state, batch):
    def add(total, row):
        grads = jax.grad(loss_fn)(state.params, jax.tree.map(lambda x: x[None], row))
        return jax.tree.map(lambda t, g: t + jnp.clip(g, -1e-2, 1e-2), total, grads), None

    total, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, state.params), batch)
    n = batch["x"].shape[0]
    return state.apply_gradients(jax.tree.map(lambda g: g / n, total)), {}


@linear
def scaled(grads):
    return jax.tree.map(lambda g: -g * 3 / 128, grads)


@linear
def masked(grads):
    return {"b": grads["b"], "w": jnp.where(MATRIX[:, :1] > 0, grads["w"], 0)}


@linear
def cast_down_and_up(grads):
    return jax.tree.map(lambda g: g.astype(jnp.bfloat16).astype(jnp.float32), grads)


@linear
def centred(grads):
    return {"b": grads["b"], "w": grads["w"] - grads["w"].mean(0, keepdims=True)}


@linear
def mixed_by_a_matrix(grads):
    return {"b": grads["b"], "w": jnp.linalg.solve(MATRIX, MATRIX.T @ grads["w"])}


@linear
def put_into_one_vector(grads):
    flat, unravel = ravel_pytree(grads)
    return unravel(jnp.cumsum(flat[::-1])[::-1].at[3].multiply(2.0))


@linear
def without_nan(grads):
    is_finite = sum(jnp.isnan(g).sum() + jnp.isinf(g).sum() for g in jax.tree.leaves(grads)) == 0
    return jax.tree.map(lambda g: jnp.where(is_finite, jnp.nan_to_num(g), 0), grads)


@corpus.right(make=matrices)
def weighed_by_the_rows_of_this_rank(state, batch):
    count = jnp.sum(batch["y"] > 0) + 1.0
    share = lax.axis_size("data") * count / jdp.sum_over_ranks(count)
    grads = jax.tree.map(lambda g: g * share, gradients(state, batch))
    return state.apply_gradients(grads), {}


@corpus.right(make=matrices)
def at_a_point_uphill_of_this_rank(state, batch):
    """Sharpness-aware: the first gradient moves the parameters of the second loss."""
    first = gradients(state, batch)
    size = optax.tree.norm(first)
    there = jax.tree.map(lambda p, g: p + 0.05 * g / size, state.params, first)
    loss, grads = jax.value_and_grad(loss_fn)(there, batch)
    return state.apply_gradients(grads), {"loss": loss, "perplexity": jnp.exp(loss)}
