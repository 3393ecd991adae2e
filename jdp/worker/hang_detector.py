"""Finds the processes that hold up a run, and decides when it is over."""

import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jdp.worker.exit_codes import STALLED
from jdp.worker.process_status import (
    BEFORE,
    BETWEEN,
    BRIEF,
    DATA,
    ENDED,
    PATIENCE,
    STARTING,
    STEP,
    UNSTEPPED,
    WAITING,
    ProcessStatus,
    waits,
)
from jdp.worker.progress_board import Slot


def hang_report(
    now: float, verdict: str, statuses: Mapping[int, ProcessStatus], causes: list[int]
) -> str:
    """Return the report of a run that waits for `causes`, at monotonic `now`."""
    advice = _advice([statuses[i] for i in causes], [*statuses.values()])
    return "\n".join([verdict, *_lines(now, statuses, causes), f"  {advice}"])


def in_seconds(seconds: float) -> str:
    """Return a duration in words.

    >>> in_seconds(1200.0), in_seconds(0.25)
    ('1,200 s', '0.2 s')
    """
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _lines(now: float, statuses: Mapping[int, ProcessStatus], causes: list[int]) -> list[str]:
    most = max(it.steps for it in statuses.values())
    lines = []
    for i in causes:
        behind = most - statuses[i].steps
        lag = f", {behind} step{'s' * (behind > 1)} behind" if behind else ""
        lines.append(_line(i, lag, now, statuses[i]))
    for i in sorted(set(statuses) - set(causes)):
        wait = ", waits for the above" if waits(statuses[i]) else ""
        lines.append(_line(i, "", now, statuses[i]) + wait)
    return lines


def _line(process: int, lag: str, now: float, status: ProcessStatus) -> str:
    duration = in_seconds(now - status.since_s)
    line = f"  process {process} (pid {status.pid}){lag}: "
    line += f"{status.state}, " if status.state else ""
    line += f"{status.phase} for {duration}, {status.steps:,} steps called"
    if status.is_running and status.phase == BETWEEN:
        line += ", its devices still run a step"
    if status.entered > status.done:
        line += f", inside all-reduce {status.entered:,} (bucket {status.bucket})"
    elif status.entered:
        line += f", {status.done:,} all-reduces done"
    return line


def _advice(causes: list[ProcessStatus], statuses: list[ProcessStatus]) -> str:
    phases = {it.phase for it in causes}
    if any(it.state == "stopped" for it in causes):
        return "A signal stopped it: kill -CONT continues it."
    if all(it.phase == ENDED for it in statuses):
        return "It does not exit: a function registered with atexit hangs, see its stack."
    if phases == {WAITING} and any(it.phase != WAITING for it in statuses):
        return (
            "It waits for the others, but in another step. All processes must make the same "
            "steps: look for an early break or return, or an `if` around the step."
        )
    if ENDED in phases:
        return (
            "All processes must make the same steps: look for an early return, or for data that "
            "ends earlier on this process."
        )
    if DATA in phases:
        return "Check the data loader: its stack shows where it waits."
    if any(map(waits, causes)):
        return (
            "All of them wait in a step: a device hangs, or the processes call different "
            "collectives. Their stacks show where the hosts are."
        )
    if BEFORE in phases:
        return "Code before jdp.init() may take this long, but not on only some of the processes."
    if phases <= {BETWEEN, STARTING, UNSTEPPED}:
        return (
            "The script's own code runs: its stack shows where. Wrap your own long work in `with "
            "jdp.phase(name, timeout_s=...)`."
        )
    return "If it needs longer, write jdp.phase(name, timeout_s=...) or jdp.init(timeout_s=...)."


# Until a report, if a step may take 600 s.
_STALL_S = 30.0
# A longer gap between polls: the caller was stopped.
_BLIND_S = 5.0


class Stall(NamedTuple):
    """A run without progress.

    Attributes:
      report: lines for people.
      processes: awaited by the others, most likely cause first.
      is_over: whether all exceeded their phases' limits.
    """

    report: str
    processes: list[int]
    stalled_s: float
    is_over: bool


