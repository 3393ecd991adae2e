"""Telling children that wait for ever from children that a busy machine lets wait."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

IDLE_S = 60.0
_BUSY_S = 0.5  # of CPU time of a process in that: 0.2 is what threads need that wait for others

_POLL_S = 1.0


@contextlib.contextmanager
def ended(pids, *, idle_s=IDLE_S):
    """End the processes of `pids()` when together they have not computed for `idle_s`.

    The time on the clock says nothing on a machine with other work: a program of two seconds has
    taken a minute there. They show their stacks (`faulthandler`) and abort.
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
        now, cpu_s = time.monotonic(), sum(map(_cpu_s, children))
        if not busy_s <= cpu_s < busy_s + _BUSY_S * len(children) * idle_s / IDLE_S:
            since, busy_s = now, cpu_s
        elif now - since > idle_s:
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
            return


def _cpu_s(pid):
    """Return the CPU time that a process has used; infinite where that cannot be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("inf")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
