"""Processes of a host write a commit together: each byte is written once, and a death costs one."""

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.launched import Launcher
from support.processes import environment
from support.states import bits, committed, mixed_state, needs_library

import jdp
from jdp.checkpoint import host_commits, snapshot, write_plan
from jdp.checkpoint.commit_memory import MARKS, CommitMemory
from jdp.checkpoint.host_commits import WRITTEN, CommitMark, CommitMarks, HostCommits
from jdp.checkpoint.saved_leaves import SavedLeaf
from jdp.checkpoint.snapshot import CommitSnapshots
from jdp.checkpoint.write_plan import Share

HERE = "test_host_commits"


def random_leaves(rng):
    dtypes = ["float32", "bfloat16", "int8", "float64"]
    shapes = [
        tuple(rng.choice([0, 1, 2, 7, 61, 1009]) for _ in range(rng.randint(0, 3)))
        for _ in range(rng.randint(0, 9))
    ]
    return [SavedLeaf(f"[{i}]", shape, rng.choice(dtypes), None) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("num", [1, 2, 3, 8])
def test_each_row_belongs_to_one_share_and_shares_are_equal_but_for_a_row(num):
    rng = random.Random(num)
    for _ in range(200):
        leaves = random_leaves(rng)
        is_shared = [rng.random() < 0.9 for _ in leaves]
        found = [
            write_plan.shared_rows(leaves, is_shared, Share(number, num)) for number in range(num)
        ]
        sizes = np.zeros(num)
        for i, leaf in enumerate(leaves):
            num_rows = leaf.shape[0] if leaf.shape else 1
            parts = [range(*rows[i]) for rows in found]
            written = [row for part in parts for row in part]
            assert written == [*range(num_rows if leaf.num_bytes else 0)] or not leaf.num_bytes
            if is_shared[i] and leaf.num_bytes:
                sizes += [len(part) * leaf.num_bytes / num_rows for part in parts]
            elif leaf.num_bytes:
                assert len(parts[0]) == num_rows
        shared = [x for x, is_so in zip(leaves, is_shared, strict=True) if is_so and x.num_bytes]
        largest = max((x.num_bytes // (x.shape or [1])[0] for x in shared), default=0)
        assert np.all(abs(sizes - sizes.sum() / num) <= largest)


def write_together(file, num, state, facts):
    """What each of `num` processes of one host does, each in a thread."""
    all_commits = [HostCommits(file, Share(number, num)) for number in range(num)]

    def write(commits):
        snapshots = CommitSnapshots(commits)
        snapshots.reservation(state, (), here=commits.share.number == 0)()
        for step in range(3):  # into either half of the memory
            taken = snapshots.take_snapshot(state, here=commits.share.number == 0)
            more = {"leaves": taken.leaves, "step": step, "num_calls": step}
            commits.finish(taken.fetch(), facts | more)

    threads = [threading.Thread(target=write, args=(each,)) for each in all_commits]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("is_native", [pytest.param(True, marks=needs_library), False])
@pytest.mark.parametrize("num", [2, 3, 8])
def test_shares_make_up_the_bits_of_every_leaf(file, make_mesh, monkeypatch, num, is_native):
    monkeypatch.setattr(write_plan, "holds_everywhere", lambda x: isinstance(x, jax.Array))
    if not is_native:
        monkeypatch.setattr(snapshot, "takes", lambda x: False)
    state = mixed_state(NamedSharding(make_mesh(2), PartitionSpec()))
    expected, memory = bits(state), CommitMemory(file)
    for life in ("a0", "b1"):
        write_together(file, num, state, {"tag": life})
        assert memory.latest().facts["tag"] == life
        assert committed(memory) == expected


def test_a_share_holds_and_copies_about_its_part_of_the_state(file, make_mesh, monkeypatch):
    monkeypatch.setattr(write_plan, "holds_everywhere", lambda x: isinstance(x, jax.Array))
    monkeypatch.setattr(snapshot, "takes", lambda x: False)
    where = NamedSharding(make_mesh(2), PartitionSpec())
    state = [jax.device_put(np.zeros(shape, np.float32), where) for shape in ((8009, 31), (997,))]
    sizes = []
    for number in range(4):
        snapshots = CommitSnapshots(HostCommits(file, Share(number, 4)))
        taken = snapshots.take_snapshot(state, here=number == 0)
        sizes.append(sum(piece.values.nbytes for piece, _, _ in taken.others))
    total = sum(x.nbytes for x in state)
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 2 * 31 * 4


def facts_of(step, num_calls=None):
    return {"step": step, "num_calls": step if num_calls is None else num_calls}


def outcomes(jobs):
    """The result of each job, or the text of its error, within a time."""
    return [str(job.exception(60.0) or job.result()) for job in [*jobs]]


class Processes:
    """Processes of a host, whose `finish` runs in threads."""

    def __init__(self, file, num=2):
        self.all = [HostCommits(file, Share(number, num)) for number in range(num)]
        self.memory = self.all[0].shared

    def begin(self, number, step, form=5):
        """Begin a commit of the step, and fill the share with its number."""
        draft = self.all[number].begin(4 * len(self.all), form=form)
        draft.values[4 * number : 4 * number + 4] = step
        return draft

    def start(self, number, step, num_calls=None, form=5):
        """Begin a commit of the step, fill the share with its number, and start to finish it."""
        draft = self.begin(number, step, form)
        pool = ThreadPoolExecutor(1)
        job = pool.submit(self.all[number].finish, draft, facts_of(step, num_calls))
        pool.shutdown(wait=False)
        return job

    def commit_alone(self, step):
        """Commit the step by local rank 0 alone."""
        draft = self.all[0].begin(4 * len(self.all), form=None)
        draft.values[:] = step
        return self.all[0].finish(draft, facts_of(step))

    def commit(self, *steps):
        """What became of these steps, one for each process."""
        return outcomes(self.start(number, step) for number, step in enumerate(steps))

    def committed(self):
        """The steps of the intact commits, whose values are those of the step."""
        for commit in self.memory.intact():
            expected = [commit.facts["step"]] * 4 * len(self.all)
            assert self.memory.read(commit).tolist() == expected
        return sorted(commit.facts["step"] for commit in self.memory.intact())


@pytest.fixture
def warnings(caplog):
    caplog.set_level("WARNING", logger="jdp")
    return caplog


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ((2, 2), (3, 3), "commits step 3 after 3 calls .* local rank 0 step 2 after 2"),
        ((3, 3), (2, 2), "commits step 2 after 2 calls .* local rank 0 step 3 after 3"),
        # A process missed a call of ckpt.step, after an error that its script caught.
        ((2, 2), (2, 3), "commits step 2 after 3 calls .* local rank 0 step 2 after 2"),
        ((2, 3), (2, 2), "commits step 2 after 2 calls .* local rank 0 step 2 after 3"),
        ((2, 2, 5), (2, 2, 6), "commits a state with other leaves at step 2"),
    ],
)
@pytest.mark.parametrize("num", [2, 3])
def test_shares_of_different_states_are_never_one_commit(file, warnings, num, first, second, why):
    processes = Processes(file, num)
    assert processes.commit(*[1] * num) == ["True"] * num
    jobs = [processes.start(i, *(second if i == num - 1 else first)) for i in range(num)]
    assert outcomes(jobs) == ["False"] * num
    assert re.search(f"this host: that with local rank {num - 1} {why}", warnings.text)
    assert len(warnings.records) == num
    assert processes.committed() == [1]
    assert [processes.all[i].begin(8, form=5) for i in range(1, num)] == [None] * (num - 1)
    assert processes.commit_alone(4) and processes.committed() == [1, 4]


def test_a_share_that_is_being_written_is_not_overwritten_by_a_commit_of_local_rank_0_alone(file):
    processes = Processes(file)
    assert processes.commit(1, 1) == ["True", "True"]
    draft = processes.begin(1, 2)
    processes.all[0].break_up("a test")
    alone = ThreadPoolExecutor(1).submit(processes.commit_alone, 2)
    time.sleep(0.1)
    assert not alone.done()
    assert not processes.all[1].finish(draft, facts_of(2))
    assert alone.result(60.0) and processes.committed() == [1, 2]


def test_no_share_is_begun_in_the_room_of_a_commit_of_local_rank_0_alone(file, warnings):
    processes = Processes(file)
    processes.all[0].break_up("a test")
    draft = processes.all[0].begin(8, form=None)
    assert processes.all[1].begin(8, form=5) is None and not processes.all[1].is_together
    draft.values[:] = 2
    assert processes.all[0].finish(draft, facts_of(2)) and processes.committed() == [2]
    assert "this host: a test" in warnings.text


def test_local_rank_0_does_not_wait_forever_for_a_share_that_is_being_written(file, monkeypatch):
    monkeypatch.setattr(host_commits, "_PATIENCE_S", 0.1)
    processes = Processes(file)
    processes.begin(1, 2)
    processes.all[0].break_up("a test")
    with pytest.raises(
        RuntimeError, match="did not write its share of an earlier commit within 0.1"
    ):
        processes.commit_alone(2)


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_process_that_fails_leaves_a_whole_commit_and_nobody_waiting(file, warnings, who):
    processes = Processes(file, 3)
    assert processes.commit(1, 1, 1) == ["True"] * 3
    jobs = [processes.start(i, 2) for i in range(3) if i != who]
    processes.all[who].break_up("that with local rank 7 failed: OSError: full")
    assert outcomes(jobs) == ["False"] * 2
    assert "writes the commits of this host: that with local rank 7 failed" in warnings.text
    assert processes.committed() == [1]
    assert processes.commit_alone(3) and processes.committed() == [1, 3]
    later = Processes(file, 3)
    for each in later.all:
        each.begin_life("the next")
    assert later.commit(4, 4, 4) == ["True"] * 3


@pytest.mark.parametrize("ends", ["breaks up", "commits alone"])
def test_a_share_whose_answer_was_written_over_is_part_of_the_commit(file, ends):
    processes = Processes(file)
    second = processes.all[1]
    draft = processes.begin(1, 1)
    second._marks.write(CommitMark(second._life, WRITTEN, draft.number, 5, 1, 1))
    assert outcomes([processes.start(0, 1)]) == ["True"]
    processes.all[0].break_up()
    if ends == "commits alone":
        assert processes.commit_alone(2)
    assert second.finish(draft, facts_of(1))


def test_a_share_is_not_waited_for_for_long_while_the_training_thread_waits(
    file, monkeypatch, warnings
):
    monkeypatch.setattr(host_commits, "_PATIENCE_S", 0.2)
    processes = Processes(file)
    job = processes.start(0, 1)
    time.sleep(0.5)
    assert not job.done()
    processes.all[0].hurry()
    assert outcomes([job]) == ["False"]
    assert "local rank 0 waited 0.2 s for the shares of others" in warnings.text
    assert "local rank 1 began no share: call ckpt.step(state, batches) on every" in warnings.text


@pytest.mark.parametrize("comes", [False, True])
def test_a_process_that_begins_no_commit_while_others_train_on_ends_the_run(
    file, monkeypatch, comes
):
    monkeypatch.setattr(host_commits, "_ABSENT_S", 0.1)
    processes = Processes(file)
    processes.all[0].hurry()
    job = processes.start(0, 1)
    processes.all[0].hurry()
    assert outcomes([job]) == ["False"]
    if comes:
        assert processes.all[1].begin(8, form=5) is None
        assert processes.commit_alone(2) and processes.committed() == [2]
    else:
        with pytest.raises(RuntimeError, match="step 2 .* local rank 1 began no share: "):
            processes.commit_alone(2)


@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_waits_for_one_that_has_ended_goes_on_without_a_word(file, warnings, who):
    processes = Processes(file)
    assert processes.commit(1, 1) == ["True", "True"]
    waits = processes.start(1 - who, 2)
    processes.all[who].break_up()
    assert outcomes([waits]) == ["False"]
    assert processes.committed() == [1] and not warnings.text


def test_a_mark_that_is_half_written_is_none(file):
    first, second = CommitMarks(file, 0), CommitMarks(file, 1)
    marks, size = [], host_commits._MARK_BYTES
    for step in (1, 2):
        second.write(CommitMark(5, WRITTEN, step, 5, step, step))
        assert first.read(1).step == step
        marks.append(os.pread(file, size, MARKS + size))
    torn = [marks[1][:i] + marks[0][i:] for i in range(size)]
    for mark in torn:
        os.pwrite(file, mark, MARKS + size)
        assert first.read(1) is None or mark in marks


def test_areas_of_earlier_lives_are_freed_before_others_may_write_to_their_own(file, monkeypatch):
    processes = Processes(file)
    first, second = processes.all
    second.own.write({"step": 9}, [np.zeros(5, np.uint8)])  # of an earlier life
    free = first.own.free_areas

    def free_late(num_areas):
        time.sleep(0.3)
        free(num_areas)

    monkeypatch.setattr(first.own, "free_areas", free_late)
    _, mine = (processes.start(number, 1) for number in range(2))
    assert mine.result()
    assert second.own.latest() is None
    second.own.write({"step": 2}, [np.zeros(5, np.uint8)])
    assert processes.commit(3, 3) == ["True", "True"]
    assert second.own.latest().facts["step"] == 2


def test_a_process_that_ends_does_not_wait_for_a_dead_one(file):
    first = HostCommits(file, Share(0, 2))
    first.stop_waiting()
    assert not first.finish(first.begin(8, form=5), facts_of(1))
    assert first.shared.latest() is None


def test_a_mark_of_an_earlier_life_does_not_count(file):
    earlier = Processes(file)
    second = earlier.start(1, 1)  # and everyone dies
    first = HostCommits(file, Share(0, 2))
    first.begin_life("another")
    first.stop_waiting()
    assert not first.finish(first.begin(8, form=5), facts_of(1))
    earlier.all[1].stop_waiting()
    assert not second.result()


WRITER = """
import random, sys, time
from jdp.checkpoint.host_commits import HostCommits
from jdp.checkpoint.write_plan import Share
file, number, num, step, life = map(int, sys.argv[1:])
commits, rng = HostCommits(file, Share(number, num)), random.Random(100 * life + number)
commits.begin_life(f"{life:x}")
sys.stdin.readline()
while True:
    step += 1
    size = 300_007 - step % 5
    draft = commits.begin(size, form=5)
    for part in range(3):
        first, last = (size * (3 * number + part + i) // (3 * num) for i in (0, 1))
        draft.values[first:last] = step % 251
        if rng.random() < 0.3:
            time.sleep(rng.uniform(0.0, 0.003))
    commits.finish(draft, {"step": step, "num_calls": step})
"""


@pytest.mark.parametrize("num", [2, 3])
def test_killed_writers_leave_a_commit_that_is_intact(file, num):
    memory, rng, step = CommitMemory(file), random.Random(num), 0
    for life in range(20):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, *map(str, (file, number, num, step, life))],
                pass_fds=[file],
                env=environment(),
                cwd=Path(__file__).parents[2],
                stdin=subprocess.PIPE,
            )
            for number in range(num)
        ]
        try:
            for writer in writers:
                writer.stdin.write(b"go\n")
                writer.stdin.flush()
            while life % 4 == 0 and (
                memory.latest() is None or memory.latest().facts["step"] == step
            ):
                assert all(writer.poll() is None for writer in writers)
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 0.05))
        finally:
            for writer in rng.sample(writers, num):
                writer.send_signal(signal.SIGKILL)
                time.sleep(rng.choice([0.0, 0.003]))
            for writer in writers:
                writer.wait()
                writer.stdin.close()
        latest = memory.latest()
        if latest is not None:
            found = latest.facts["step"]
            assert found >= step
            assert latest.num_bytes == 300_007 - found % 5
            np.testing.assert_array_equal(memory.read(latest), found % 251)
            step = found
    assert step >= 5


