"""The first state of an optimizer is made by one program, and errors of that program show."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.sharded_training import optimizer, params
from support.training import ranks

import jdp
from jdp.training import shard_layout


def with_init(init):
    """SGD whose state is what a function of the parameters returns."""
    return optax.GradientTransformation(init, lambda grads, state, params=None: (grads, state))


def created(stage, init, caplog):
    """The state of an optimizer on 2 ranks, and what was logged."""
    ranks(2)
    with caplog.at_level(logging.INFO, "jdp"):
        state = jdp.TrainState.create(params(), optimizer(stage, with_init(init)))
    logged = [each for each in caplog.records if "jax.numpy" in each.getMessage()]
    return state.opt_state, logged


def reads_a_value(tree):
    return jax.tree.map(lambda x: x * 0 + float(jnp.max(tree["w"])), tree)


def returns_text(tree):
    return {"kind": "momentum", **jax.tree.map(jnp.zeros_like, tree)}


def reads_a_placement(tree):
    return {"w": jnp.zeros_like(tree["w"]) + len(tree["w"].addressable_shards)}


@pytest.mark.parametrize("stage, level", [(0, logging.INFO), (1, logging.WARNING)])
@pytest.mark.parametrize("init", [reads_a_value, returns_text, reads_a_placement])
def test_an_init_that_cannot_be_traced_is_run_and_logged_once(stage, level, init, caplog):
    created(stage, init, caplog)
    made, (record,) = created(stage, init, caplog)
    want = init(jax.tree.map(jnp.asarray, params()))
    if init is reads_a_placement:
        want = {"w": np.full((24, 48), 2, "f")}
    jax.tree.map(np.testing.assert_array_equal, made, want)
    share = made["w"].addressable_shards[0].data.size / made["w"].size
    assert share == (1 if stage == 0 else 0.5)
    assert record.levelno == level


def test_an_init_that_can_be_traced_logs_nothing(caplog):
    state, logged = created(1, lambda tree: jax.tree.map(jnp.zeros_like, tree), caplog)
    assert not logged and state["w"].addressable_shards[0].data.size == state["w"].size / 2


@pytest.mark.parametrize("error", [KeyError, TypeError, ValueError])
def test_a_mistake_of_the_author_shows(error, caplog):
    def init(tree):
        raise error("a bug of the author")

    with pytest.raises(error, match="a bug of the author"):
        created(1, init, caplog)


def test_an_error_while_the_program_is_made_shows_and_the_init_is_not_run_whole(monkeypatch):
    def fail(*args):
        raise NotImplementedError("a layout that JAX does not know")

    runs = []

    def init(tree):
        runs.append(isinstance(tree["w"], jax.core.Tracer))
        return jax.tree.map(jnp.zeros_like, tree)

    ranks(2)
    monkeypatch.setattr(shard_layout, "partition_of_optimizer", fail)
    with pytest.raises(NotImplementedError, match="a layout"):
        jdp.TrainState.create(params(), optimizer(1, with_init(init)))
    assert all(runs)
