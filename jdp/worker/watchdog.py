"""Watches this process if no launcher does, and reads states that a launcher cannot see."""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from jdp.worker.exit_codes import STALLED
from jdp.worker.hang_detector import HangDetector
from jdp.worker.progress_board import Slot

# Descriptor 2, not sys.stderr, whose lock a hung thread may hold.
_STDERR = 2
_TICK_S = 1.0
_DEBUGGERS = frozenset(["bdb", "pdb", "pydevd", "_pydevd_bundle", "debugpy"])


def show_stacks_when_asked() -> None:
    """Have SIGQUIT show the Python stacks of this process, unless the script handles it."""
    if signal.getsignal(signal.SIGQUIT) in (signal.SIG_DFL, signal.SIG_IGN):
        # In C, so that it works in a process that never returns to Python.
        faulthandler.register(signal.SIGQUIT, file=_STDERR, all_threads=True, chain=False)


class SelfWatch:
    """A thread that watches this process, and the timer of `faulthandler` in case that cannot run.

    Args:
      slot: of this process.
      timeout_s: seconds that a step may take; inf for no limit.
      process: its index.
      is_launched: whether a launcher watches it, so that this looks for debuggers alone.
      is_alone: whether there are no other processes, which would wait for this one.
    """

    def __init__(
        self, slot: Slot, timeout_s: float, process: int, *, is_launched: bool, is_alone: bool
    ):
        # Never end an interactive session: its state would be lost.
        self._ends = not (hasattr(sys, "ps1") or sys.flags.interactive)
        # faulthandler has only one timer, and pytest uses it.
        self._has_timer = not is_launched and "PYTEST_CURRENT_TEST" not in os.environ
        self._slot = slot
        self._process = process
        self._is_launched = is_launched
        self._is_alone = is_alone
        self._timeout_s = timeout_s
        self._tick_s = min(_TICK_S, timeout_s / 10)
        self._watch = HangDetector(timeout_s, ends=self._ends)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jdp-watch", daemon=True)

    def start(self, num_running: Callable[[], int]) -> None:
        """Start the thread; `num_running` returns how many steps the devices have not finished."""
        self._num_running = num_running
        self._arm(self._watch.left_s(time.monotonic(), self._slot.read()))
        self._thread.start()

    def stop_watching(self) -> None:
        """End the thread and the timer."""
        self._stopped.set()
        self._thread.join(_TICK_S)
        if self._has_timer:
            faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        before_s, num_before, num_reduced = -1.0, 0, 0
        while not self._stopped.wait(self._tick_s):
            where = self._slot.read()
            # Query the devices and debuggers only if there is no progress.
            is_idle = where.progress_s == before_s
            num = self._num_running() if is_idle else 0
            if num < num_before or where.done != num_reduced:
                self._slot.write_progress()
            num_reduced = where.done
            self._slot.write_seen(num > 0, is_idle and is_debugged())
            where = self._slot.read()
            before_s, num_before = where.progress_s, num
            if self._is_launched:
                continue
            now = time.monotonic()
            stall = self._watch.poll(now, {self._process: where})
            self._arm(self._watch.left_s(now, where))
            if stall is not None:
                self._report(stall.report)
                if stall.is_over and self._ends:
                    os._exit(STALLED)

    # The timer goes off if this thread cannot run for so long because other code holds the GIL. If
    # the process is alone, that may be the author's own code, which has no limit.
    def _arm(self, left_s: float) -> None:
        if not self._has_timer:
            return
        after_s = (self._timeout_s if self._is_alone else left_s) + 2 * self._tick_s
        if after_s >= threading.TIMEOUT_MAX:
            faulthandler.cancel_dump_traceback_later()
        else:
            ends = self._ends and not self._is_alone
            faulthandler.dump_traceback_later(max(after_s, self._tick_s), exit=ends, file=_STDERR)

    def _report(self, report: str) -> None:
        os.write(_STDERR, f"jdp: {report}\n".encode())
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)


# Python's debuggers run in the thread that they have stopped.
def is_debugged() -> bool:
    """Whether a Python debugger has stopped a thread."""
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12
    if monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID):
        return True
    return any(map(_is_in_debugger, sys._current_frames().values()))


def _is_in_debugger(frame: Any) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False