def first_state():
    return [np.arange(size, dtype=np.float32) % 251 for size in (7_499_981, 25_013, 3)]


def add_one(state, batch):
    return [x + 1 for x in state], {}


def train(path, num_steps, own_loop=False):
    """Go on from the latest commit, compare its bits, and make steps that donate the state."""
    mesh = jdp.init()
    where = NamedSharding(mesh, PartitionSpec())
    step = jax.jit(add_one, donate_argnums=0) if own_loop else jdp.train_step(add_one)
    begin = first_state()
    batches = jdp.batches(np.zeros(6), 6, num_steps=100)
    with jdp.Checkpointer(path, commit_every=1, save_every=1000) as ckpt:
        state = [jax.make_array_from_callback(x.shape, where, lambda i, x=x: x[i]) for x in begin]
        state = ckpt.restore(state, batches)
        for x, first in zip(state, begin, strict=True):
            for shard in x.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), first + ckpt.steps)
        for batch in itertools.islice(batches, num_steps):
            state, _ = step(state, batch)
            ckpt.step(state, batches)
        ckpt._session._commits.wait()
        taken = ckpt._session._commits._snapshots.take_snapshot(state, here=not jax.process_index())
        pieces = [] if taken is None else taken.copying + taken.others
        return [ckpt.steps, len(pieces)]


