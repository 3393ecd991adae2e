"""Checks that all processes get equally many batches."""

import contextlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.data import prefetcher
from jdp.distributed import agree, call_log, fail_fast, kv_store, this_process
from jdp.distributed.fail_fast import OtherFailedError
from jdp.error_codes import with_code
from jdp.worker import progress


class LoopEnd(NamedTuple):
    """How a process ended its loop, or with "on" that it requested that batch.

    >>> print(LoopEnd(1, 9, "end"))
    process 1 ended its loop after 9 batches
    """

    process: int
    num_batches: int
    how: str  # "end", "left", "error" or "on"
    text: str = ""

    def __str__(self) -> str:
        how = {
            "end": "ended its loop after {} batches",
            "left": "left its loop (break or an error) after {} batches",
            "on": "continued to batch {}",
            "error": "could not make batch {}",
        }[self.how]
        number = self.num_batches + (self.how == "error")
        return f"process {self.process} {how.format(number)}"


class Problem(NamedTuple):
    """Why no process can continue."""

    is_failure: bool  # whether a process's loader failed
    text: str


def problem_of(first: LoopEnd, mine: LoopEnd) -> Problem | None:
    """Return the problem of a loop ended by `first` for the end `mine`, if any yet."""
    for end in (mine, first):
        if end.how == "error":
            text = f"{end}, so no process can continue: {end.text}"
            return Problem(True, with_code("JDP208", text))
    is_behind = mine.how == "on" and mine.num_batches < first.num_batches
    if is_behind or mine.num_batches == first.num_batches:
        return None
    text = (
        f"{first}, but {mine}, and each step needs the rows of all ranks. Pass equally many "
        "batches on every process, such as itertools.islice(loader, n) with the smallest number "
        "of all, and leave a loop early on all processes or on none."
    )
    return Problem(False, with_code("JDP210", text))


# A process has GRACE_S after a difference to request its next batch, which raises the error. Then
# its waits for other ranks are aborted, and after LAST_GRACE_S the process exits.
GRACE_S, LAST_GRACE_S = 1.0, 3.0

# A wait in the store would abort the interpreter's shutdown.
_POLL_S = 0.5

# For a process that left its loop to report its exception.
_UNCAUGHT_S = 0.3


def hand_out_equally(
    batches: Generator[Any, None, None], sharding: NamedSharding
) -> Generator[Any, None, None]:
    """Yield batches, and find unequal numbers; all processes call this in the same order."""
    assert isinstance(sharding.mesh, Mesh)
    peers = agree.peers(sharding.mesh)
    if len(peers) == 1:
        yield from batches
        return
    loop = _Loop(peers)
    with contextlib.closing(batches):
        try:
            while (handed_out := loop.next(batches)) is not None:
                yield handed_out[0]
        finally:
            loop.end("left")


