"""Checks whether the processes wait for each other in different calls.

A process publishes its last calls in the store when it exits, or when none of its calls has ended
for `PATIENCE_S`. While it waits, process 0 of a group compares all processes' calls with its own;
the others compare theirs with process 0's.
"""

import atexit
import contextlib
import json
import threading
import time
from collections.abc import Mapping

import jax

from jdp.distributed import call_log, fail_fast, kv_store
from jdp.distributed.call_log import Described
from jdp.error_codes import with_code

PATIENCE_S = 3.0
_POLL_S = 0.5
_END_S = 2.0
_NUM_SHOWN = 3

_LOOP_END = Described("the end of its loop over batches", "the end of a loop", {})
_WHY = (
    "Their ranks wait for each other, or sum unrelated values. All processes of a mesh must make "
    "the same calls in the same order, with arrays of the same shapes. Look for a call below `if "
    "jax.process_index() == 0`, or below a condition on a value of one process."
)


class DifferentCalls:
    """Ends this process if its calls differ from another's, and no call ends or starts."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._num_calls, self._since, self._is_waiting = 0, 0.0, False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()
        self._publisher: threading.Thread | None = None

    def watch_end(self) -> None:
        """Publish this process's calls when it exits; for joined processes."""
        # Registered after JAX's handler, and so run before it, while the store is open.
        atexit.unregister(self._end)
        atexit.register(self._end)
        if self._publisher is None:  # Python starts no thread while the interpreter ends.
            self._publisher = threading.Thread(target=self._publish_at_end, daemon=True)
            self._publisher.start()

    def poll(self, is_waiting: bool) -> None:
        """Start a comparison, without waiting, if no call began or ended for long."""
        now, num_calls = time.monotonic(), _num_calls()
        self._is_waiting = is_waiting
        if num_calls != self._num_calls:
            self._num_calls, self._since = num_calls, now
        if not is_waiting or now - self._since < self._patience_s or self._stop.is_set():
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._compare, args=(num_calls,), daemon=True)
            self._thread.start()

    # A thread in the store's client aborts a process that exits, so wait for it.
    def _end(self) -> None:
        fail_fast.leave_if_failed()
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_END_S)
            if self._thread.is_alive():
                return  # it waits for the store, as this thread would
        if self._publisher is not None:
            self._ends.set()
            self._publisher.join(_END_S)  # the store may not answer

    def _publish_at_end(self) -> None:
        self._ends.wait()
        _publish()

    def _compare(self, num_calls: int) -> None:
        _publish()
        with contextlib.suppress(Exception):  # the store may have ended
            while _num_calls() == num_calls and self._is_waiting:
                for group, log in [*call_log.logs.items()]:
                    if text := _difference(group, log.latest()):
                        self._stop.set()  # at a prompt the process continues; one report suffices
                        fail_fast.end_process(RuntimeError(text))
                        return
                if self._stop.wait(_POLL_S):
                    return


current = DifferentCalls()


def _num_calls() -> int:
    return sum(log.num_calls for log in [*call_log.logs.values()]) + call_log.num_awaited


def _publish() -> None:
    with contextlib.suppress(Exception):
        for group, log in [*call_log.logs.items()]:
            facts = log.latest(), call_log.awaited_loop
            kv_store.replace(_key(group, jax.process_index()), json.dumps(facts))


def _difference(group: tuple[int, ...], mine: Mapping[int, Described | None]) -> str | None:
    me, first = jax.process_index(), group[0]
    for process in group[1:] if me == first else [first]:
        text = kv_store.get_now(_key(group, process))
        if text is None:
            continue
        latest, loop = json.loads(text)
        theirs = {int(i): each and Described(*each) for i, each in latest.items()}
        if loop in call_log.open_loops:  # their next call is behind this one's loop
            theirs[max(theirs, default=0) + 1] = _LOOP_END
        calls = {me: mine, process: theirs}
        one, other = sorted(calls)
        if found := call_log.first_difference(calls[one], calls[other]):
            return described(one, other, *found)
    return None


def described(one: int, other: int, number: int, mine: Described, theirs: Described) -> str:
    """Return the error for two processes in different calls, equal on both."""
    paths = [
        path
        for path in dict.fromkeys([*mine.shapes, *theirs.shapes])
        if mine.name != theirs.name or mine.shapes.get(path) != theirs.shapes.get(path)
    ]
    text = (
        f"processes {one} and {other} make different calls: call {number} across processes is "
        f"{_shown(mine, paths)} on process {one}, and {_shown(theirs, paths)} on process "
        f"{other}. {_WHY}"
    )
    return with_code("JDP211", text)


def _shown(call: Described, paths: list[str]) -> str:
    found = [f"{path} {call.shapes[path]}" for path in paths if path in call.shapes]
    more = ", ..." if len(found) > _NUM_SHOWN else ""
    return f"{call.what} ({', '.join(found[:_NUM_SHOWN])}{more})" if found else call.what


def _key(group: tuple[int, ...], process: int) -> str:
    return f"jdp/calls/{'-'.join(map(str, group))}/{process}"
