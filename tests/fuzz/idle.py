"""Telling children that wait for ever from children that a busy machine lets wait."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

IDLE_S = 60.0
_BUSY_S = 0.5  # for each process in that: 0.2 is what threads need that wait for others

_POLL_S = 1.0


@contextlib.contextmanager
def ended(pids, *, idle_s=IDLE_S):
    """End the processes of `pids()` when none of them has wanted to compute for `idle_s`.

    The time on the clock says nothing on a machine with other work: a program of two seconds has
    waited a minute for a core there. They show their stacks (`faulthandler`) and abort.
    """
    done = threading.Event()
    watch = threading.Thread(target=_watch, args=(pids, idle_s, done), daemon=True)
    watch.start()
    try:
        yield
    finally:
        done.set()
        watch.join()


def _watch(pids, idle_s, done):
    since, busy_s = time.monotonic(), 0.0
    while not done.wait(_POLL_S):
        children = pids()
        now, wanted_s = time.monotonic(), sum(map(_wanted_s, children))
        if not busy_s <= wanted_s < busy_s + _BUSY_S * len(children) * idle_s / IDLE_S:
            since, busy_s = now, wanted_s
        elif now - since > idle_s:
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
            return


def _wanted_s(pid):
    """Return how long threads of a process have run or waited for a core; infinite if unknown."""
    total_ns = 0
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            ran, waited, _ = (thread / "schedstat").read_text().split()
            total_ns += int(ran) + int(waited)
    except OSError:  # a thread has ended just now, or this is not Linux
        return float("inf")
    return total_ns / 1e9
