import json
import math
import os
import re
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from support import training
from support.processes import environment
from support.threads import wait_until

import jdp
from jdp.distributed import agree
from jdp.worker import process_status, progress, watching
from jdp.worker.progress_board import NATIVE


def where():
    return progress.own.slot.read()


def now_in():
    return where().phase


@pytest.fixture
def alone():
    watching.begin_watching(600.0)


def test_a_process_starts_and_is_between_steps_once_it_made_one(alone):
    assert now_in() == process_status.STARTING
    step, state = jdp.train_step(training.plain_step), training.state()
    training.ranks(2)
    assert now_in() == process_status.STARTING
    for i in range(1, 4):
        state, _ = step(state, training.batch())
        assert (now_in(), where().steps) == (process_status.BETWEEN, i)


def test_a_loop_of_ones_own_makes_a_step_with_each_step_of_its_checkpointer():
    watching.begin_watching(600.0, process=0, num_processes=2)
    for i in range(1, 4):
        progress.count_step()
        assert (now_in(), where().steps, where().limit_s) == (process_status.BETWEEN, i, 3600.0)
        assert not progress.own.is_first_step


def test_a_step_that_train_step_has_counted_is_not_counted_by_the_checkpointer_again(alone):
    for i in range(1, 4):
        with progress.TRAIN_STEP:
            pass
        with progress.TRAIN_STEP:  # as of two models that train each other
            pass
        progress.count_step()
        assert where().steps == 2 * i


def test_a_process_is_watched_from_its_first_batch_on():
    watching.begin_watching(600.0, process=0, num_processes=2)
    with jdp.phase("of the author's"):
        pass
    assert now_in() == process_status.STARTING
    for _ in jdp.batches(np.zeros(8), 8, num_steps=2):
        assert now_in() == process_status.UNSTEPPED


def test_all_reduces_are_progress(alone):
    watching.begin_watching(0.2)
    before_s = where().progress_s
    memory = np.frombuffer(own_numbers(), np.int64)
    memory[1] += 1
    wait_until(lambda: where().progress_s > before_s)


def own_numbers():
    return progress.own.slot.memory[NATIVE]


def test_phases_nest_and_the_outer_one_goes_on_since_it_began(alone):
    with jdp.phase("outer", timeout_s=5.0):
        outer = where()
        assert (outer.phase, outer.limit_s) == ("outer", 5.0)
        with pytest.raises(KeyError), jdp.phase("inner", timeout_s=math.inf):
            assert (now_in(), where().limit_s) == ("inner", math.inf)
            raise KeyError
        assert where()[4:7] == outer[4:7]
        assert where().progress_s > outer.progress_s
    assert now_in() == process_status.STARTING


def test_a_phase_may_be_entered_again_and_within_itself(alone):
    same = jdp.phase("again")
    with same, jdp.phase("other"), same:
        assert now_in() == "again"
    assert now_in() == process_status.STARTING


def test_phases_of_several_threads_may_overlap_in_any_order(alone):
    first, second = jdp.phase("first"), jdp.phase("second")
    first.__enter__()
    thread = threading.Thread(target=second.__enter__)
    thread.start()
    thread.join()
    first.__exit__()
    assert now_in() == "second"
    second.__exit__()
    assert now_in() == process_status.STARTING


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan])
def test_a_limit_that_is_over_before_it_begins_is_an_error(timeout_s):
    with pytest.raises(ValueError, match=re.escape(f"timeout_s={timeout_s}")):
        jdp.phase("x", timeout_s=timeout_s)
    mesh = training.ranks(2)
    with pytest.raises(ValueError, match=re.escape(f"timeout_s={timeout_s}")):
        jdp.init(timeout_s=timeout_s)
    assert jdp.distributed.mesh.current_mesh() is mesh


def test_who_waits_to_be_told_something_is_seen_to_wait(alone, monkeypatch):
    seen = []

    def get(key, *, timeout_s):
        seen.append(now_in())
        return json.dumps({"value": key[-1], "what": "a test"})

    for name, fake in (("put", lambda *_: None), ("delete", lambda *_: None), ("get", get)):
        monkeypatch.setattr(agree.kv_store, name, fake)
    with jdp.phase("saving"):
        assert agree.all_gather((0, 1), "mine", what="a test") == {0: "0", 1: "1"}
        assert now_in() == "saving"
    assert seen == [process_status.WAITING] * 2


