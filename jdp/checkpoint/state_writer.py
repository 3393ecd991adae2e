"""Writes states, with the position of the data, in a background thread during training."""

import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from jdp.checkpoint import shared_checkpoint, split_commit
from jdp.checkpoint.commit_memory import CommitMemory, Draft
from jdp.checkpoint.commit_snapshot import CommitSnapshot, CommitSnapshots
from jdp.checkpoint.directory import Folder
from jdp.checkpoint.saved_leaves import is_split, to_disk
from jdp.checkpoint.snapshot import Snapshot, Snapshots
from jdp.distributed import agree, in_flight, metrics_log
from jdp.worker import progress

_log = logging.getLogger("jdp")

# (facts, the values that `fetch` of the snapshot returned)
Write = Callable[[dict[str, Any], Any], None]

# The key of the state of a loader in the position of one process.
KEY_OF_LOADER = "loader"


class StateWriter:
    """A thread that writes the states of a run in order; its errors are raised by later calls.

    A state is not written if a step that led to it failed a check. Each process raises that error
    no later than at its next write; raised from the thread, it would reach only one process. The
    interpreter waits at exit for a state that is being written. Processes where `is_here` is false
    only take part in gathering, and write their parts of split leaves.

    >>> written = []
    >>> writer = StateWriter("example", lambda facts, values: written.append((facts, values)),
    ...                      Snapshots(), is_here=True)
    >>> writer.begin_write({"w": np.ones(2)}, {"step": 10})
    >>> writer.wait()
    >>> [(facts["step"], values) for facts, values in written]
    [(10, [array([1., 1.])])]
    >>> writer.end_thread()
    """

    def __init__(
        self, name: str, write: Write, snapshots: Snapshots | CommitSnapshots, *, is_here: bool
    ) -> None:
        self._write, self._snapshots, self._is_here = write, snapshots, is_here
        self._steps = in_flight.Unchecked()  # steps that led to the last state
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._job: Future[None] | None = None

    def begin_write(self, state: Any, facts: dict[str, Any]) -> None:
        """Wait for the previous write, copy a state so it may be donated, and start writing it.

        Args:
          state: the state of the step that has just been called.
          facts: that are written with it: step, position of the data, life.

        Raises:
          ValueError: if the state was donated.
          RuntimeError: if a step that led to the previous state failed a check.
          OSError: if there is no memory for a commit.
        """
        begin_ns = time.monotonic_ns()
        self.wait()
        self._steps.require_right()
        taken = self._snapshots.take_snapshot(state, here=self._is_here)
        self._steps = in_flight.Unchecked()
        if isinstance(taken, CommitSnapshot):
            progress.own.record_copy(taken.copying)
        if taken is not None:
            facts = {**facts, "leaves": taken.leaves, **taken.split}
            self._job = self._pool.submit(self._write_taken, facts, taken, self._steps)
        progress.own.record_pause(begin_ns)

    def prepare_for(self, state: Any, hosts: tuple[int, ...]) -> None:
        """Allocate the memory of commits in the thread, because mapping it may take seconds.

        `hosts`: as for `CommitSnapshots.reservation`.
        """
        assert isinstance(self._snapshots, CommitSnapshots)
        reserve = self._snapshots.reservation(state, hosts, here=self._is_here)
        self._job = self._pool.submit(reserve)

    def prepare(self, action: Callable[[], None]) -> None:
        """Run an action in the thread, before the next state is written."""
        self._pool.submit(action)

    def raise_failure(self) -> None:
        """Raise the error of a failed write, without waiting."""
        if self._job is not None and self._job.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the state is written; raise its error, once."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def end_thread(self) -> None:
        """Wait, and end the thread; log an error that was not raised."""
        try:
            self.wait()
        except Exception as error:
            _log.error("jdp: %s", error)
        if isinstance(self._snapshots, CommitSnapshots):
            self._snapshots.wait_for_copies()
        self._pool.shutdown()

    def _write_taken(
        self,
        facts: dict[str, Any],
        taken: Snapshot | CommitSnapshot,
        steps: in_flight.Unchecked,
    ) -> None:
        values = taken.fetch()
        if not steps.went_wrong():
            metrics_log.flush()  # a run that continues from here does not repeat these steps
            self._write(facts, values)


def commit_writer(memory: CommitMemory | None, *, is_here: bool, num_local: int) -> StateWriter:
    """Return the writer of the commits of this host, which has `num_local` processes.

    Without a memory, there is nothing that it may write.

    Args:
      memory: of this process for commits; None if it writes none.
      is_here: whether this process writes the leaves that are not split.
      num_local: processes of this host.
    """

    holds_earlier = is_here

    def write(facts: dict[str, Any], draft: Draft) -> None:
        nonlocal holds_earlier
        assert memory is not None
        memory.finish(draft, facts)
        num_areas = 1
        if is_split(facts):
            split_commit.wait_for_all(facts)
            num_areas = num_local
        if holds_earlier:
            # The areas of earlier lives, once: by the next time, processes may write to their own.
            memory.free_areas(num_areas)
            holds_earlier = False
        progress.own.latest_kept = f"step {facts['step']} (a commit in this host's memory)"
        progress.own.slot.counter.write_commit(facts["step"])

    snapshots = Snapshots() if memory is None else CommitSnapshots(memory)
    return StateWriter("jdp commit", write, snapshots, is_here=is_here)


def checkpoint_writer(folder: Folder, *, keep: int, is_here: bool) -> StateWriter:
    """Return the writer of checkpoints to a folder; it keeps the last `keep`.

    Args:
      folder: the directory of checkpoints.
      keep: how many checkpoints stay there, >= 1.
      is_here: whether this process writes the leaves that are not split.
    """
    number = itertools.count()

    def write(facts: dict[str, Any], values: list[np.ndarray]) -> None:
        if is_split(facts):
            shared_checkpoint.write(folder, facts, values, next(number))
        else:
            folder.write(facts["life"], facts["step"], facts, to_disk(facts["leaves"], values))
        progress.own.latest_kept = f"step {facts['step']} ({folder.path})"
        progress.own.slot.counter.write_checkpoint(facts["step"])
        if is_here:
            folder.keep(keep)

    return StateWriter("jdp save", write, Snapshots(), is_here=is_here)


def position_of(batches: Any) -> dict[str, Any]:
    """Return the position of the data of this process, in the form of the facts."""
    if batches is None:
        return {"position": None}
    state = state_of_data(batches)
    if state is None:
        return {"position": int(batches.position)}
    return {"position": state["position"], "data": state}


def of_all_processes(group: tuple[int, ...], position: dict[str, Any]) -> dict[str, Any]:
    """Return a position with the states of the loaders of all processes, which all call this."""
    data = position.get("data", {})
    if KEY_OF_LOADER not in data:
        return position
    mine = data[KEY_OF_LOADER]
    gathered = agree.all_gather(group, mine, what="the states of their loaders")
    loaders = [gathered[process] for process in group]
    return {**position, "data": {"position": data["position"], "loaders": loaders}}


def state_of_data(batches: Any) -> dict[str, Any] | None:
    """Return the state of batches; None if they have a position alone.

    A class of the user's may have a `get_state` for something else.
    """
    if not (hasattr(batches, "get_state") and hasattr(batches, "set_state")):
        return None
    state = batches.get_state()
    return state if isinstance(state, dict) and "position" in state else None
