"""Wrong by a factor alone: every rank ends with the same, and only `check_step` can tell.

The mean of what is the same everywhere is itself, so the analysis lets uniform gradients pass;
it refuses those that are one sum over ranks, and cannot know what others ought to be.
"""

import jax
import jax.numpy as jnp
import optax

from corpus.wrong.corpus import gradients, predict


def sum_over_rows(state, batch):
    def loss(p):
        return jnp.sum((predict(p, batch["x"]) - batch["y"]) ** 2)

    return state.apply_gradients(jax.grad(loss)(state.params)), {}


def clipped_by_the_own_norm_first(state, batch):
    grads = gradients(state, batch)
    factor = jnp.minimum(1, 0.5 / optax.tree.norm(grads))
    return state.apply_gradients(jax.tree.map(lambda g: g * factor, grads)), {}


PROGRAMS = [sum_over_rows, clipped_by_the_own_norm_first]
