"""Finds the process that holds up the others, and decides when to give it up."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from jdp.worker.hang_report import hang_report, in_seconds
from jdp.worker.phases import BETWEEN, BRIEF, PATIENCE, STARTING, STEP, WAITING, waits
from jdp.worker.process_status import BEFORE, ENDED, ProcessStatus

# A stall is reported after this long without progress, if a step may take 600 s.
_STALL_S = 30.0
# Calls of `look` are a second apart at most, unless the process that makes them was stopped.
_BLIND_S = 5.0


class Stall(NamedTuple):
    """A run that makes no progress.

    Attributes:
      report: for people, in several lines.
      processes: the processes that the others wait for, most likely cause first.
      stalled_s: for how long these have made no progress.
      is_over: whether all of them have exceeded the limits of their phases.
    """

    report: str
    processes: list[int]
    stalled_s: float
    is_over: bool


class HangDetector:
    """Decides from the status of the processes whether the run hangs.

    The processes with the fewest steps hold up the others, so only their time counts: a process is
    not at fault while it waits for one that still has time to evaluate or save. A run is reported
    when they have used a twentieth of their time (30 s of 600), and again whenever they have made
    no progress for twice as long; it is over when all of them have used all.

    Args:
      timeout_s: seconds that a step may take, inf for no limit; None: what each script gave to
        `jdp.init`. A timeout of the command line wins, whether it is less or more.
      ends: whether the caller ends the run when it is over, as the report then says.

    >>> watch = HangDetector(timeout_s=600.0)
    >>> run = ProcessStatus(7, steps=12, progress_s=100.0, phase="running a step", since_s=100.0)
    >>> data = ProcessStatus(8, steps=11, progress_s=99.0, phase="waiting for data", since_s=99.0)
    >>> watch.poll(129.0, {0: run, 1: data})
    Stall(report=..., processes=[1], stalled_s=30.0, is_over=False)
    >>> watch.poll(130.0, {0: run, 1: data})  # nothing new
    """

    def __init__(self, timeout_s: float | None = None, *, ends: bool = True):
        self._timeout_s = timeout_s
        self._ends = ends
        self._next = 1.0  # in units of the time until the first report
        self._is_over = False
        self._last_look_s = math.inf
        self._blind_until_s = -math.inf
        self._stopped_s: dict[int, float] = {}  # since when

    def poll(self, now: float, processes: Mapping[int, ProcessStatus]) -> Stall | None:
        """Return the stall to report now, None if there is none.

        Call it a few times a second. Time without a call does not count: a signal that stopped the
        caller may have stopped the processes, too.

        Args:
          now: seconds, on the clock of `ProcessStatus`.
        """
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
        """Return for how many seconds a process may still be without progress.

        Args:
          now: seconds, on the clock of `ProcessStatus`.
        """
        if status.phase == STARTING:
            return math.inf
        return self._limit_s(status) - (now - max(status.progress_s, self._blind_until_s))

    def _verdict(self, stalled_s: float, limit_s: float, is_over: bool) -> str:
        verdict = f"no progress for {in_seconds(stalled_s)}"
        if math.isinf(limit_s) or not self._ends:
            return f"{verdict}."
        if is_over:
            return f"{verdict}, of {in_seconds(limit_s)} that it may take: the run ends."
        return f"{verdict}; the run ends after {in_seconds(limit_s)}."

    def _timeout_of(self, status: ProcessStatus) -> float:
        return status.timeout_s if self._timeout_s is None else self._timeout_s

    # A waiting process inherits the limit of the processes it waits for.
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
        if status.state == "stopped":  # so it does not use the time of its phase
            return self._timeout_of(status)
        # The limit is for the script, not for the step that it has called and perhaps waits for.
        if status.limit_s and not (status.is_running and status.phase == BETWEEN):
            return status.limit_s
        return self._timeout_of(status) * (1 if status.phase in BRIEF else PATIENCE)

    # The report threshold, scaled from timeout_s to this limit.
    def _patience_s(self, limit_s: float, status: ProcessStatus) -> float:
        timeout_s = self._timeout_of(status)
        if math.isinf(timeout_s):
            return max(_STALL_S, limit_s / 2)
        return limit_s * min(_STALL_S, timeout_s / 2) / timeout_s


# Returns the processes that have not reached the step of the others.
def _slowest(begun: Mapping[int, ProcessStatus]) -> list[int]:
    running = {i: it.steps for i, it in begun.items() if it.phase != ENDED}
    if not running:
        return [*begun]  # they have to exit
    if stopped := [i for i in running if begun[i].state == "stopped"]:
        return stopped
    fewest = min(running.values())
    # The others wait for a process in a debugger even if it is ahead.
    slowest = [i for i, n in running.items() if n == fewest or begun[i].state == "debugged"]
    # Without a launcher a waiting process does not see the processes that it waits for.
    return [i for i in slowest if begun[i].phase != WAITING] or slowest


# Returns the slowest processes that do not wait; otherwise processes that wait outside the step in
# which the slowest wait; otherwise those that have entered the fewest all-reduces. Scripts that
# ended earlier take precedence, since they will never make that step, and then stopped processes at
# any step: others may wait for steps that they have called but that did not run.
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
