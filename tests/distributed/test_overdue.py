"""Steps that do not end because processes called them with other arguments: it is said which."""

import pytest

from jdp.distributed.checks.overdue import Overdue, Unfinished


def test_calls_that_do_not_end_are_explained_once(caplog):
    asked, overdue = [], Overdue(patience_s=0.0)

    def calls(*numbers):
        return [
            Unfinished("step", n, lambda n=n: asked.append(n) or DIFFERENCES[n]) for n in numbers
        ]

    overdue.look([])
    for _ in range(3):
        wait_for(overdue.look(calls(1, 2, 3)))
    assert asked == [1, 2]
    wait_for(overdue.look(calls(3, 4)))
    assert asked == [1, 2, 3, 4]
    assert [record.getMessage().partition("call ")[2] for record in caplog.records] == [
        "2 of `step` was not the same on all processes, so they may wait for each other: `key`."
    ]


DIFFERENCES = {1: None, 2: "`key`.", 3: None, 4: None}


def test_calls_that_end_in_time_are_not_compared():
    overdue = Overdue(patience_s=1000.0)
    assert overdue.look([Unfinished("step", 1, lambda: pytest.fail("asked"))]) is None


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
        *("--nproc-per-node=2", "--max-restarts=0", "--timeout-s=6"),
        **{"script": SCRIPT, "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"},
    )
    assert run.wait() != 0
    assert "A likely cause: call 4 of `step` was not the same on all processes" in run.output
    assert "`key` has other values on process 1 than on process 0: " in run.output
