"""Errors of steps that are still running when the next one is called."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.training import ranks

import jdp
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.distributed import in_flight


def code_of(function):
    """The code of the error that a function raises; None if it raises none."""
    try:
        function()
    except RuntimeError as error:
        return str(error).rpartition(" ")[2].rstrip(")")


@jdp.eval_step(weight=lambda batch: batch.min())
def weighted(params, batch):
    return {"mean": batch.mean()}


@jdp.train_step
def add_mean(state, batch):
    return state + jdp.mean_over_ranks(batch.mean()), {}


def test_a_step_that_fails_leaves_the_calls_of_other_steps_to_be_checked(monkeypatch):
    ranks(2)
    state, _ = add_mean(jnp.float32(0), np.ones(2, np.float32))
    in_flight.drain()

    def fail():
        raise RuntimeError("INTERNAL: jdp: rank 1 is missing")

    with monkeypatch.context() as patch:
        patch.setattr(cpu_runtime, "check", fail)
        add_mean(state, np.ones(2, np.float32))
    weighted(jnp.float32(0), -np.ones(2, np.float32))  # no weight is negative
    assert [code_of(in_flight.drain) for _ in range(3)] == ["JDP214", "JDP212", None]


def test_a_call_whose_arrays_were_deleted_by_hand_is_no_error():
    ranks(2)
    state, _ = add_mean(jnp.float32(0), np.ones(2, np.float32))
    jax.block_until_ready(state)
    add_mean(state, np.ones(2, np.float32))
    assert in_flight._calls
    for call in in_flight._calls:
        call.weight.delete()
    in_flight.drain()
    assert not in_flight._calls


@pytest.mark.parametrize("num_calls", [1, 20])
def test_calls_are_drained_in_order_and_counted(num_calls):
    ranks(2)
    state = jnp.float32(0)
    for _ in range(num_calls):
        state, _ = add_mean(state, np.ones(2, np.float32))
    in_flight.drain()
    assert float(state) == num_calls and in_flight.latest_spec() is None
