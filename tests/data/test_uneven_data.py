"""Loops that end after different numbers of batches are an error on every process, and no hang."""

import re
import subprocess
import sys
import threading
import time
import traceback

import jax
import pytest
from support import training
from support.launcher import free_port
from support.processes import ProcessError, environment
from support.threads import wait_until

import jdp
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.data import prefetcher, uneven_data
from jdp.data.uneven_data import LoopEnd, problem_of
from jdp.distributed import agree, in_flight, kv_store, this_process

# Far below the deadlines of all-reduces (300 s) and of gloo.
TIMEOUT_S = 20.0
# In which a program starts, ends inside of a loop, and tells the others.
PROGRAM_TIMEOUT_S = 60.0


# --- What is compared


@pytest.mark.parametrize("mine", [(9, "end"), (9, "left"), (9, "on"), (3, "on")])
@pytest.mark.parametrize("how", ["end", "left"])
def test_equal_ends_are_right_and_so_is_a_process_that_is_behind(how, mine):
    assert problem_of(LoopEnd(0, 9, how), LoopEnd(1, *mine)) is None


@pytest.mark.parametrize(
    "first, mine, text",
    [
        ((0, 9, "end"), (1, 10, "on"), "process 0 .* 9 .*process 1 .* 10"),
        ((2, 0, "left"), (0, 1, "on"), "process 2 .* 0 .*process 0 .* 1,"),
        ((0, 9, "end"), (1, 7, "end"), "process 0 .* 9 .*process 1 .* 7 "),
        ((0, 7, "end"), (1, 9, "left"), "process 0 .* 7 .*process 1 .* 9 "),
    ],
)
def test_both_processes_and_both_numbers_are_named(first, mine, text):
    problem = problem_of(LoopEnd(*first), LoopEnd(*mine))
    assert not problem.is_failure
    assert re.search(text, problem.text) and "JDP210" in problem.text


def test_an_error_is_reported_whatever_the_numbers():
    failed = LoopEnd(1, 9, "error", "OSError('no such file')")
    for pair in ((failed, LoopEnd(0, 9, "on")), (LoopEnd(0, 9, "end"), failed)):
        is_failure, text = problem_of(*pair)
        assert is_failure and "OSError('no such file')" in text
        assert re.search("process 1 .*batch 10", text) and "JDP208" in text


# --- Loops of several processes


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "jdp-lockstep"]


# Call fn, and return the exception; afterwards this process is ready for the next test.
def raised_by(fn):
    uneven_data.GRACE_S = 0.3  # the last one stays: a machine may be busy
    try:
        fn()
    except Exception as error:
        found = f"{type(error).__name__}: " + "".join(traceback.format_exception(error))
    else:
        found = None
    wait_until(lambda: not threads())
    prefetcher.active_loops.compared.clear()
    this_process.current.why_over = None
    in_flight._calls.clear()
    if cpu_runtime.why_missing() is None:
        cpu_runtime.reset()
    return found


def loader(num_batches, wait_for=None):
    for i in range(num_batches):
        yield {name: x[:4] for name, x in training.batch(i).items()}
    if wait_for is not None:
        assert kv_store.get(wait_for, timeout_s=TIMEOUT_S) is not None


def hand_out(lengths):
    jdp.init()
    seen = []

    def loop():
        for batch in jdp.shard_batches(loader(lengths[jax.process_index()])):
            seen.append(batch)

    return raised_by(loop), len(seen)


@pytest.mark.parametrize("lengths", [(9, 10), (10, 9), (1, 9), (9, 10, 10), (10, 10, 9), (3, 5, 9)])
def test_loaders_of_different_lengths_are_an_error_on_every_process(processes, lengths):
    results = processes(len(lengths)).run(hand_out, lengths, timeout_s=TIMEOUT_S)
    shortest = min(lengths)
    for text, num_batches in results:
        assert text.startswith("ValueError"), text
        assert "itertools.islice" in text
        # Without steps nothing holds back who has more, until it hears of the end.
        assert shortest <= num_batches
    assert len({text.splitlines()[-1] for text, _ in results}) == 1  # the same on all
    # Nor need the one with the fewest be the first at its end.
    process, num_batches = re.search(r"process (\d+) .*?(\d+) batches", results[0][0]).groups()
    assert lengths[int(process)] == int(num_batches)


