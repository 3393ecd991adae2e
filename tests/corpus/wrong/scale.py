"""Wrong by a factor alone: every rank ends with the same, and only `check_step` can tell.

The mean of what is the same everywhere is itself, so the analysis lets uniform gradients pass;
it refuses those that are one sum over ranks, and cannot know what others ought to be.
"""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from corpus.wrong.corpus import gradients, predict
from corpus.wrong.reduced_twice import psum


def sum_over_rows(state, batch):
    def loss(p):
        return jnp.sum((predict(p, batch["x"]) - batch["y"]) ** 2)

    return state.apply_gradients(jax.grad(loss)(state.params)), {}


def sum_with_a_term_of_its_own(state, batch):
    grads = psum(gradients(state, batch))
    grads = jax.tree.map(lambda g, p: g + 1e-3 * p, grads, state.params)
    return state.apply_gradients(grads), {}


def sum_of_gathered_gradients(state, batch):
    grads = lax.all_gather(gradients(state, batch), "data")
    return state.apply_gradients(jax.tree.map(lambda g: g.sum(0), grads)), {}


def sum_that_was_clipped_by_element(state, batch):
    grads = jax.tree.map(lambda g: jnp.clip(g, -9, 9), psum(gradients(state, batch)))
    return state.apply_gradients(grads), {}


def clipped_by_the_own_norm_first(state, batch):
    grads = gradients(state, batch)
    factor = jnp.minimum(1, 0.5 / optax.tree.norm(grads))
    return state.apply_gradients(jax.tree.map(lambda g: g * factor, grads)), {}


PROGRAMS = [
    sum_over_rows,
    sum_with_a_term_of_its_own,
    sum_of_gathered_gradients,
    sum_that_was_clipped_by_element,
    clipped_by_the_own_norm_first,
]
