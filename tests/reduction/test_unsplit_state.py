"""`jdp.sharded` logs once what it does not split outside of a `TrainState`."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.training import ranks

import jdp

PARAMS = {"w": np.ones((8, 6), "f"), "odd": np.ones(5, "f")}


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2) + jnp.sum(params["odd"]) * x.mean()


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.WARNING, "jdp")
    # Not the leaves that stay whole in a `TrainState`, which another line names.
    return lambda: [text for text in caplog.messages if "jdp.TrainState.create(params, tx)" in text]


def optimizer(stage):
    return jdp.sharded(optax.sgd(0.1, momentum=0.9), stage=stage, min_size=1)


def train_with_a_state_of_ones_own(tx):
    @jdp.train_step
    def step(state, x):
        params, opt_state = state
        grads = jax.grad(loss_fn)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {}

    return step((PARAMS, tx.init(PARAMS)), np.ones((8, 8), "f"))


def train_in_a_shard_map(tx, mesh):
    def on_rank(state, x):
        return state.apply_gradients(jax.grad(loss_fn)(state.params, x)).params

    state = jdp.TrainState.create(PARAMS, tx)
    specs = jax.tree.map(lambda x: P(), state)
    mapped = jax.shard_map(
        on_rank, mesh=mesh, in_specs=(specs, P("data")), out_specs=P(), check_vma=False
    )
    return jax.jit(mapped)(state, np.ones((8, 8), "f"))


# `w` of 48 floats is split over 2 and 8 ranks; its momentum at every stage, itself at stage 3.
@pytest.mark.parametrize("stage, arrays, num_bytes", [(1, 1, 192), (2, 1, 192), (3, 2, 384)])
@pytest.mark.parametrize("n", [2, 8])
def test_a_state_of_ones_own_is_logged_once_with_its_bytes(logged, n, stage, arrays, num_bytes):
    ranks(n)
    for _ in range(2):
        train_with_a_state_of_ones_own(optimizer(stage))
    (text,) = logged()
    numbers = f"stage={stage}.* {arrays} arrays .* {num_bytes} bytes .* {n} ranks"
    assert re.search(numbers, text) and "jdp.TrainState.create(params, tx)" in text


def test_a_shard_map_of_ones_own_is_logged(logged):
    train_in_a_shard_map(optimizer(1), ranks(2))
    assert len(logged()) == 1


def test_nothing_is_logged_in_a_train_state_on_one_rank_or_where_nothing_divides(logged):
    @jdp.train_step
    def step(state, x):
        return state.apply_gradients(jax.grad(loss_fn)(state.params, x)), {}

    ranks(2)
    step(jdp.TrainState.create(PARAMS, optimizer(3)), np.ones((8, 8), "f"))
    whole = jdp.sharded(optax.sgd(0.1, momentum=0.9), min_size=1000)
    train_with_a_state_of_ones_own(whole)
    train_with_a_state_of_ones_own(jdp.replicated(optax.sgd(0.1, momentum=0.9)))
    ranks(1)
    train_with_a_state_of_ones_own(optimizer(1))
    assert logged() == []