def train(all_reduce):
    """Process 0 has 3 batches, and ends its loop when process 1 has called its 4th step."""
    jdp.init()
    mine = loader(99) if jax.process_index() else loader(3, wait_for="test/4th")
    train_step = jdp.train_step(training.plain_step)
    s, num_steps = training.state(training.sgd(all_reduce=all_reduce)), 0

    def loop():
        nonlocal s, num_steps
        for batch in jdp.shard_batches(mine):
            s, metrics = train_step(s, batch)
            num_steps += 1
            if num_steps == 4:
                kv_store.put("test/4th", "")
            float(metrics["loss"])

    return raised_by(loop), num_steps


# Processes that no loop of another test is about to get out of a wait, and that do not go on
# together: others start in the next test.
@pytest.fixture
def two_processes(processes):
    processes(2).close()
    yield processes(2)
    processes(2).close()


def test_a_process_that_waits_in_a_step_of_its_own_gets_out(two_processes):
    if why := cpu_runtime.why_missing():
        pytest.skip(why)
    found = two_processes.run(train, jdp.collectives.native, timeout_s=TIMEOUT_S)
    (first, num_first), (second, num_second) = found
    reason = "process 0 .* 3 batches.*process 1 .*batch 4.*JDP210"
    assert first.startswith("ValueError") and re.search(reason, first)
    assert "RuntimeError" in second.split(":")[0] and re.search(reason, second)
    assert (num_first, num_second) == (3, 4)


def test_a_process_that_nothing_gets_out_ends_itself(two_processes):
    message = (
        r"(?s)process 1 of 2: .*status 1;.*jdp: process 0 .* 3 batches.*"
        "process 1 .*batch 4.*JDP210.*jdp: process 1 still waits"
    )
    with pytest.raises(ProcessError, match=message) as caught:
        two_processes.run(train, jdp.collectives.xla, timeout_s=TIMEOUT_S)
    assert "Timeout" not in str(caught.value)  # of the test


def fail(when):
    jdp.init()
    odd = jax.process_index() == 1

    def broken():
        yield from loader(when)
        raise OSError("no such file: shard-7")

    def loop():
        for _ in jdp.shard_batches(broken() if odd else loader(9)):
            pass

    return raised_by(loop)


@pytest.mark.parametrize("when", [1, 5])
def test_an_error_of_a_loader_reaches_the_other_processes(processes, when):
    first, second, third = processes(3).run(fail, when, timeout_s=TIMEOUT_S)
    assert second.startswith("OSError") and "in broken" in second
    for text in (first, third):
        assert text.startswith("OtherFailedError")
        assert re.search(f"process 1 .*batch {when + 1}.*shard-7", text) and "JDP208" in text


# --- Leaving a loop


def leave(numbers):
    """Leaves three loops by break, each process after its own number of batches."""
    jdp.init()
    found = []

    def loops():
        for each in numbers:
            found.append(0)
            for batch in jdp.shard_batches(loader(9)):
                found[-1] += 1
                del batch
                if found[-1] == each[jax.process_index()]:
                    break

    return raised_by(loops), found


def test_leaving_a_loop_at_the_same_batch_is_right_however_often(processes):
    for text, found in processes(2).run(leave, [(3, 3), (1, 1), (9, 9)], timeout_s=TIMEOUT_S):
        assert (text, found) == (None, [3, 1, 9])


def test_leaving_a_loop_on_one_process_is_found(two_processes):
    first, second = two_processes.run(leave, [(3, 99), (9, 9)], timeout_s=TIMEOUT_S)
    # Without steps nothing holds back process 1, which may be at its end before it hears of it.
    reason = "process [01] .*(left|9 batches).*process [01] .*JDP210"
    assert re.search(reason, first[0]) and re.search(reason, second[0])


