"""Processes that wait for each other in different calls end, and the error names both calls."""

import threading

import pytest

from jdp.distributed import call_log, kv_store
from jdp.distributed.call_log import Call, CallLog, Described
from jdp.distributed.checks import call_mismatch

STEP = Described("call 2 of `step`", "step", {"batch": "float32[8]"})
SMALL = STEP._replace(shapes={"batch": "float32[4]"})
OTHER = Described("call 1 of `other`", "other", {})
COMPARED = Described("the comparison of x", "", {})


def test_a_call_has_its_number_though_another_thread_reads_before_it_is_counted():
    log = CallLog()
    for name in "abc":
        log.record(Call(name))
    log.num_calls -= 1  # as between the two lines of `record`
    assert {number: each.what for number, each in log.latest().items()} == {1: "a", 2: "b", 3: "c"}


@pytest.mark.parametrize(
    ("mine", "theirs", "number"),
    [
        ({1: STEP, 2: STEP}, {1: STEP, 2: STEP}, None),
        ({1: STEP, 2: STEP}, {2: STEP, 3: OTHER}, None),  # one is ahead
        ({1: STEP}, {2: OTHER}, None),
        ({}, {1: STEP}, None),
        ({1: STEP, 2: STEP}, {1: STEP, 2: OTHER}, 2),
        ({1: STEP}, {1: SMALL, 2: OTHER}, 1),
        ({1: COMPARED}, {1: STEP}, 1),
        ({1: COMPARED}, {1: COMPARED._replace(what="the comparison of y")}, None),  # JDP207
        ({1: None, 2: STEP}, {1: OTHER, 2: STEP}, None),  # was refused
    ],
)
def test_the_first_difference_is_found_where_both_logs_reach(mine, theirs, number):
    found = call_log.first_difference(mine, theirs)
    assert (found and found[0]) == number
    turned = call_log.first_difference(theirs, mine)
    assert (turned and turned[0]) == number


def test_a_log_numbers_its_latest_calls_and_hides_refused_ones():
    log = CallLog()
    for number in range(1, 41):
        log.record(Call(f"call {number} of `f`", "f", lambda: {"batch": "int8[3]"}))
    log.record(Call("call 1 of `g`", "g")).was_refused = True
    latest = log.latest()
    assert list(latest) == list(range(42 - call_log.NUM_KEPT, 42)) and latest[41] is None
    assert latest[40] == Described("call 40 of `f`", "f", {"batch": "int8[3]"})


def test_both_calls_and_the_shapes_that_differ_are_named():
    text = call_mismatch.described(0, 3, 7, STEP, SMALL)
    assert "call 2 of `step` (batch float32[8]) on process 0" in text and "JDP211" in text
    assert "call 2 of `step` (batch float32[4]) on process 3" in text and "call 7 " in text
    text = call_mismatch.described(0, 3, 7, COMPARED, OTHER)
    assert "the comparison of x on process 0" in text and "`other` on process 3" in text


@pytest.mark.parametrize("compares", [False, True])
def test_a_process_ends_though_the_store_does_not_answer(monkeypatch, compares):
    answers, asked = threading.Event(), []

    def replace(key, value):
        asked.append(key)
        answers.wait()

    log = CallLog()
    log.record(Call("call 1 of `f`"))
    monkeypatch.setattr(call_log, "logs", {(0, 1): log})
    monkeypatch.setattr(kv_store, "replace", replace)
    monkeypatch.setattr(call_mismatch, "_END_S", 0.1)
    monkeypatch.setattr(call_mismatch.atexit, "register", lambda function: function)
    calls = call_mismatch.DifferentCalls(patience_s=0.0)
    calls.watch_end()
    if compares:
        calls.poll(is_waiting=True)
    end = threading.Thread(target=calls._end, daemon=True)
    end.start()
    end.join(20.0)
    has_ended = not end.is_alive()
    answers.set()
    end.join()
    assert has_ended and asked == ["jdp/calls/0-1/0"]


