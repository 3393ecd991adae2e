"""Placing a state leaves little behind with its arrays, and waits without Python's lock."""

import contextlib
import functools
import gc
import logging
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.processes import Processes
from support.training import ranks

import jdp
from jdp.step_spec import StepSpec
from jdp.training import placing

NUM_LEAVES = 100


def is_kept(_):
    return 0


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_an_array_of_a_state_keeps_two_objects_on_any_number_of_ranks(num_ranks):
    mesh = ranks(num_ranks)
    spec = StepSpec(is_kept, ("data",), None, donate=True, returns_state=True)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    state = jax.device_put([np.full(3, i, "float32") for i in range(NUM_LEAVES)], whole)
    placing.place_state(state, mesh, spec)  # what it imports or caches is there now
    state = jax.device_put([jnp.copy(leaf) for leaf in state], whole)
    gc.collect()
    before = len(gc.get_objects())
    placed = placing.place_state(state, mesh, spec)
    gc.collect()
    # A view of its data on the first device, and the sharding of that.
    assert len(gc.get_objects()) - before < 2.5 * NUM_LEAVES
    assert all(new is old for new, old in zip(placed, state, strict=True))


def alternate_behind_callbacks():
    ranks(3)

    def take_long_on_rank_1(rank):
        time.sleep(0.2 * int(rank))
        return np.float32(1)

    @jdp.train_step
    def calls_back(state, batch):
        rank, one = jax.lax.axis_index("data") == 1, jax.ShapeDtypeStruct((), np.float32)
        return state.apply_gradients(
            {"w": jnp.ones(4) * jax.pure_callback(take_long_on_rank_1, one, rank)}
        ), {}

    def plain(state, batch):
        return state.apply_gradients({"w": jnp.ones(4) * batch.mean()}), {}

    steps = jdp.train_step(plain), jdp.train_step(functools.partial(plain))
    batch = np.ones((6, 1), np.float32)

    def new_state():
        return jdp.TrainState.create({"w": np.zeros(4)}, jdp.replicated(optax.sgd(1.0)))

    other = new_state()
    ranks(2)
    state = new_state()
    for step in steps:  # compile
        state, _ = step(state, batch)
    state = new_state()
    for _ in range(5):
        other, _ = calls_back(other, batch)
    for _ in range(3):
        for step in steps:
            state, _ = step(state, batch)
    return [
        np.asarray(shard.data) for x in (state, other) for shard in x.params["w"].addressable_shards
    ]


# Placing a state of another step reads addresses of arrays, which on a CPU waits for their values.
@pytest.mark.processes
@pytest.mark.xdist_group("processes")
def test_steps_in_turn_do_not_wait_for_ever_behind_callbacks():
    with contextlib.closing(Processes(1, num_devices=8)) as process:
        [found] = process.run(alternate_behind_callbacks)
    for values, right in zip(found, 2 * (-6,) + 3 * (-5,), strict=True):
        np.testing.assert_array_equal(values, np.full(4, right))


def adds(state, batch, big):
    return state.apply_gradients({"w": jnp.full(4, big.sum())}), {}


@pytest.mark.parametrize(
    ("place", "is_named"),
    [
        (lambda x, mesh: x, True),
        (lambda x, mesh: jnp.asarray(x), True),
        (lambda x, mesh: jax.device_put(x, jax.devices()[0]), True),
        (lambda x, mesh: x[:100], False),
        (lambda x, mesh: jax.device_put(x, NamedSharding(mesh, PartitionSpec())), False),
    ],
    ids=["NumPy", "jnp", "one device", "small", "placed"],
)
def test_a_large_argument_that_each_call_copies_is_logged_once(place, is_named, caplog):
    mesh = ranks(2)
    step = jdp.train_step(adds)
    big = place(np.zeros(1 << 19, "float32"), mesh)
    state = jdp.TrainState.create({"w": jnp.zeros(4)}, jdp.replicated(optax.sgd(0.1)))
    with caplog.at_level(logging.WARNING, "jdp"):
        for _ in range(10):
            state, _ = step(state, np.zeros((4, 1), "float32"), big)
    assert len(caplog.messages) == is_named
    assert all("`big` (2.1 MB)" in line and "jax.device_put" in line for line in caplog.messages)


def test_large_arguments_that_differ_from_call_to_call_are_not_logged(caplog):
    ranks(2)
    step = jdp.train_step(adds)
    state = jdp.TrainState.create({"w": jnp.zeros(4)}, jdp.replicated(optax.sgd(0.1)))
    with caplog.at_level(logging.WARNING, "jdp"):
        for i in range(10):
            big = np.full(1 << 19, i, "float32")
            state, _ = step(state, np.zeros((4, 1), "float32"), big)
    assert not caplog.messages
