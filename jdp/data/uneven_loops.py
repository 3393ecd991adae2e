"""While a loop runs: do all processes hand out equally many batches?"""

import atexit
import contextlib
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.data.loop_ends import LoopEnd, Problem, problem_of
from jdp.distributed import agree, kv_store
from jdp.distributed.fail_fast import OtherFailedError, leave_if_failed
from jdp.error_codes import with_code
from jdp.worker import progress

# Once it is known that the loops differ, a process has this long to come for its next batch, where
# the error is raised: then its waits for other ranks are ended, and if that does not help, itself.
GRACE_S, LAST_GRACE_S = 1.0, 3.0

# A thread inside of the store's client when the interpreter shuts down aborts the process, so it
# looks up this often whether it should stop.
_POLL_S = 0.5

_TEXT_CHARACTERS = 600


def hand_out_equally(
    batches: Generator[Any, None, None], sharding: NamedSharding
) -> Generator[Any, None, None]:
    """Hand out this process's batches, and find a process that hands out more of them, or fewer.

    All processes come here in the same order. They exchange nothing until one ends its loop.

    Raises:
      ValueError: where the next batch is asked for, on every process, if one has ended or left its
        loop after another number of batches; stderr has it at once. A process that does not come
        there, since it waits in a step that the others do not run, is freed by `runtime.abort`, or
        ends with exit code 1 if its step reduces by psum. A process that has left its loop gets
        the error in its next loop, or when the program ends. The run cannot go on.
      RuntimeError: likewise if `batches` raises on another process; or if a process does not end
        its loop for `agree.timeout_s()` after this one.
    """
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
    """One loop of this process, and what is known of the other processes' loops.

    In the store, below a name that all processes give this loop: "first", the first `LoopEnd`; a
    note of each process whose loop ended equally; "verdict", once there are all notes or a problem.
    """

    def __init__(self, peers: tuple[int, ...]) -> None:
        if not _num_loops:
            # Later than JAX does, so that it comes before JAX shuts its store.
            atexit.register(_stop_all)
        group = "-".join(map(str, peers))
        _num_loops[group] += 1
        self._prefix = f"jdp/lockstep/{group}/{_num_loops[group]}"
        self._peers, self._me = peers, jax.process_index()
        self._lock = threading.Lock()
        self._runner = threading.get_ident()
        self._num_batches = 0  # handed out
        self._mine: LoopEnd | None = None  # how the loop ended here, or that it goes too far
        self._first: LoopEnd | None = None
        self._is_compared = False
        self._problem: Problem | None = None
        self._settled, self._raised, self._stop = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._watch, name="jdp-lockstep", daemon=True)
        _running.add(self)
        self._thread.start()

    def next(self, batches: Iterator[Any]) -> tuple[Any] | None:
        """Return the next batch, or None if no process has one."""
        try:
            batch = next(batches)
        except StopIteration:
            self.end("end")
            self._wait_for_others()
            return None
        except Exception as error:
            self.end("error", repr(error)[:_TEXT_CHARACTERS])
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
        """Report to the others, without waiting for them, that this process hands out no more."""
        with self._lock:
            if self._mine is not None:
                return
            self._mine = mine = LoopEnd(self._me, self._num_batches, how, text)
        if how == "error":
            self._raised.set()  # the error itself
        if self._first is None and kv_store.offer(f"{self._prefix}/first", json.dumps(mine)):
            self._first = mine
        self._compare()

    def stop(self) -> None:
        """End the loop, for the program ends, and learn how the others end theirs."""
        try:
            if kv_store.is_open():
                self.end("left")
                self._is_settled()
        finally:
            self._stop.set()
            self._thread.join()

    def raise_problem(self) -> None:
        """Raise the problem, if there is one and it was not raised yet."""
        if self._problem is not None and not self._raised.is_set():
            self._raised.set()
            with self._propagating_errors():
                raise (OtherFailedError if self._problem.is_failure else ValueError)(
                    self._problem.text
                )

    # A process that has left the loop may wait for this one, to begin its next loop.
    def _propagating_errors(self) -> contextlib.AbstractContextManager[None]:
        return agree.propagating_errors(self._peers, "in a loop over batches")

    # Once both are known: the first end, and the end of this process, or that it went too far.
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
            kv_store.delete(f"{self._prefix}/")  # The last process sees all notes.
        kv_store.offer(f"{self._prefix}.verdict", json.dumps(problem))

    def _missing(self) -> list[int]:
        notes = kv_store.keys(f"{self._prefix}/notes/")
        return [process for process in self._peers if str(process) not in notes]

    def _is_settled(self) -> bool:
        return self._settled.wait(min(agree.timeout_s(), threading.TIMEOUT_MAX))

    def _wait_for_others(self) -> None:
        if not self._is_settled():
            text = (
                f"{self._mine}, and {agree.timeout_s():g} s later processes {self._missing()} "
                "have neither ended theirs nor gone on: they hang, or do something else."
            )
            raise RuntimeError(with_code("JDP207", text))
        self.raise_problem()

    def _watch(self) -> None:
        try:
            # The one that ended first knows, and "first" may be gone by the time that it looks.
            first = self._wait_for(f"{self._prefix}/first", unless=lambda: self._first is not None)
            if first is not None:
                with self._lock:
                    self._first = LoopEnd(*first)
            self._compare()
            if problem := self._wait_for(f"{self._prefix}.verdict"):
                self._problem = Problem(*problem)
        except Exception as error:  # of the store, which is gone, and the run with it
            text = f"the loops of the processes cannot be compared any more: {error!r}"
            self._problem = Problem(True, text)
        if self._problem is None:
            _running.discard(self)
        self._settled.set()
        if self._problem is not None:
            self._get_out(self._problem.text)

    def _wait_for(self, key: str, unless: Callable[[], bool] = lambda: False) -> Any:
        text = None
        while text is None and not unless() and not self._stop.is_set():
            text = kv_store.get(key, timeout_s=_POLL_S)
        return None if text is None else json.loads(text)

    # This process may wait in a step that the others do not run.
    def _get_out(self, problem: str) -> None:
        # At once: where the process ends that holds the store, JAX ends this one.
        print(f"jdp: {problem}", file=sys.stderr, flush=True)
        self._stop.wait(GRACE_S)  # the steps before that one may end
        place = self._place()
        if cpu_runtime.why_missing() is None:
            cpu_runtime.abort(problem)
        if self._first is None or self._num_batches <= self._first.num_batches:
            return
        was_raised = self._raised.wait(LAST_GRACE_S)
        # Another process's abort may have got it out before its place was looked at.
        has_left = self._mine is not None and self._mine.how == "left"
        is_out = was_raised or has_left or self._stop.is_set()
        if not is_out and self._place() == place:
            print(f"jdp: process {self._me} still waits, and ends.", file=sys.stderr, flush=True)
            _exit()

    # Where the thread that runs the loop is: the same a second later where it waits.
    def _place(self) -> Any:
        frame = sys._current_frames().get(self._runner)
        return frame and (id(frame), frame.f_lasti)


def raise_pending() -> None:
    """Raise the problem of a loop that this process had left before it was found."""
    for loop in list(_running):
        loop.raise_problem()


_num_loops: Counter[str] = Counter()
_running: set[_Loop] = set()


def _stop_all() -> None:
    leave_if_failed()
    progress.ends()
    for loop in list(_running):
        loop.stop()
    if _running:  # those with a problem
        with contextlib.suppress(ValueError, RuntimeError):
            raise_pending()
        _exit()  # In its own handler JAX would wait minutes for the other processes.


def _exit() -> None:
    sys.stdout.flush()
    os._exit(1)
