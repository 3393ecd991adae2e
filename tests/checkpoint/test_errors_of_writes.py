"""An error of a write, or a step that one process misses, never mixes two steps in a commit."""

import contextlib
import functools
import itertools
import os
import signal
import threading
import time
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.launched import Launcher
from support.states import committed

import jdp
from jdp.checkpoint.commit_memory import CommitMemory
from jdp.checkpoint.directory import Folder
from jdp.checkpoint.host_commits import ENDED, CommitMarks, HostCommits
from jdp.checkpoint.saved_leaves import leaves_of, unpack
from jdp.checkpoint.session import Session
from jdp.checkpoint.snapshot import Snapshots
from jdp.checkpoint.state_writer import StateWriter, checkpoint_writer, commit_writer
from jdp.checkpoint.write_plan import Share
from jdp.distributed import metrics_log

HERE = "test_errors_of_writes"
SIZE = 100_003


def writer(write):
    return StateWriter("test", write, Snapshots(), is_here=True)


def waiting_writer():
    """A writer, the event for which its writes wait, and the steps that it has written."""
    may_end, ended = threading.Event(), []

    def write(facts, values):
        may_end.wait(60.0)
        ended.append(facts["step"])

    return writer(write), may_end, ended


def test_an_interrupt_of_the_waiting_leaves_the_write_and_the_next_one_waits_for_it():
    written, may_end, ended = waiting_writer()
    written.begin_write([np.ones(2)], {"step": 1})

    def interrupt(*_):
        raise TimeoutError("a limit of the author's")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(TimeoutError):
            written.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    threading.Timer(0.3, may_end.set).start()
    written.begin_write([np.ones(2)], {"step": 2})
    assert ended == [1]
    written.end_thread()
    assert ended == [1, 2]


def test_a_state_is_written_although_the_one_before_could_not_be():
    ended = []

    def write(facts, values):
        if facts["step"] == 1:
            raise OSError("full")
        ended.append(facts["step"])

    written = writer(write)
    written.begin_write([np.ones(2)], {"step": 1})
    written.begin_write([np.ones(2)], {"step": 2})
    with pytest.raises(OSError, match="full"):
        written.wait()
    written.wait()
    assert ended == [2]
    written.end_thread()


def test_a_write_that_was_interrupted_as_it_was_begun_is_waited_for(monkeypatch):
    written, may_end, ended = waiting_writer()

    def interrupted(*args):
        submit(*args)
        raise KeyboardInterrupt

    submit = written._pool.submit
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(written._pool, "submit", interrupted)
        patch.setattr(written, "settle", lambda: None)
        written.begin_write([np.ones(2)], {"step": 1})
    threading.Timer(0.3, may_end.set).start()
    written.begin_write([np.ones(2)], {"step": 2})
    assert ended == [1]
    written.end_thread()


