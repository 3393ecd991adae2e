import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.processes import environment

from jdp.checkpoint.commit_memory import CommitMemory


def parts_of(step, sizes=(5, 0, 70)):
    return [np.full(size, step % 251, np.uint8) for size in sizes]


# Whether the latest commit is one that somebody wrote, unchanged; its step, 0 for none.
def step_of(memory):
    latest = memory.latest()
    if latest is None:
        return 0
    step = latest.facts["step"]
    assert (memory.read(latest) == step % 251).all()
    return step


def test_there_is_no_commit_in_an_empty_memory(file):
    assert CommitMemory(file).latest() is None


def test_the_latest_of_many_commits_is_read_also_by_another_process(file):
    memory = CommitMemory(file)
    for step in range(1, 8):
        memory.write({"step": step}, parts_of(step))
        assert step_of(CommitMemory(os.dup(file))) == step


# JAX copies no array of the host that begins at a multiple of 64 bytes.
@pytest.mark.parametrize("size", [0, 1, 64, 5000, 3_000_017])
def test_both_commits_can_be_seen_where_they_lie(file, size):
    memory = CommitMemory(file)
    for step in range(1, 6):
        memory.write({"step": step}, parts_of(step, (size,)))
        for commit in CommitMemory(file).intact():
            seen = CommitMemory(file).view(commit)
            assert seen.size == size and (seen == commit.facts["step"]).all()
            assert size == 0 or (not seen.flags.writeable and seen.ctypes.data % 64 == 16)


def test_commits_of_any_sizes_leave_each_other_alone(file):
    memory, rng = CommitMemory(file), random.Random(0)
    for step in range(1, 60):
        sizes = [rng.choice([0, 1, 63, 4096, 20000]) for _ in range(3)]
        memory.write({"step": step, "more": "x" * rng.choice([0, 5000])}, parts_of(step, sizes))
        assert step_of(memory) == step
        older = [memory._commit(slot) for slot in (0, 1)]
        intact = [each for each in older if each is not None]
        assert len(intact) == min(step, 2)
        assert all((memory.read(each) == each.facts["step"] % 251).all() for each in intact)


def test_commits_of_one_size_take_the_room_of_two(file):
    memory = CommitMemory(file)
    for step in range(1, 8):
        memory.write({"step": step}, parts_of(step, (10_000,)))
    assert os.fstat(file).st_blocks * 512 < 40_000


def test_reserved_memory_holds_both_commits(file):
    memory = CommitMemory(file)
    memory.write({"step": 1}, parts_of(1, (10_000,)))
    memory.reserve(10_000)
    taken = os.fstat(file).st_blocks
    for step in range(2, 6):
        memory.write({"step": step}, parts_of(step, (10_000,)))
        assert step_of(memory) == step
    assert os.fstat(file).st_blocks <= taken + 8  # the facts of the second


def test_what_is_begun_and_not_finished_costs_one_commit(file):
    memory = CommitMemory(file)
    for step in (1, 2):
        memory.write({"step": step}, parts_of(step))
    for _ in range(3):
        memory.begin(75).values[:] = 0
        assert step_of(memory) == 2
    draft = memory.begin(75)
    draft.values[:] = 3
    memory.finish(draft, {"step": 3})
    assert step_of(memory) == 3


def test_many_parts_are_written_one_after_the_other(file):
    memory = CommitMemory(file)
    parts = [np.full(3, i % 256, np.uint8) for i in range(3000)]
    memory.write({}, parts)
    np.testing.assert_array_equal(memory.read(memory.latest()), np.concatenate(parts))


FREED = """
import os, numpy as np
from jdp.checkpoint.commit_memory import CommitMemory
file = os.memfd_create("test")
first, second = CommitMemory(file, 0), CommitMemory(file, 1)
for step in range(4):  # of a state that is split in every other one
    first.write({"step": step}, [np.full(9000, step, np.uint8)])
    if step % 2:
        first.free_areas(1)
    else:
        second.write({"step": step}, [np.full(9000, step, np.uint8)])
        latest = second.latest()
        assert latest.facts == {"step": step} and (second.read(latest) == step).all()
"""