def test_a_phase_without_a_name_is_an_error():
    with pytest.raises(ValueError, match="downloading"):
        jdp.phase("")


def test_a_step_is_compiled_while_it_is_traced_and_never_after():
    training.ranks(2)
    seen = []

    @jdp.train_step
    def step(state, batch):
        seen.append(now_in())
        return training.plain_step(state, batch)

    state = training.state()
    for num_rows in (24, 24, 12, 24):
        state, _ = step(state, training.batch(num_rows=num_rows))
        assert now_in() == process_status.BETWEEN
        seen.append(num_rows)
    traces = seen.index(24)
    assert seen == [*["compiling"] * traces, 24, 24, *["compiling"] * traces, 12, 24]


def test_a_step_that_is_refused_leaves_its_phases():
    training.ranks(2)

    @jdp.train_step
    def step(state, batch):
        raise KeyError("refused")

    before = where().steps
    for call in (step, step.lower):
        with pytest.raises(KeyError):
            call(training.state(), training.batch())
        assert now_in() == process_status.STARTING
    assert where().steps == before


def test_a_step_inside_the_authors_jit_is_not_counted(alone):
    training.ranks(2)
    step = jdp.train_step(training.plain_step)
    jax.jit(step)(training.state(), training.batch())
    assert (now_in(), where().steps) == (process_status.STARTING, 0)


def test_evaluating_is_a_phase_in_which_each_batch_is_progress_and_no_step(alone):
    training.ranks(2)
    seen = []

    @jdp.eval_step
    def measure(state, batch):
        return {"loss": training.loss_fn(state.params, batch)}

    def batches():
        for i in range(3):
            seen.append(where())
            yield training.batch(i)

    jdp.evaluate(measure, training.state(), batches())
    assert [(it.phase, it.steps) for it in seen] == [("evaluating", 0)] * 3
    assert seen[0].since_s == seen[2].since_s
    assert seen[0].progress_s < seen[1].progress_s < seen[2].progress_s
    assert now_in() == process_status.STARTING


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loop_that_waits_for_a_batch_says_so(prefetch, alone):
    training.ranks(2)
    asked, answer = threading.Event(), threading.Event()

    def loader():
        yield training.batch()
        asked.set()
        answer.wait(10)
        yield training.batch()

    seen = []

    def look():
        asked.wait(10)
        deadline = time.monotonic() + 10
        while (phase := now_in()) != "waiting for data" and time.monotonic() < deadline:
            time.sleep(0.001)  # or this thread would keep Python's lock from the one it looks at
        seen.append(phase)
        answer.set()

    looker = threading.Thread(target=look)
    looker.start()
    for _ in jdp.shard_batches(loader(), prefetch=prefetch):
        assert now_in() == process_status.UNSTEPPED
    looker.join()
    assert seen == [process_status.DATA]


def test_what_a_process_forks_off_does_not_speak_for_it(alone):
    reader, writer = os.pipe()
    program = f"""
import os
from jdp.distributed import agree
from jdp.worker import progress, watching
watching.begin_watching(None)
if not (child := os.fork()):
    with progress.TRAIN_STEP:
        pass
    raise SystemExit
os.waitpid(child, 0)
where = progress.own.slot.read()
os.write({writer}, f"{{where.steps}} {{where.phase}}".encode())
"""
    subprocess.run(
        [sys.executable, "-c", program], pass_fds=[writer], env=environment(), timeout=240
    )
    assert os.read(reader, 100) == b"0 starting"


def reduce(num_steps):
    """Counts of all-reduces before and after some steps, and the bucket of the last."""
    jdp.init()
    step, state = jdp.train_step(training.plain_step), training.state()
    counts = []
    for i in range(num_steps):
        batches = jdp.batches(training.batch(i), 24, num_steps=1)
        state, metrics = step(state, next(iter(batches)))
        jax.block_until_ready((state.params, metrics))
        counts.append(where()[8:11])
    return counts


def test_all_reduces_of_the_native_library_are_seen_from_outside(processes):
    for counts in processes(2).run(reduce, 3):
        entered = np.diff([entered for entered, _, _ in counts])
        assert entered[0] == entered[1] > 0
        assert entered[0] % 2 == 0, "each of two ranks counts"
        assert all(entered == done for entered, done, _ in counts)
