"""Writes states in a background thread during training."""

import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from jdp.checkpoint import split_state
from jdp.checkpoint.commit_memory import Draft
from jdp.checkpoint.directory import Folder
from jdp.checkpoint.host_commits import HostCommits
from jdp.checkpoint.saved_leaves import is_split, to_disk
from jdp.checkpoint.snapshot import CommitSnapshot, CommitSnapshots, Snapshot, Snapshots
from jdp.distributed import agree, in_flight, metrics_log
from jdp.worker import progress

_log = logging.getLogger("jdp")

# (facts, result of the snapshot's `fetch`)
Write = Callable[[dict[str, Any], Any], None]

KEY_OF_LOADER = "loader"


class StateWriter:
    """A thread that writes a run's states in order; later calls raise its errors.

    A state is not written if a step that led to it failed a check. Each process raises that error
    by its next write, since the thread could raise it on only one. Processes without `is_here` only
    gather, and write their shards and shares.
    """

    def __init__(
        self, name: str, write: Write, snapshots: Snapshots | CommitSnapshots, *, is_here: bool
    ) -> None:
        self._write, self._snapshots, self._is_here = write, snapshots, is_here
        self._steps = in_flight.Unchecked()  # that led to the last state
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._job: Future[None] | None = None
        self._failure: BaseException | None = None

    def begin_write(self, state: Any, facts: dict[str, Any]) -> None:
        """Wait for the previous write, copy a state for its donation, and start writing it.

        Even after a failed write, since other processes may take part in this one.
        """
        begin_ns = time.monotonic_ns()
        self.settle()
        self._steps.require_right()
        try:
            taken = self._snapshots.take_snapshot(state, here=self._is_here)
        except Exception as error:
            self._break_up(error)
            raise
        self._steps = in_flight.Unchecked()
        if isinstance(taken, CommitSnapshot):
            progress.own.record_copy(taken.copying)
        if taken is not None:
            facts = {**facts, "leaves": taken.leaves, **taken.split}
            self._job = self._pool.submit(self._write_taken, facts, taken, self._steps)
        progress.own.record_pause(begin_ns)

    def prepare_for(
        self, state: Any, hosts: tuple[int, ...], memories: tuple[str, ...] = ()
    ) -> None:
        """Allocate the commits' memory in the thread: mapping it may take seconds."""
        assert isinstance(self._snapshots, CommitSnapshots)
        reserve = self._snapshots.reservation(state, hosts, memories, here=self._is_here)
        self._job = self._pool.submit(reserve)

    def write_alone(self) -> None:
        """From now on let the host's first process write this life's commits alone.

        For states without calls of train steps, whose counts tie shares to a step.
        """
        self.settle()
        self._break_up()

    def prepare(self, action: Callable[[], None]) -> None:
        """Run an action in the thread, before the next write."""
        self._pool.submit(action)

    def raise_failure(self) -> None:
        """Raise a failed write's error, once."""
        if self._job is not None and self._job.done():
            self.settle()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def settle(self) -> None:
        """Wait for the write, and keep its error for the next call."""
        # An interrupted wait keeps the job, whose memory is in use.
        if isinstance(self._snapshots, CommitSnapshots):
            self._snapshots.hurry()
        # An interrupted submit, unknown here, runs before this one.
        if (last := self._submitted(int)) is not None:
            last.result()
        if self._job is not None:
            self._failure = self._job.exception() or self._failure
            self._job = None

    def wait(self) -> None:
        """Wait for the write; raise its error, once."""
        self.settle()
        self.raise_failure()

    def end_thread(self) -> None:
        """Wait, end the thread, and log an unraised error."""
        if isinstance(self._snapshots, CommitSnapshots):
            self._snapshots.stop_waiting()
        try:
            self.wait()
        except Exception as error:
            _log.error("jdp: %s", error)
        if isinstance(self._snapshots, CommitSnapshots):
            self._snapshots.break_up()
        self._pool.shutdown()

    def _write_taken(
        self, facts: dict[str, Any], taken: Snapshot | CommitSnapshot, steps: in_flight.Unchecked
    ) -> None:
        try:
            values = taken.fetch()
            if not steps.went_wrong():
                self._write(facts, values)
        except Exception as error:
            self._break_up(error)
            raise

    # None at the interpreter's exit.
    def _submitted(self, action: Callable[[], Any]) -> Future[Any] | None:
        with contextlib.suppress(RuntimeError):
            return self._pool.submit(action)
        return None

    # Others must not wait for an unwritten share.
    def _break_up(self, error: Exception | None = None) -> None:
        if isinstance(self._snapshots, CommitSnapshots):
            self._snapshots.break_up(error)


def commit_writer(commits: HostCommits | None) -> StateWriter:
    """Return the writer of commits."""

    def write(facts: dict[str, Any], draft: Draft) -> None:
        assert commits is not None
        metrics_log.write_all()  # a run that resumes from here does not repeat these steps
        if not commits.finish(draft, facts):
            return
        if draft.form is None and is_split(facts):
            split_state.wait_for_all(facts)
        # Other processes may write to their areas after this one's commit.
        commits.free_earlier(1 if draft.form is not None else commits.share.num_shares)
        progress.own.latest_kept = f"step {facts['step']} (a commit in this host's memory)"
        progress.own.slot.counter.write_commit(facts["step"])

    is_here = commits is not None and commits.share.number == 0
    snapshots = Snapshots() if commits is None else CommitSnapshots(commits)
    return StateWriter("jdp commit", write, snapshots, is_here=is_here)


def checkpoint_writer(folder: Folder, *, keep: int, is_here: bool) -> StateWriter:
    """Return the writer of checkpoints; it keeps the last `keep`."""
    number = itertools.count()

    def write(facts: dict[str, Any], values: list[np.ndarray]) -> None:
        # A state is worth more than log lines, which `log` keeps.
        with contextlib.suppress(OSError):
            metrics_log.write_all()
        if is_split(facts):
            split_state.write(folder, facts, values, next(number))
        else:
            folder.write(facts["life"], facts["step"], facts, to_disk(facts["leaves"], values))
        progress.own.latest_kept = f"step {facts['step']} ({folder.path})"
        progress.own.slot.counter.write_checkpoint(facts["step"])
        if is_here:
            folder.keep(keep)

    return StateWriter("jdp save", write, Snapshots(), is_here=is_here)


def position_of(batches: Any) -> dict[str, Any]:
    """Return this process's data position, as facts."""
    if batches is None:
        return {"position": None}
    state = state_of_data(batches)
    if state is None:
        return {"position": int(batches.position)}
    return {"position": state["position"], "data": state}


def of_all_processes(group: tuple[int, ...], position: dict[str, Any]) -> dict[str, Any]:
    """Return a position with all processes' loader states; a collective call."""
    data = position.get("data", {})
    if KEY_OF_LOADER not in data:
        return position
    mine = data[KEY_OF_LOADER]
    gathered = agree.all_gather(group, mine, what="the states of their loaders")
    loaders = [gathered[process] for process in group]
    return {**position, "data": {"position": data["position"], "loaders": loaders}}


def state_of_data(batches: Any) -> dict[str, Any] | None:
    """Return the batches' state; None if they only have a position, as in a user's class."""
    if not (hasattr(batches, "get_state") and hasattr(batches, "set_state")):
        return None
    state = batches.get_state()
    return state if isinstance(state, dict) and "position" in state else None
