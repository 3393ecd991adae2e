"""Random schedules of processes that commit together: no commit ever has values of two steps.

The processes are threads with a `HostCommits` each, over one memory. Each makes steps that need the
others, as collectives do, and commits in a second thread, as `StateWriter` does.
"""

import os
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jdp.checkpoint import commit_memory, host_commits
from jdp.checkpoint.commit_memory import CommitMemory
from jdp.checkpoint.host_commits import HostCommits
from jdp.checkpoint.write_plan import Share

NUM_BYTES = 6 * 4096 + 61
NUM_STEPS = 12
DEADLINE_S = 20.0

# What happens to one process at one step: it misses the commit, cannot begin it, cannot read the
# values, leaves its loop, is stopped for a while, or all processes die.
ACCIDENTS = [None, "misses", "begin", "fetch", "leaves", "stops", "die"]


class Pausing:
    """The module `os`, whose reads and writes of the memory pause at random."""

    def __init__(self, die):
        self._die = die

    def __getattr__(self, name):
        return getattr(os, name)

    def _pause(self):
        if self._die.random() < 0.2:
            time.sleep(self._die.choice([0.0, 1e-5, 3e-4, 2e-3]))

    def pread(self, *args):
        self._pause()
        return os.pread(*args)

    def pwrite(self, *args):
        self._pause()
        count = os.pwrite(*args)
        self._pause()
        return count


class Died(Exception):
    """A process of the life was killed, and so were all."""


class Life:
    """Processes of one life of a run, which steps from `first_step` on."""

    def __init__(self, file, seed, first_step):
        self.die = random.Random(seed)
        self.file, self.first_step, self.tag = file, first_step, f"life {seed}"
        self.num = self.die.choice([2, 2, 3])
        self.commit_every = self.die.choice([1, 1, 2, 3])
        self.accidents = {}
        for accident in self.die.choices(ACCIDENTS, k=2):
            self.accidents[self.die.randrange(self.num), self.die.randint(2, NUM_STEPS)] = accident
        self.num_calls = [0] * self.num
        self.is_over = threading.Event()  # some process has left, so that steps are not finished
        self.are_dead = threading.Event()
        self.errors, self.results = [], Counter()

    def run(self, memory):
        """Let all processes run to their end, and look at what is committed all the time."""
        threads = [threading.Thread(target=self.process, args=(i,)) for i in range(self.num)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + DEADLINE_S
        while any(thread.is_alive() for thread in threads):
            require_one_step(memory)
            if time.monotonic() > end:
                self.are_dead.set()
                self.errors.append("a process waits forever")
            time.sleep(0.001)
        require_one_step(memory)
        assert not self.errors, (self.tag, self.num, self.commit_every, self.accidents, self.errors)

    def process(self, me):
        commits, steps = HostCommits(self.file, Share(me, self.num)), 0
        commits.begin_life(self.tag)
        wait = commits._wait
        commits._wait = lambda is_done: wait(lambda: self.is_alive() and is_done())
        job, pool = None, ThreadPoolExecutor(1)
        for call in range(1, NUM_STEPS + 1):
            accident = self.accidents.get((me, call))
            if accident == "die":
                self.are_dead.set()
            if accident == "leaves" or self.are_dead.is_set() or self.is_over.is_set():
                break
            if accident == "stops":
                time.sleep(0.1)
            self.num_calls[me] = call
            if accident == "misses":
                continue
            steps += 1
            if steps % self.commit_every == 0:
                self.settle(commits, job)
                facts = {"step": self.first_step + steps, "num_calls": call, "value": call}
                job = self.begin(commits, facts, accident, pool)
        self.is_over.set()
        commits.stop_waiting()
        self.settle(commits, job)
        if not self.are_dead.is_set():
            commits.break_up()

    def is_alive(self):
        if self.are_dead.is_set():
            raise Died
        return True

    def settle(self, commits, job):
        """Wait for a commit, as `StateWriter.settle` does."""
        commits.hurry()
        if job is not None:
            job.exception()

    def begin(self, commits, facts, accident, pool):
        """Begin a commit, as `StateWriter.begin_write` does."""
        if not commits.is_together and commits.share.number:
            return None
        try:
            if accident == "begin":
                raise OSError("full")
            draft = commits.begin(NUM_BYTES, form=5 if commits.is_together else None)
        except (OSError, RuntimeError) as error:
            commits.break_up(str(error))
            return None
        return draft and pool.submit(self.write, commits, draft, facts, accident)

    def write(self, commits, draft, facts, accident):
        whole = slice(0, NUM_BYTES)
        mine = whole if draft.form is None else commits.share.of_bytes(NUM_BYTES)
        die = random.Random(f"{self.tag} {commits.share.number} {facts}")
        try:
            while min(self.num_calls) < facts["num_calls"] and not self.is_over.is_set():
                time.sleep(0.0002)
            if accident == "fetch" or min(self.num_calls) < facts["num_calls"]:
                raise OSError("the step failed")
            middle = die.randint(mine.start, mine.stop)
            draft.values[mine.start : middle] = facts["value"]
            time.sleep(die.choice([0.0, 0.0, 1e-3, 4e-3]))
            draft.values[middle : mine.stop] = facts["value"]
            if self.is_alive():
                self.results[commits.finish(draft, facts), draft.form] += 1
        except OSError as error:
            commits.break_up(str(error))


def require_one_step(memory):
    """Require that each intact commit has the values of its step."""
    for commit in memory.intact():
        found = np.unique(memory.read(commit)).tolist()
        if commit in memory.intact():  # not written over meanwhile
            assert found == [commit.facts["value"]], commit.facts


@pytest.mark.parametrize("seed", range(4))
def test_no_schedule_mixes_two_steps_or_leaves_a_process_waiting(monkeypatch, seed):
    monkeypatch.setattr(host_commits, "_PATIENCE_S", 1.0)
    monkeypatch.setattr(host_commits, "_LAST_S", 0.05)
    die, results = random.Random(seed), Counter()
    for module in (host_commits, commit_memory):
        monkeypatch.setattr(module, "os", Pausing(die))
    for first_life in range(0, 60, 3):
        file, step = os.memfd_create("test"), 0
        memory = CommitMemory(file)
        for life in range(3):
            each = Life(file, 1000 * seed + first_life + life, step)
            each.run(memory)
            results += each.results
            latest = memory.latest()
            assert latest is not None or not step
            step = latest.facts["step"] if latest else step
        os.close(file)
    assert min(results[True, 5], results[True, None], results[False, 5]) > 5, results
