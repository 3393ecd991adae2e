"""Errors of steps that are still running when the next one is called."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.training import ranks, step_of

import jdp
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

    failures = [RuntimeError("INTERNAL: jdp: rank 1 is missing")]

    def fail_once():
        if failures:
            raise failures.pop()

    add_mean(state, np.ones(2, np.float32))
    monkeypatch.setattr(in_flight.latest_call().program, "check", fail_once)
    weighted(jnp.float32(0), -np.ones(2, np.float32))  # no weight is negative
    assert [code_of(in_flight.drain) for _ in range(3)] == ["JDP214", "JDP212", None]


fails = []


@jdp.train_step
def may_fail(state, batch):
    def add_one(x):
        if fails:
            raise ValueError("no such file")
        return np.float32(x + 1)

    shape = jax.ShapeDtypeStruct((), jnp.float32)
    value = jax.pure_callback(add_one, shape, batch.sum())
    return state + jdp.mean_over_ranks(value), {}


def test_a_failure_that_the_author_caught_is_not_reported_again_after_restore(tmp_path):
    ranks(2)
    rows = np.zeros(2, np.float32)
    with jdp.Checkpointer(tmp_path, save_every=3) as ckpt:
        state = ckpt.restore(jnp.float32(0))
        for _ in range(3):
            state, _ = may_fail(state, rows)
            ckpt.step(state)
    fails.append(1)
    try:
        state, _ = may_fail(state, rows)
        with pytest.raises(RuntimeError, match="no such file"):
            jax.block_until_ready(state)  # an error of JAX's, which jdp cannot see
    finally:
        fails.clear()
    weighted(jnp.float32(0), -np.ones(2, np.float32))  # not a training step: reported as ever
    with jdp.Checkpointer(tmp_path, resume=True) as ckpt:
        state = ckpt.restore(jnp.float32(0))
        assert code_of(in_flight.drain) == "JDP212"
        for _ in range(9):
            state, _ = may_fail(state, rows)
            ckpt.step(state)
    assert float(state) == 12


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


# Its callbacks still run when the script ends: Python aborts a process in which one returns then.
CALLS_BACK = """
import time
import jax, jax.numpy as jnp
import jdp
jdp.init(cpu_ranks=2)

def failing(x):
    time.sleep(0.3)
    raise ValueError("no such file")

@jdp.train_step(donate=False)
def step(state, batch):
    value = jax.pure_callback(failing, jax.ShapeDtypeStruct((), jnp.float32), batch[0])
    return state + jdp.mean_over_ranks(value), {}

try:
    for _ in range(20):
        step(jnp.float32(0), jnp.ones(2))
except RuntimeError as error:
    assert "JDP214" in str(error) and "no such file" in str(error)
"""


def test_a_process_whose_steps_failed_waits_for_the_others_of_them_at_its_end():
    command = [sys.executable, "-c", CALLS_BACK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


# Three calls, fewer than are in flight at once.
SKIPS = """
import jax, jax.numpy as jnp, numpy as np, optax
import jdp
jdp.init(cpu_ranks=2)
tx = jdp.replicated(jdp.skip_nonfinite(optax.sgd(0.1), max_consecutive=1))
state = jdp.TrainState.create({"w": jnp.zeros(3)}, tx)

@jdp.train_step
def step(state, batch):
    return state.apply_gradients(jax.grad(lambda p: jnp.mean(batch @ p["w"]))(state.params)), {}

nan = np.full((4, 3), np.nan, "f")
for batch in jdp.shard_batches(nan + jax.process_index() for _ in range(3)):
    state, _ = step(state, batch)
"""
CATCHES = """
try:
    jdp.check_replicas(state)
except RuntimeError as error:
    assert "call 1 of `step` has NaN" in str(error)
"""


@pytest.mark.parametrize("more, number", [("", 1), (CATCHES, 2)])
def test_an_error_that_no_call_has_raised_is_printed_at_exit(more, number):
    command = [sys.executable, "-c", SKIPS + more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.findall("jdp: call (.+) of `step` has NaN", done.stderr) == [str(number)]


@pytest.mark.processes
@pytest.mark.xdist_group("processes")
def test_a_process_with_such_an_error_fails(jdp_run):
    run = jdp_run("--nproc-per-node=2", "--max-restarts=0", script=SKIPS)
    assert run.wait() != 0 and "JDP217" in run.output, run.output


def test_deleted_reports_of_skips_are_no_error():
    ranks(2)
    tx = jdp.replicated(jdp.skip_nonfinite(optax.sgd(0.1)))
    state = jdp.TrainState.create({"w": jnp.zeros(3)}, tx)
    loss = lambda p, batch: jnp.mean(batch @ p["w"])  # noqa: E731
    step_of(loss)(state, np.ones((4, 3), np.float32))
    for call in in_flight._calls:
        call.weight.delete(), call.reports.skips.delete()
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