class _Loop:
    """One of this process's loops, and known facts about the others'.

    All processes give a loop the same name, and share these entries below it in the store: "first",
    the first `LoopEnd`; a note of each process whose loop ended equally; and "verdict", once all
    notes are there or a problem is found.
    """

    def __init__(self, peers: tuple[int, ...]) -> None:
        group = "-".join(map(str, peers))
        _num_loops[group] += 1
        self._prefix = f"jdp/lockstep/{group}/{_num_loops[group]}"
        self._peers, self._me = peers, jax.process_index()
        self._lock = threading.Lock()
        self._runner = threading.get_ident()
        self._num_batches = 0  # that the loop got
        self._mine: LoopEnd | None = None  # how the loop ended here, or requested too many
        self._first: LoopEnd | None = None
        self._is_compared = False
        self._problem: Problem | None = None
        self._settled, self._raised, self._stop = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._watch, name="jdp-lockstep", daemon=True)
        prefetcher.active_loops.add_compared(self)
        call_log.open_loops.add(self._prefix)
        self._thread.start()

    def next(self, batches: Iterator[Any]) -> tuple[Any] | None:
        """Return the next batch; None once all processes have ended."""
        try:
            batch = next(batches)
        except StopIteration:
            self.end("end")
            with _awaiting_end(self._prefix):
                self._wait_for_others()
            return None
        except Exception as error:
            self.end("error", repr(error)[: fail_fast.TEXT_CHARACTERS])
            with self._propagating_errors():
                raise
        with self._lock:
            if self._first is None or self._num_batches < self._first.num_batches:
                self._num_batches += 1
                return (batch,)
            self._mine = LoopEnd(self._me, self._num_batches + 1, "on")
        self._compare()
        self._wait_for_others()
        raise AssertionError(f"{self._mine}, and no process had ended")

    def end(self, how: str, text: str = "") -> None:
        with self._lock:
            if self._mine is not None:
                return
            self._mine = mine = LoopEnd(self._me, self._num_batches, how, text)
        call_log.open_loops.discard(self._prefix)
        if how == "error":
            self._raised.set()  # this process raises the error itself
        with self._lock:  # the watcher may delete the keys
            if self._first is None and kv_store.offer(f"{self._prefix}/first", json.dumps(mine)):
                self._first = mine
        self._compare()

    def stop(self) -> None:
        try:
            if kv_store.is_open():
                self.end("left")
                self._is_settled()
        finally:
            self._stop.set()
            self._thread.join()

    def raise_problem(self) -> None:
        if self._problem is not None and not self._raised.is_set():
            self._raised.set()
            kind = OtherFailedError if self._problem.is_failure else ValueError
            with self._propagating_errors():
                raise kind(self._problem.text)

    # It may wait for this process at its next loop's start.
    def _propagating_errors(self) -> contextlib.AbstractContextManager[None]:
        return agree.propagating_errors(self._peers, "in a loop over batches")

    # After the first end, and after this loop ended or got too many batches.
    def _compare(self) -> None:
        with self._lock:
            if self._is_compared or self._first is None:
                return
            mine = self._mine or LoopEnd(self._me, self._num_batches, "on")
            problem = problem_of(self._first, mine)
            if problem is None and mine.how == "on":
                return
            self._is_compared = True
        if problem is None:
            kv_store.put(f"{self._prefix}/notes/{self._me}", "")
            if self._missing():
                return
            kv_store.delete(f"{self._prefix}/")  # the last process sees all notes
        kv_store.offer(f"{self._prefix}.verdict", json.dumps(problem))

    def _missing(self) -> list[int]:
        notes = kv_store.keys(f"{self._prefix}/notes/")
        return [process for process in self._peers if str(process) not in notes]

    def _is_settled(self) -> bool:
        return self._settled.wait(min(agree.timeout_s(), threading.TIMEOUT_MAX))

    def _wait_for_others(self) -> None:
        with progress.WAITING:  # not for data
            is_settled = self._is_settled()
        if not is_settled:
            text = (
                f"{self._mine}, and {agree.timeout_s():g} s later processes {self._missing()} "
                "have neither ended their loops nor continued. They hang or run other code."
            )
            raise RuntimeError(with_code("JDP207", text))
        self.raise_problem()

    def _watch(self) -> None:
        is_own = False  # an exception of this process ended the loop
        try:
            # "first" may be deleted before the process that ended first reads it.
            first = self._wait_for(f"{self._prefix}/first", unless=lambda: self._first is not None)
            if first is not None:
                with self._lock:
                    self._first = LoopEnd(*first)
            self._compare()
            if problem := self._wait_for(f"{self._prefix}.verdict"):
                self._problem = Problem(*problem)
                # An uncaught exception leaves a loop before it is reported.
                if not self._problem.is_failure and (
                    cause := fail_fast.uncaught(self._peers, timeout_s=_UNCAUGHT_S, or_own=True)
                ):
                    is_own, self._problem = cause[0] == self._me, Problem(True, cause[1])
        except OtherFailedError as error:
            self._problem = Problem(True, str(error))
        except Exception as error:  # the run cannot continue without the store
            text = f"the loops of the processes can no longer be compared: {error!r}"
            self._problem = Problem(True, text)
        if self._problem is None:
            prefetcher.active_loops.compared.discard(self)
        elif not is_own and (self._mine is None or self._mine.how != "error"):
            # This process's own error is more specific.
            this_process.current.why_over = self._problem.text
        self._settled.set()
        if self._problem is not None and not this_process.current.is_interrupted:
            self._get_out(self._problem.text)

    def _wait_for(self, key: str, unless: Callable[[], bool] = lambda: False) -> Any:
        text = None
        while text is None and not unless() and not self._stop.is_set():
            text = kv_store.get(key, timeout_s=_POLL_S)
            if text is None and (uncaught := fail_fast.uncaught(self._peers, timeout_s=0.0)):
                raise OtherFailedError(uncaught[1])
        return None if text is None else json.loads(text)

    # End this process's wait in a step without the others.
    def _get_out(self, problem: str) -> None:
        # First: if the process with the store exits, JAX ends this one.
        print(f"jdp: {problem}", file=sys.stderr, flush=True)
        self._stop.wait(GRACE_S)  # earlier steps may end
        place = self._place()
        if cpu_runtime.why_missing() is None:
            cpu_runtime.abort(problem)
        if self._first is None or self._num_batches <= self._first.num_batches:
            return
        was_raised = self._raised.wait(LAST_GRACE_S)
        # Another process's abort may have ended the wait before `place` was read.
        has_left = self._mine is not None and self._mine.how == "left"
        is_out = was_raised or has_left or self._stop.is_set()
        if not is_out and self._place() == place:
            text = f"jdp: process {self._me} still waits and ends: {problem}"
            print(text, file=sys.stderr, flush=True)
            prefetcher.leave()

    # The place of the loop's thread, constant while it waits.
    def _place(self) -> Any:
        frame = sys._current_frames().get(self._runner)
        return frame and (id(frame), frame.f_lasti)


_num_loops: Counter[str] = Counter()


@contextlib.contextmanager
def _awaiting_end(loop: str) -> Iterator[None]:
    call_log.awaited_loop = loop
    call_log.num_awaited += 1
    call_log.num_waiting += 1
    try:
        yield
    finally:
        call_log.awaited_loop = ""
        call_log.num_waiting -= 1
