"""Steps that do not end because processes called them with other arguments are named."""

from types import SimpleNamespace

import pytest

from jdp.distributed import fail_fast
from jdp.distributed.in_flight import Overdue, StepCall


def calls(*numbers, asked):
    def difference(given, *, timeout_s):
        asked.append(given.small)
        return DIFFERENCES[given.small]

    def explained(given, call):
        return f"{call}: {DIFFERENCES[given.small]}"

    spec = SimpleNamespace(name="step")
    compares = SimpleNamespace(difference=difference, explained=explained)
    given = {n: SimpleNamespace(small=n, large=[]) for n in numbers}
    program = SimpleNamespace(arguments=compares)
    return [StepCall(spec, n, program, given[n]) for n in numbers]


DIFFERENCES = {1: None, 2: "`key`.", 3: None, 4: None}


def test_calls_that_do_not_end_are_explained_once(monkeypatch):
    asked, overdue, ended_by = [], Overdue(patience_s=0.0), []
    monkeypatch.setattr(fail_fast, "end_process", ended_by.append)
    overdue.poll([])
    for _ in range(3):
        wait_for(overdue.poll(calls(1, 2, 3, asked=asked)))
    assert asked == [1, 2]
    wait_for(overdue.poll(calls(3, 4, asked=asked)))
    assert asked == [1, 2, 3, 4]
    [error] = ended_by
    assert "call 2 of `step`" in str(error) and "`key`." in str(error)


def test_calls_that_end_in_time_are_not_compared():
    asked, overdue = [], Overdue(patience_s=1000.0)
    assert overdue.poll(calls(1, asked=asked)) is None
    assert asked == []


def wait_for(thread):
    if thread is not None:
        thread.join(10.0)


SCRIPT = """
import jax, jax.numpy as jnp, numpy as np, optax
import jdp
from jdp.distributed import in_flight
jdp.init()
in_flight._overdue._patience_s = 0.5
me = jax.process_index()

@jdp.train_step
def step(state, rows, key):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((rows @ w - 1) ** 2))(state.params)
    loss = jax.lax.cond(jax.random.bernoulli(key), jdp.mean_over_ranks, lambda x: 2 * x, loss)
    return state.apply_gradients(grads), {"loss": loss}

keys = {bool(jax.random.bernoulli(key)): key for key in map(jax.random.key, range(20))}
state = jdp.TrainState.create(jnp.zeros(4), jdp.replicated(optax.sgd(0.1)))
rows = next(iter(jdp.batches(np.ones((6, 4), np.float32), 6, num_steps=1)))
for n in range(6):
    state, _ = step(state, rows, keys[n == 3 and me == 1])
jdp.check_replicas(state)
"""


@pytest.mark.processes
@pytest.mark.xdist_group("processes")
def test_a_key_that_differs_under_a_cond_is_named_when_the_ranks_wait_for_each_other(jdp_run):
    run = jdp_run(
        *("--nproc-per-node=2", "--max-restarts=0"),
        **{"script": SCRIPT, "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"},
    )
    assert run.wait() == 1
    line = next(line for line in run.output.splitlines() if "call 4 of `step`" in line)
    assert "`key`" in line and "process 1" in line and "process 0: " in line and "JDP211" in line