class HangDetector:
    """Decides from the processes' statuses whether the run hangs.

    The processes with the fewest steps hold up the others, so only their time counts: a process is
    not at fault while it waits for one that still evaluates or saves. A run is reported after a
    twentieth of that time (30 s of 600 s), then each time the stall doubles. It is over when the
    time is used up.

    Args:
      timeout_s: seconds for a step, inf for no limit; None: that of each `jdp.init`.
      ends: whether the caller ends the run when it is over, as the report then says.
    """

    def __init__(self, timeout_s: float | None = None, *, ends: bool = True):
        self._timeout_s = timeout_s
        self._ends = ends
        self._next = 1.0  # in units of the first report's time
        self._is_over = False
        self._last_look_s = math.inf
        self._blind_until_s = -math.inf
        self._stopped_s: dict[int, float] = {}  # since when

    def poll(self, now: float, processes: Mapping[int, ProcessStatus]) -> Stall | None:
        """Return the stall to report at monotonic `now`; a gap between calls is no stall."""
        begun = {i: it for i, it in processes.items() if it.pid and it.phase}
        if all(it.phase in (BEFORE, STARTING) for it in begun.values()):
            begun = {}
        slowest = _slowest(begun)
        if now - self._last_look_s > _BLIND_S:
            self._blind_until_s = now
        self._last_look_s = now
        if not slowest:
            return None
        idle_s = {i: now - max(begun[i].progress_s, self._blind_until_s) for i in begun}
        stopped = [i for i in begun if begun[i].state == "stopped"]
        self._stopped_s = {i: self._stopped_s.get(i, now) for i in stopped}
        idle_s |= {i: min(idle_s[i], now - since_s) for i, since_s in self._stopped_s.items()}
        limits_s = self._limits_s(begun)
        used = min(idle_s[i] / limits_s[i] for i in slowest)
        stalls = min(idle_s[i] / self._patience_s(limits_s[i], begun[i]) for i in slowest)
        if stalls < 1:
            self._next, self._is_over = 1.0, False
            return None
        is_over = used >= 1 and not self._is_over
        if not is_over and stalls < self._next:
            return None
        self._next = 2.0 ** (math.floor(math.log2(stalls)) + 1)
        self._is_over = self._is_over or is_over
        stalled_s = min(idle_s[i] for i in slowest)
        causes = _causes(begun, slowest)
        verdict = self._verdict(stalled_s, max(limits_s[i] for i in slowest), is_over)
        report = hang_report(now, verdict, begun, causes)
        return Stall(report, causes, stalled_s, is_over)

    def left_s(self, now: float, status: ProcessStatus) -> float:
        """Return how long a process may still be without progress."""
        if status.phase == STARTING:
            return math.inf
        return self._limit_s(status) - (now - max(status.progress_s, self._blind_until_s))

    def _verdict(self, stalled_s: float, limit_s: float, is_over: bool) -> str:
        verdict = f"no progress for {in_seconds(stalled_s)}"
        if math.isinf(limit_s) or not self._ends:
            return f"{verdict}."
        if is_over:
            return f"{verdict}, the limit is {in_seconds(limit_s)}: the run ends."
        return f"{verdict}; the run ends after {in_seconds(limit_s)}."

    def _timeout_of(self, status: ProcessStatus) -> float:
        return status.timeout_s if self._timeout_s is None else self._timeout_s

    # A waiting process has the limit of awaited ones.
    def _limits_s(self, begun: Mapping[int, ProcessStatus]) -> dict[int, float]:
        limits_s = {i: self._limit_s(it) for i, it in begun.items()}
        others = [limits_s[i] for i, it in begun.items() if it.phase not in (WAITING, ENDED)]
        for i, it in begun.items():
            if it.phase == WAITING and not it.state and others:
                limits_s[i] = max(others)
        return limits_s

    def _limit_s(self, status: ProcessStatus) -> float:
        if status.state == "debugged":
            return math.inf
        if status.state == "stopped":  # not its phase's time
            return self._timeout_of(status)
        # The limit is for the script, not for a step on the devices.
        if status.limit_s and not (status.is_running and status.phase == BETWEEN):
            return status.limit_s
        return self._timeout_of(status) * (1 if status.phase in BRIEF else PATIENCE)

    # Until a report, scaled to this limit.
    def _patience_s(self, limit_s: float, status: ProcessStatus) -> float:
        timeout_s = self._timeout_of(status)
        if math.isinf(timeout_s):
            return max(_STALL_S, limit_s / 2)
        return limit_s * min(_STALL_S, timeout_s / 2) / timeout_s