@pytest.mark.parametrize("own_loop", [False, True])
def test_processes_of_a_host_commit_together_and_any_number_goes_on(tmp_path, own_loop):
    with Launcher() as launcher:
        steps = 0
        for generation, num in enumerate([3, 1, 2]):
            args = tmp_path, 4, own_loop
            started = launcher.processes(num, f"{HERE}:train", *args, generation=generation)
            steps += 4
            results = [process.result() for process in started]
            assert [found for found, _ in results] == [steps] * num
            assert [pieces > 0 for _, pieces in results] == [
                not (own_loop and i) for i in range(num)
            ]
        memory = CommitMemory(launcher.memories[0])
        assert memory.latest().facts["step"] == steps
        expected = [(x + steps).tobytes() for x in first_state()]
        assert [*committed(memory).values()] == expected


def leave(path):
    """Commit twice; process 1 ends before it has written its share of the second commit."""
    mesh = jdp.init()
    state = [jax.device_put(jnp.arange(100_003.0), NamedSharding(mesh, PartitionSpec()))]
    ckpt, step = jdp.Checkpointer(path, commit_every=1), jdp.train_step(add_one)
    batches = jdp.batches(np.zeros(6), 6, num_steps=100)
    state = ckpt.restore(state, batches)
    for batch in itertools.islice(batches, 2):
        state, _ = step(state, batch)
        if ckpt.steps == 1 and jax.process_index() == 1:
            os._exit(3)
        ckpt.step(state, batches)
        ckpt._session._commits.wait()