def test_an_area_that_was_freed_may_be_written_again():
    command = [sys.executable, "-c", FREED]  # a store into freed memory ends the process
    cwd = Path(__file__).parents[2]
    assert subprocess.run(command, env=environment(), cwd=cwd, timeout=240).returncode == 0


class Died(BaseException):
    pass


# Writes `left` more bytes, in calls and in stores, and dies.
class Dying:
    def __init__(self, left):
        self.left = left

    def pwrite(self, file, data, start):
        count = self._take(len(data))
        WRITE(file, data[:count], start)
        return self._survived(count, len(data))

    def copyto(self, target, values):
        count = self._take(len(values))
        target[:count] = values[:count]
        self._survived(count, len(values))

    def _take(self, wanted):
        count = min(self.left, wanted)
        self.left -= count
        return count

    def _survived(self, count, wanted):
        if count < wanted:
            raise Died
        return count


WRITE = os.pwrite


# What a sparse file holds: offsets and bytes.
def extents(file):
    found, at = [], 0
    while at < os.fstat(file).st_size:
        try:
            start = os.lseek(file, at, os.SEEK_DATA)
        except OSError:  # a hole up to the end
            break
        at = os.lseek(file, start, os.SEEK_HOLE)
        found.append((start, os.pread(file, at - start, start)))
    return found


@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_a_writer_that_dies_at_any_byte_costs_one_commit(file, monkeypatch, before):
    memory = CommitMemory(file)
    for step in range(1, before + 1):
        memory.write({"step": step}, parts_of(step))
    image = extents(file)
    num_deaths = 0
    for left in range(10_000):
        os.pwrite(file, bytes(4096), 0)  # no records
        for start, data in image:
            os.pwrite(file, data, start)
        dying = Dying(left)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwrite", dying.pwrite)
                patch.setattr(np, "copyto", dying.copyto)
                memory.write({"step": before + 1}, parts_of(before + 1))
            break
        except Died:
            num_deaths += 1
        assert step_of(memory) == before
        # Whoever takes over goes on.
        memory.write({"step": before + 1}, parts_of(before + 1))
        assert step_of(memory) == before + 1
    assert num_deaths > 150


@pytest.mark.parametrize("offset", [3, 20, 30, 45, 4096 + 2])
def test_a_commit_with_a_flipped_bit_in_its_record_is_none(file, offset):
    memory = CommitMemory(file)
    memory.write({"step": 1}, parts_of(1))
    byte = os.pread(file, 1, offset)[0]
    os.pwrite(file, bytes([byte ^ 1]), offset)
    assert memory.latest() is None


def test_a_host_without_memory_is_an_error_that_leaves_the_newer_commit():
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    memory = CommitMemory(file)
    for step in (1, 2):
        memory.write({"step": step}, parts_of(step))
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    with pytest.raises(OSError):
        memory.write({"step": 3}, parts_of(3, (100_000,)))
    assert step_of(memory) == 2
    assert all(memory._commit(slot) is not None for slot in (0, 1))
    os.close(file)


WRITER = """
import sys, numpy as np
from jdp.checkpoint.commit_memory import CommitMemory
memory = CommitMemory(int(sys.argv[1]))
latest = memory.latest()
step = latest.facts["step"] if latest else 0
print("writing", flush=True)
while True:
    step += 1
    part = np.full(300_000, step % 251, np.uint8)
    memory.write({"step": step}, [part[:100_001], part[100_001:]])
"""


def test_a_killed_writer_leaves_a_commit_that_is_intact(file):
    memory, rng, step = CommitMemory(file), random.Random(1), 0
    for _ in range(30):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(file)],
            pass_fds=[file],
            env=environment(),
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
        )
        with writer:
            try:
                assert writer.stdout.readline() == b"writing\n"
                time.sleep(rng.uniform(0.0, 0.01))
            finally:
                writer.send_signal(signal.SIGKILL)
        found = step_of(memory)
        assert found >= step
        step = found
    assert step > 30
