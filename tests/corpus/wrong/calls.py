"""Calls that are refused before or while the step is traced, each by an error of its own."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import jax_utils
from jax import lax

import jdp
from corpus.wrong.corpus import gradients, loss_fn, training


class Call(NamedTuple):
    """Something to call on 4 ranks, and the ValueError that it must raise."""

    call: Callable[[], object]
    message: str  # a regular expression


CALLS: list[Call] = []


def refused(message):
    def note(call):
        CALLS.append(Call(call, message))
        return call

    return note


def lower(step, state, batch, *rest, **options):
    return jdp.train_step(step, **options).lower(state, batch, *rest)


def applied(state, batch):
    return state.apply_gradients(gradients(state, batch)), {}


@refused("Differentiate with respect to state.params as a whole")
def gradients_of_the_trainable_part_alone():
    def step(state, batch):
        grad = jax.grad(lambda b: loss_fn({**state.params, "b": b}, batch))(state.params["b"])
        return state.apply_gradients({"b": grad}), {}

    lower(step, *training(trainable={"w": False, "b": True}))


@refused(r"an array of 1 dim\(s\), and a scan or vmap stacked it to float32\[3, 2\]")
def rows_stacked_by_a_scan():
    def step(state, batch):
        return lax.scan(lambda s, _: (s, {"y": jdp.rows(batch["y"])}), state, None, length=3)

    lower(step, *training())


@refused(r"an array of 1 dim\(s\), and a scan or vmap stacked it to float32\[2, 2\]")
def rows_stacked_by_a_vmap_of_as_many():
    def step(state, batch):
        return state, jax.vmap(lambda k: {"y": jdp.rows(k * batch["y"])})(jnp.arange(2.0))

    lower(step, *training())


@refused(r"accumulate=4, but `batch\['x'\]` has 2 rows on each rank")
def more_micro_batches_than_rows():
    def step(state, batch):
        _, grads = jdp.value_and_grad(loss_fn, accumulate=4)(state.params, batch)
        return state.apply_gradients(grads), {}

    lower(step, *training())


@refused("4 devices.*has a dim for the devices.*jax_utils.unreplicate")
def state_of_a_pmap():
    jdp.init(devices=jax.devices()[:4])
    state, batch = training()
    lower(applied, jax_utils.replicate(state, jax.devices()[:4]), batch)


@refused(r"but not 'rows'")
def step_over_an_axis_that_the_mesh_has_not():
    lower(applied, *training(), axis_name="rows")