def test_a_process_that_can_not_begin_its_share_tells_the_others_why(monkeypatch):
    file = os.memfd_create("test")
    commits = HostCommits(file, Share(1, 2))
    written = commit_writer(commits)

    def begin(num_bytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(commits.shared, "begin", begin)
    with pytest.raises(OSError, match="No space"):
        written.begin_write({"w": np.ones(3)}, {"step": 1, "num_calls": 1})
    marks = CommitMarks(file, 0)
    assert marks.read(1).status == ENDED
    assert marks.reason(1).startswith("that with local rank 1 failed: OSError: [Errno 28] No space")
    written.end_thread()
    os.close(file)


def test_a_commit_waits_for_the_lines_of_its_steps_and_a_checkpoint_does_not(
    tmp_path, monkeypatch, file
):
    monkeypatch.setattr(metrics_log, "write_all", functools.partial(metrics_log.write_all, 0.3))
    commits, folder = HostCommits(file, Share(0, 1)), Folder(tmp_path / "ckpt")
    commits.begin_life("a")
    committed, saved = commit_writer(commits), checkpoint_writer(folder, keep=1, is_here=True)
    folder.lock()

    def written(step):
        facts = {"life": 1, "step": step, "num_calls": step, "tag": "a", "position": None}
        for writer in (saved, committed):
            writer.begin_write({"w": np.ones(3)}, facts)
        saved.wait()
        committed.wait()

    with monkeypatch.context() as patch:
        full = OSError(28, "No space left on device")
        patch.setattr("jdp.distributed.metrics_file._append", mock.Mock(side_effect=full))
        jdp.log({"loss": 1.0}, 1, file=tmp_path / "metrics.jsonl")
        with pytest.raises(OSError, match="metrics.jsonl.*No space"):
            written(1)
        assert not list(commits.shared.intact())
        assert [each.step for each in folder.checkpoints()] == [1]
    written(2)
    assert [commit.facts["step"] for commit in commits.shared.intact()] == [2]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
    committed.end_thread()
    saved.end_thread()
    folder.unlock()
    metrics_log.end()


def add_one(state, batch):
    return {"w": state["w"] + 1}, {}


def fail_at(owner, name, number):
    """Have a function of jdp fail in one of its calls."""
    calls, function = itertools.count(1), getattr(owner, name)

    def failing(*args, **options):
        if next(calls) == number:
            raise OSError(28, "No space left on device")
        return function(*args, **options)

    setattr(owner, name, failing)


FAILING = {
    "save": (Folder, "write"),
    "begin save": (Snapshots, "take_snapshot"),
    "begin": (CommitMemory, "begin"),
    "finish": (CommitMemory, "finish"),
    "flush": (metrics_log, "write_all"),
}


def zeros():
    """Initialize jdp, and make a state of all processes."""
    where = NamedSharding(jdp.init(), PartitionSpec())
    values = lambda index: np.zeros(SIZE, int)[index]  # noqa: E731
    return {"w": jax.make_array_from_callback((SIZE,), where, values)}


def train(path, what, who, commit_every, steps="train_step"):
    """Make 12 steps of a state that counts them, and catch what `ckpt.step` raises.

    One process fails or misses `ckpt.step` once. The steps are calls of a train step, or of the
    script's own, or in turn.
    """
    state, me = zeros(), jax.process_index()
    own, train_step = jax.jit(add_one, donate_argnums=0), jdp.train_step(add_one)
    if me == who and what in FAILING:
        fail_at(*FAILING[what], 2)
    batches, caught = jdp.batches(np.zeros(6), 6, num_steps=12), []
    ckpt = jdp.Checkpointer(path, commit_every=commit_every, save_every=3)
    state = ckpt.restore(state, batches)
    for number, batch in enumerate(batches, 1):
        is_own = steps == "own" or (steps == "both" and number % 2)
        state, _ = own(state, batch) if is_own else train_step(state, batch)
        jax.block_until_ready(state)
        if not (what == "skip" and number == 4 and me == who):
            with catching(caught):
                ckpt.step(state, batches)
        time.sleep(0.02)
    with catching(caught):
        ckpt._session._commits.wait()
    kept = ckpt.steps
    ckpt._session.end_session()
    return caught, kept


@contextlib.contextmanager
def catching(caught):
    try:
        yield
    except (OSError, RuntimeError) as error:
        caught.append(str(error))


def trained(tmp_path, *args):
    """What two processes caught, and the steps and distinct values of the intact commits."""
    with Launcher() as launcher:
        started = launcher.processes(2, f"{HERE}:train", tmp_path / "ckpt", *args)
        caught, steps = zip(*(process.result() for process in started), strict=True)
        memory, commits = CommitMemory(launcher.memories[0]), {}
        for commit in memory.intact():
            [values] = unpack(memory.read(commit), leaves_of(commit.facts))
            commits[commit.facts["step"]] = np.unique(values).tolist()
    return caught, steps, commits


@pytest.mark.parametrize(
    ("what", "who", "commit_every"),
    [
        ("save", 0, 1),
        ("save", 0, 2),
        ("begin save", 0, 1),
        ("begin", 0, 1),
        ("begin", 1, 2),
        ("finish", 0, 1),
        ("finish", 0, 2),
        ("flush", 0, 2),
        ("flush", 1, 1),
    ],
)
def test_a_step_whose_call_raises_an_error_of_a_write_counts_and_is_committed(
    tmp_path, what, who, commit_every
):
    caught, steps, commits = trained(tmp_path, what, who, commit_every)
    assert [len(each) for each in caught] == [int(rank == who) for rank in range(2)]
    assert all("No space left on device" in error for each in caught for error in each)
    assert steps == (12, 12)
    assert commits == {12: [12], 12 - commit_every: [12 - commit_every]}


@pytest.mark.parametrize("steps", ["train_step", "own", "both"])
@pytest.mark.parametrize(("who", "commit_every"), [(0, 1), (1, 1), (0, 2), (1, 3)])
def test_a_process_that_misses_a_call_does_not_mix_steps(tmp_path, who, commit_every, steps):
    caught, counted, commits = trained(tmp_path, "skip", who, commit_every, steps)
    assert caught == ([], [])
    assert counted == ((11, 12) if who == 0 else (12, 11))
    newest = counted[0] // commit_every * commit_every
    # Process 0 commits as it counts.
    assert commits == {it: [it + 1 - who] for it in (newest, newest - commit_every)}


def fail(path, owner, name, number, num_steps, commit_every):
    """Fail in a call on process 1; return the steps of the commits that began, and the errors."""
    begun, begin, caught, state = [], Session._begin_commit, [], zeros()
    Session._begin_commit = lambda self: (begun.append(self.steps), begin(self))
    if jax.process_index() == 1:
        fail_at(owner, name, number)
    step, batches = jdp.train_step(add_one), jdp.batches(np.zeros(6), 6, num_steps=num_steps)
    ckpt = jdp.Checkpointer(path, commit_every=commit_every)
    state = ckpt.restore(state, batches)
    for batch in batches:
        state, _ = step(state, batch)
        if is_last := name == "finish":
            ckpt._session._commits.wait()
        with contextlib.nullcontext() if is_last else catching(caught):
            ckpt.step(state, batches)
    with catching(caught):
        ckpt.close()
    return begun, caught


def test_a_process_that_can_not_begin_the_first_commit_begins_the_next_one_with_the_others(
    tmp_path,
):
    with Launcher() as launcher:
        given = tmp_path / "ckpt", CommitMemory, "begin", 1, 9, 4
        first, second = launcher.processes(2, f"{HERE}:fail", *given)
        assert first.result() == [[1, 4, 8], []]
        assert second.result() == [[1, 4, 8], ["[Errno 28] No space left on device"]]
        values = committed(CommitMemory(launcher.memories[0]))
    assert values["['w']"] == np.full(SIZE, 8).astype("int32").tobytes()


def test_an_error_of_the_last_commit_is_raised_when_all_have_compared_their_state(tmp_path):
    with Launcher() as launcher:
        given = tmp_path / "ckpt", HostCommits, "finish", 3, 3, 1
        started = launcher.processes(2, f"{HERE}:fail", *given)
        caught = [process.result()[1] for process in started]
        assert caught == [[], ["[Errno 28] No space left on device"]]