# The processes behind the others' step.
def _slowest(begun: Mapping[int, ProcessStatus]) -> list[int]:
    running = {i: it.steps for i, it in begun.items() if it.phase != ENDED}
    if not running:
        return [*begun]  # they have to exit
    if stopped := [i for i in running if begun[i].state == "stopped"]:
        return stopped
    fewest = min(running.values())
    # The others wait for a debugged process, even ahead.
    slowest = [i for i, n in running.items() if n == fewest or begun[i].state == "debugged"]
    # A process without a launcher does not see the others.
    return [i for i in slowest if begun[i].phase != WAITING] or slowest


# By precedence: scripts that ended before that step, and will never make it; stopped processes at
# any step, since dispatched steps may wait for them; the slowest processes that do not wait;
# processes that wait outside their step; those in the fewest all-reduces.
def _causes(begun: Mapping[int, ProcessStatus], slowest: list[int]) -> list[int]:
    fewest = min(begun[i].steps for i in slowest)
    ended = [i for i, it in begun.items() if it.phase == ENDED]
    if len(ended) == len(begun):
        return ended
    ended = [i for i in ended if begun[i].steps <= fewest]
    stopped = [i for i, it in begun.items() if it.state in ("stopped", "gone")]
    away = [i for i in slowest if not waits(begun[i])]
    in_step = any(begun[i].phase == STEP for i in slowest)
    elsewhere = [i for i, it in begun.items() if it.phase == WAITING and it.steps == fewest]
    fewest_entered = min(begun[i].entered for i in slowest)
    behind = [i for i in slowest if begun[i].entered == fewest_entered]
    found = ended or stopped or away or (elsewhere if in_step else []) or behind
    return sorted(found, key=lambda i: (begun[i].steps, begun[i].progress_s, i))


# Not sys.stderr, whose lock a hung thread may hold.
_STDERR = 2
_TICK_S = 1.0
_DEBUGGERS = frozenset(["bdb", "pdb", "pydevd", "_pydevd_bundle", "debugpy"])


def show_stacks_when_asked() -> None:
    """Print the Python stacks at SIGQUIT, unless it is handled."""
    if signal.getsignal(signal.SIGQUIT) in (signal.SIG_DFL, signal.SIG_IGN):
        # In C: works if the process never returns to Python.
        faulthandler.register(signal.SIGQUIT, file=_STDERR, all_threads=True, chain=False)


class SelfWatch:
    """A thread that watches this process, with a timer of `faulthandler` in case it cannot run.

    `timeout_s` is for a step. If `is_launched`, it only detects debuggers. `is_alone`: no other
    process waits for this one.
    """

    def __init__(
        self, slot: Slot, timeout_s: float, process: int, *, is_launched: bool, is_alone: bool
    ):
        # Never end an interactive session, with its state.
        self._ends = not (hasattr(sys, "ps1") or sys.flags.interactive)
        # There is one timer, and pytest uses it.
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
        """Start the thread; `num_running` returns the unfinished steps on the devices."""
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

    # Fires if this thread cannot get the GIL; in a lone process perhaps the author's code has it,
    # without a limit.
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


def is_debugged() -> bool:
    """Whether a debugger has stopped a thread, and runs in it."""
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
