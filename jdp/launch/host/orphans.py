"""Processes that a process of the run has left behind: the launcher adopts and ends them.

A helper that was started with `setsid` and an empty environment has neither the process group nor
the mark by which the guardian finds what is left (`reaper.py`). But its parent is the launcher once
the process that started it has ended, since the launcher is a subreaper (`man 2 prctl`).
"""

import ctypes
import os
import signal
import time
from contextlib import suppress

_PR_SET_CHILD_SUBREAPER = 36


class Orphans:
    """The adopted children of this launcher; none before `start_adopting`.

    Attributes:
      adopts: whether the launcher becomes the parent of orphans.
    """

    def __init__(self) -> None:
        self._own: set[int] = set()
        self.adopts = False

    def start_adopting(self) -> None:
        """Adopt orphans from now on, if the system can.

        A launcher that has other children already, such as a sidecar of a shell that became the
        launcher by `exec`, adopts none: their helpers could not be told from those of the run.
        """
        children = _children()
        if children is not None and children <= self._own:
            self.adopts = _prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0

    def stop_adopting(self) -> None:
        """Leave later orphans to the system."""
        if self.adopts:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)
            self.adopts = False

    def add_own(self, pid: int) -> None:
        """Record a child that the launcher has started."""
        self._own.add(pid)

    def remove_own(self, pid: int) -> None:
        """Forget a child that was waited for."""
        self._own.discard(pid)

    def reap(self) -> set[int]:
        """Wait for the orphans that have ended, and return the others; quick."""
        left = set()
        for pid in (_children() or set()) - self._own if self.adopts else ():
            with suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    left.add(pid)
        return left

    def kill_all(self, timeout_s: float = 5.0) -> None:
        """Kill all orphans, and the orphans that these leave, for at most `timeout_s` seconds."""
        end = time.monotonic() + timeout_s
        while (left := self.reap()) and time.monotonic() < end:
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)


# None if this kernel does not tell.
def _children() -> set[int] | None:
    found: set[int] = set()
    try:
        for thread in os.listdir("/proc/self/task"):
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                with open(f"/proc/self/task/{thread}/children") as file:
                    found |= {*map(int, file.read().split())}
    except OSError:
        return None
    return found if os.path.exists("/proc/thread-self/children") else None


def _prctl(option: int, value: int) -> int:
    return ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