def nested():
    """Evaluates inside of a training loop, twice over."""
    jdp.init()
    rows = training.batch(num_rows=10)

    @jdp.eval_step(weight=lambda batch: batch["mask"].sum())
    def measure(params, batch):
        return {"rows": jdp.sum_over_ranks(batch["mask"].sum())}

    train_step, s, found = jdp.train_step(training.plain_step), training.state(), []
    batches = jdp.batches(rows, 4, epochs=1, shuffle=False)
    for _ in range(2):
        for batch in jdp.shard_batches(loader(3)):
            s, _ = train_step(s, batch)
            found.append(int(jdp.evaluate(measure, s.params, batches)["rows"]))
    wait_until(lambda: not threads())
    group = "-".join(map(str, agree.peers(batch["x"].sharding.mesh)))
    return found, kv_store.keys(f"jdp/lockstep/{group}/")


def end_slowly():
    """Keys that are left by loops whose first end is reported late on one process."""
    jdp.init()
    offer = kv_store.offer

    def offer_late(key, value):
        if jax.process_index() == 1 and key.endswith("/first"):
            time.sleep(0.2)
        return offer(key, value)

    kv_store.offer = offer_late
    try:
        for _ in range(3):
            assert len(list(jdp.shard_batches(loader(2)))) == 2
        wait_until(lambda: not threads())
    finally:
        kv_store.offer = offer
    agree.all_gather((0, 1), None, what="that all loops ended")
    return kv_store.keys("jdp/lockstep/0-1/")


def test_a_late_report_leaves_no_key_behind(two_processes):
    for keys in two_processes.run(end_slowly, timeout_s=TIMEOUT_S):
        assert not [key for key in keys if key.endswith("/first")]


def test_loops_follow_and_contain_each_other_and_leave_little_behind(processes):
    before, after = (processes(2).run(nested, timeout_s=TIMEOUT_S) for _ in range(2))
    for (found, old), (_, new) in zip(before, after, strict=True):
        assert found == [10] * 6
        # Only later loops count: those of earlier tests may still be coming to their verdict.
        last = max(int(key.split(".")[0]) for key in old if key.endswith(".verdict"))
        kept = {key for key in set(new) - set(old) if int(re.match(r"\d+", key)[0]) > last}
        assert len(kept) == 8 and all(key.endswith(".verdict") for key in kept)


def end_alone():
    jdp.init()
    agree.set_timeout_s(0.3)
    loop = jdp.shard_batches(loader(2))
    next(loop), next(loop)
    text = None
    if jax.process_index() == 0:
        with pytest.raises(RuntimeError) as caught:
            next(loop)
        text = str(caught.value)
    agree.set_timeout_s(TIMEOUT_S)
    agree.all_gather((0, 1), None, what="that process 0 was told")
    assert next(loop, None) is None
    wait_until(lambda: not threads())
    return text


def test_a_process_that_does_not_end_its_loop_is_named_after_the_deadline(processes):
    text, _ = processes(2).run(end_alone, timeout_s=TIMEOUT_S)
    assert re.search(r"process 0 .* 2 batches.*0\.3 s.*\[1\]", text)
    assert "JDP207" in text


# --- The end of the program


ENDS = """
import sys
import jax

index, address, num_batches = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(address, 2, index)

import jdp, numpy as np

jdp.init()
loop = jdp.shard_batches(np.full(2, 10 * index + i) for i in range(10))
for _ in range(num_batches):
    next(loop)
exec(sys.argv[4])
print("done")
"""