def test_a_commit_without_a_share_of_a_dead_process_is_none(tmp_path):
    with Launcher() as launcher:
        first, second = launcher.processes(2, f"{HERE}:leave", tmp_path)
        assert second.wait() == 3
        time.sleep(1.0)
        first.kill()
        latest = CommitMemory(launcher.memories[0]).latest()
        assert latest.facts["step"] == 1
        values = CommitMemory(launcher.memories[0]).read(latest).view(np.float32)[:100_003]
        np.testing.assert_array_equal(values, np.arange(1, 100_004, dtype=np.float32))


def train_beside(path):
    """Commit a state with an array that only process 0 holds."""
    mesh = jdp.init()
    everywhere, first = (
        NamedSharding(each, PartitionSpec()) for each in (mesh, jax.make_mesh((1,), ("one",)))
    )
    values = {"all": (np.arange(9973.0, dtype=np.float32), everywhere)}
    values["one"] = np.arange(7.0, dtype=np.float32), first
    state = {
        name: jax.make_array_from_callback(x.shape, where, lambda i, x=x: x[i], dtype=x.dtype)
        for name, (x, where) in values.items()
    }
    with jdp.Checkpointer(path, commit_every=1, check_replicas=False) as ckpt:
        ckpt.restore(state)
        for _ in range(2):
            ckpt.step(state)
    return True


def test_what_one_process_holds_is_committed_by_it(tmp_path):
    with Launcher() as launcher:
        started = launcher.processes(2, f"{HERE}:train_beside", tmp_path)
        assert all(process.result() for process in started)
        values = committed(CommitMemory(launcher.memories[0]))
    assert values["['all']"] == np.arange(9973, dtype=np.float32).tobytes()
    assert values["['one']"] == np.arange(7, dtype=np.float32).tobytes()


def train_unequally(path):
    mesh = jdp.init()
    state = jax.device_put(jnp.arange(5.0), NamedSharding(mesh, PartitionSpec()))
    try:
        jdp.Checkpointer(path, commit_every=2 + jax.process_index()).restore(state)
    except RuntimeError as error:
        return str(error)


def test_another_interval_on_one_process_is_named_on_all(tmp_path):
    with Launcher() as launcher:
        for process in launcher.processes(2, f"{HERE}:train_unequally", tmp_path):
            assert re.search("commit_every is .* on process .* and .* on process", process.result())