# Both sets of programs are known to all processes when they differ: nothing is compared before.
SCRIPT = """
import sys, time
import jax, jax.numpy as jnp, numpy as np, optax
import jdp
from jdp.distributed.checks import call_mismatch
jdp.init()
call_mismatch.current._patience_s = 0.5
me = jax.process_index()

def loss_fn(w, rows):
    return jnp.mean((rows @ w - 1) ** 2)

@jdp.train_step
def step(state, rows):
    grads = jax.grad(loss_fn)(state.params, rows)
    return state.apply_gradients(grads), {}

@jdp.eval_step
def measure(params, rows):
    return {"loss": loss_fn(params, rows), "rows": jdp.rows(rows)}

def shard(num):
    return next(iter(jdp.shard_batches([np.ones((num, 4), np.float32)])))

optimizer = jdp.replicated(optax.sgd(0.1), all_reduce=ALL_REDUCE)
state = jdp.TrainState.create(jnp.zeros(4), optimizer)
many, few = shard(3), shard(1)
state, _ = step(state, many)
jdp.evaluate(measure, state.params, [many])
jax.block_until_ready(state)
if DIFFERS:
    exec(sys.argv[1])
for _ in range(3):
    state, _ = step(state, many)
jdp.check_replicas(state)
print("ended with", state.params.tolist())
"""

CASES = {
    "evaluate": ("if me == 1: jdp.evaluate(measure, state.params, [many])", "`measure`"),
    "the state": ("if me == 0: jdp.check_replicas(state)", "state's hashes"),
    "shapes": ("state, _ = step(state, many if me else few)", "float32[2,4]"),
    "a loop": (
        "for rows in jdp.shard_batches([np.ones((6, 4), np.float32)] * 3):\n"
        "    if me == 0: state, _ = step(state, rows)",
        "the end of its loop over batches",
    ),
    "first call": ("if me == 1: step.without_donation()(state, few)", "float32[2,4]"),
}


@pytest.mark.processes
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    ("name", "all_reduce"), [*zip(CASES, ["native", "xla", "xla", "xla", "native"], strict=True)]
)
def test_processes_that_make_different_calls_end_with_both_names(jdp_run, name, all_reduce):
    act, other = CASES[name]
    script = SCRIPT.replace("ALL_REDUCE", f"jdp.collectives.{all_reduce}")
    run = jdp_run(
        *("--nproc-per-node=2", "--max-restarts=0", "--standbys=0"),
        before=act,
        **{
            "script": script.replace("DIFFERS", "True"),
            "XLA_FLAGS": "",
            "JAX_NUM_CPU_DEVICES": "1",
        },
    )
    assert run.wait() == 1
    line = next(line for line in run.output.splitlines() if "JDP211" in line)
    assert "`step`" in line and other in line and "process 0" in line and "process 1" in line


@pytest.mark.processes
@pytest.mark.xdist_group("processes")
def test_processes_that_make_equal_calls_may_take_their_time(jdp_run):
    """Also after calls that were refused on all processes, since their shapes differed."""
    act = """
import contextlib
for bad in (few, many) if me else (many, few):
    with contextlib.suppress(ValueError):
        step.without_donation()(state, bad)
if me == 1:
    time.sleep(3)
"""
    script = SCRIPT.replace("ALL_REDUCE", "jdp.collectives.native").replace("DIFFERS", "True")
    run = jdp_run(
        *("--nproc-per-node=2", "--max-restarts=0", "--standbys=0"),
        before=act,
        **{"script": script, "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"},
    )
    assert run.wait() == 0, run.output
    assert "ended with" in run.output


def test_a_process_that_waits_for_nobody_compares_nothing():
    found = call_mismatch.DifferentCalls(patience_s=0.0)
    found.poll(is_waiting=False)
    assert found._thread is None