def end_in_a_loop(*num_batches, how=("", "")):
    """(exit code, stdout, stderr) of two processes that end inside of a loop, each by its `how`."""
    address = f"127.0.0.1:{free_port()}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", ENDS, str(index), address, str(number), how[index]],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index, number in enumerate(num_batches)
    ]
    try:
        outputs = [process.communicate(timeout=PROGRAM_TIMEOUT_S) for process in started]
    finally:
        for process in started:
            process.kill()
    codes = [process.returncode for process in started]
    return [(code, out, err) for code, (out, err) in zip(codes, outputs, strict=True)]


@pytest.mark.xdist_group("processes")
def test_a_program_may_end_inside_of_a_loop():
    for code, out, err in end_in_a_loop(3, 3):
        assert (code, out.endswith("done\n"), err) == (0, True, "")


@pytest.mark.xdist_group("processes")
def test_a_program_that_ends_inside_of_a_loop_on_one_process_fails_on_both():
    (code, _, err), (other_code, _, other_err) = end_in_a_loop(3, 5)
    assert code == 1 and other_code != 0  # JAX ends the second where the first holds its store
    pattern = "jdp: process [01] .* [35] batches.*process [01] .*JDP210"
    assert re.search(pattern, err) and re.search(pattern, other_err)


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    "how, code, last, cause",
    [
        ("import signal; signal.raise_signal(2)", 130, "KeyboardInterrupt", "interrupted .Ctrl-C"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero", "ZeroDivisionError: division"),
    ],
)
def test_the_last_line_is_the_true_cause_on_every_process(how, code, last, cause):
    ends = "for batch in loop: pass", f"for batch in loop:\n  {how}"
    (other_code, _, other_err), (own_code, _, err) = end_in_a_loop(1, 3, how=ends)
    assert (own_code, err.splitlines()[-1]) == (code, last)
    assert other_code == 1
    assert re.search(f"OtherFailedError: process 1 .*{cause}.*JDP208", other_err.splitlines()[-1])
    assert "itertools" not in err + other_err


# Their exits wait for pending writes, before Python reports the error.
SLOW_CHECKPOINTER = """
class Session:
    end_session = lambda self: time.sleep(2)
block = jdp.Checkpointer({!r})
block._session = Session()
"""
SLOW_PROFILE = """
from jdp import jax_compat
from jdp.tools.profiling.profile import Profile
jax_compat.stop_profiler = lambda: time.sleep(2)
Profile.__enter__ = lambda profile: None  # where processes compare the steps
block = Profile(pathlib.Path({!r}), range(0, 1))
block._begin = 1  # it records
"""
FAILS = """
loops = [loop]
del loop  # else the program holds the loop, and the error does not end it
with block:
    for batch in loops.pop():
        1 / 0
"""


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("block", [SLOW_CHECKPOINTER, SLOW_PROFILE], ids=["save", "profile"])
def test_an_error_is_the_cause_while_a_block_of_jdp_still_waits(block, tmp_path):
    fails = "import pathlib, time, jdp\n" + block.format(str(tmp_path)) + FAILS
    ends = "for batch in loop: pass", fails
    (_, _, other_err), (code, _, err) = end_in_a_loop(1, 3, how=ends)
    assert (code, err.splitlines()[-1]) == (1, "ZeroDivisionError: division by zero")
    assert re.search("OtherFailedError: process 1 .*ZeroDivision.*JDP208", other_err)
    assert "itertools" not in err + other_err


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("", r"process 1 left its loop \(break or an error\) after 4 batches.*JDP210"),
        ("3", r"process 1 ended by sys.exit\(3\).*JDP208"),
    ],
)
def test_an_exit_from_a_loop_is_named_while_a_block_of_jdp_still_waits(status, reason, tmp_path):
    block = "import pathlib, sys, time, jdp\n" + SLOW_CHECKPOINTER.format(str(tmp_path))
    exits = block + FAILS.replace("1 / 0", f"sys.exit({status})")
    (_, _, other_err), (code, _, err) = end_in_a_loop(1, 3, how=("for batch in loop: pass", exits))
    assert code == (int(status) if status else 1)
    assert re.search(reason, other_err)
    assert "_Exit" not in err + other_err
