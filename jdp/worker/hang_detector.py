"""Which process holds up the others, for how long, and when to give it up."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from jdp.worker.progress_board import BEFORE, ENDED, ProcessStatus

_STALL_S = 30.0
# Looks are a second apart at most, unless somebody stopped the one that looks.
_BLIND_S = 5.0

# Phases that a sound run leaves within `timeout_s`.
STEP, BETWEEN, DATA = "running a step", "between steps", "waiting for data"
_BRIEF = frozenset([STEP, BETWEEN, DATA])
# All others (compiling, evaluating, saving, what comes before the first step is done, an author's
# own) may take much longer without anything being wrong: XLA compiles large programs for tens of
# minutes, and data and checkpoints come over networks. Six times 600 s is an hour.
PATIENCE = 6.0
JOINING = "waiting in jdp.init() for the others"
STARTING, FIRST = "starting", "waiting for the first step"
WAITING = "waiting for the other processes"
COMPILING, SAVING = "compiling", "saving"
# In these a process waits for another, or for its devices, and these perhaps for another process.
_WAITING = frozenset([JOINING, WAITING, STEP, FIRST])


class Stall(NamedTuple):
    """What is wrong with a run that does not get on.

    Attributes:
      report: for people, in several lines.
      processes: whom the others wait for, by index, most likely cause first.
      stalled_s: how long these have made no progress.
      is_over: whether they had all the time that their phases have.
    """

    report: str
    processes: list[int]
    stalled_s: float
    is_over: bool


class Watch:
    """Decides from the status of the processes whether the run hangs.

    The processes with the fewest steps are those that the others wait for, so only their time
    counts: nobody is at fault who waits for a process that still has time to evaluate or save. A
    run is reported when they have used a twentieth of it (30 s of 600), and again whenever they
    have been silent for twice as long; it is over when all of them have used all.

    Args:
      timeout_s: how long a step may take, inf for ever; None: what each script gave to `jdp.init`.
        A command line that says something wins, whether that is less or more.
      ends: whether who looks ends the run when it is over, as the report then says.

    >>> watch = Watch(timeout_s=600.0)
    >>> run = ProcessStatus(7, steps=12, progress_s=100.0, phase="running a step", since_s=100.0)
    >>> data = ProcessStatus(8, steps=11, progress_s=99.0, phase="waiting for data", since_s=99.0)
    >>> watch.look(129.0, {0: run, 1: data})
    Stall(report=..., processes=[1], stalled_s=30.0, is_over=False)
    >>> watch.look(130.0, {0: run, 1: data})  # nothing new
    """

    def __init__(self, timeout_s: float | None = None, *, ends: bool = True):
        self._timeout_s = timeout_s
        self._ends = ends
        self._next = 1.0  # in units of the time until the first report
        self._is_over = False
        self._last_look_s = math.inf
        self._blind_until_s = -math.inf
        self._stopped_s: dict[int, float] = {}  # since when

    def look(self, now: float, processes: Mapping[int, ProcessStatus]) -> Stall | None:
        """Return the stall to report now, None if there is none.

        Call it a few times a second. Time in which nobody looked is not held against the
        processes: whoever stopped the one that looks may have stopped them, too.

        Args:
          now: seconds, on the clock of `ProcessStatus`.
          processes: of all hosts, by index. While all are before `jdp.init()` nobody waits.

        Returns:
          None, or a report; with `is_over` once when the last of its time is used.
        """
        begun = {i: it for i, it in processes.items() if it.pid and it.phase}
        if all(it.phase == BEFORE for it in begun.values()):
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
        verdict = self._verdict(max(limits_s[i] for i in slowest), is_over)
        report = "\n".join(
            [
                f"no progress for {_seconds(stalled_s)}{verdict}.",
                *_lines(now, begun, causes),
                f"  {_advice([begun[i] for i in causes], [*begun.values()])}",
            ]
        )
        return Stall(report, causes, stalled_s, is_over)

    def left_s(self, now: float, status: ProcessStatus) -> float:
        """Return for how many seconds a process may still go on without progress."""
        return self._limit_s(status) - (now - max(status.progress_s, self._blind_until_s))

    def _verdict(self, limit_s: float, is_over: bool) -> str:
        if math.isinf(limit_s) or not self._ends:
            return ""
        if is_over:
            return f", of {_seconds(limit_s)} that it may take: the run ends"
        return f"; the run ends after {_seconds(limit_s)}"

    def _timeout_of(self, status: ProcessStatus) -> float:
        return status.timeout_s if self._timeout_s is None else self._timeout_s

    # Who waits for others has the time that they have.
    def _limits_s(self, begun: Mapping[int, ProcessStatus]) -> dict[int, float]:
        limits_s = {i: self._limit_s(it) for i, it in begun.items()}
        others = [limits_s[i] for i, it in begun.items() if it.phase not in (WAITING, ENDED)]
        for i, it in begun.items():
            if it.phase == WAITING and not it.state and others:
                limits_s[i] = max(others)
        return limits_s

    def _limit_s(self, status: ProcessStatus) -> float:
        if status.state == "debugged":  # a person who debugs has all the time
            return math.inf
        if status.state == "stopped":  # it does not do what its phase has time for
            return self._timeout_of(status)
        # The script may take its time, not the step that it has called and perhaps waits for.
        if status.limit_s and not (status.is_running and status.phase == BETWEEN):
            return status.limit_s
        return self._timeout_of(status) * (1 if status.phase in _BRIEF else PATIENCE)

    # As large a part of the limit as a stall is of timeout_s.
    def _patience_s(self, limit_s: float, status: ProcessStatus) -> float:
        timeout_s = self._timeout_of(status)
        if math.isinf(timeout_s):
            return max(_STALL_S, limit_s / 2)
        return limit_s * min(_STALL_S, timeout_s / 2) / timeout_s


# Those that still have to come to the step that the others are in.
def _slowest(begun: Mapping[int, ProcessStatus]) -> list[int]:
    running = {i: it.steps for i, it in begun.items() if it.phase != ENDED}
    if not running:
        return [*begun]  # They have to exit.
    if stopped := [i for i in running if begun[i].state == "stopped"]:
        return stopped  # Whatever the others have time for, it will not come.
    fewest = min(running.values())
    # In a debugger one may be ahead, and is waited for all the same.
    slowest = [i for i, n in running.items() if n == fewest or begun[i].state == "debugged"]
    # Who waits has the time of those it waits for; but without a launcher it does not see them.
    return [i for i in slowest if begun[i].phase != WAITING] or slowest


# Of the slowest those that wait for nobody, else whoever waits elsewhere than in the step of these,
# else the ones that have entered the fewest all-reduces. A script that has ended before them is a
# cause, too: it will never come.
def _causes(begun: Mapping[int, ProcessStatus], slowest: list[int]) -> list[int]:
    fewest = min(begun[i].steps for i in slowest)
    ended = [i for i, it in begun.items() if it.phase == ENDED]
    if len(ended) == len(begun):
        return ended
    ended = [i for i in ended if begun[i].steps <= fewest]
    # Wherever it is: others may wait for steps that it has called and that did not run.
    stopped = [i for i, it in begun.items() if it.state in ("stopped", "gone")]
    away = [i for i in slowest if not waits(begun[i])]
    in_step = any(begun[i].phase == STEP for i in slowest)
    elsewhere = [i for i, it in begun.items() if it.phase == WAITING and it.steps == fewest]
    fewest_entered = min(begun[i].entered for i in slowest)
    behind = [i for i in slowest if begun[i].entered == fewest_entered]
    found = ended or stopped or away or (elsewhere if in_step else []) or behind
    return sorted(found, key=lambda i: (begun[i].steps, begun[i].progress_s, i))


def _lines(now: float, begun: Mapping[int, ProcessStatus], causes: list[int]) -> list[str]:
    others = sorted(set(begun) - set(causes))
    most = max(it.steps for it in begun.values())
    lines = []
    for i in [*causes, *others]:
        status = begun[i]
        behind = most - status.steps if i in causes else 0
        lag = f", {behind} step{'s' * (behind > 1)} behind" if behind else ""
        wait = ", waits for the above" if i in others and waits(status) else ""
        lines.append(f"  process {i} (pid {status.pid}){lag}: {_doing(now, status)}{wait}")
    return lines


def _doing(now: float, status: ProcessStatus) -> str:
    what = f"{status.phase} for {_seconds(now - status.since_s)}, {status.steps:,} steps called"
    if status.is_running and status.phase == BETWEEN:
        what += ", its devices still run a step"
    if status.entered > status.done:
        what += f", inside all-reduce {status.entered:,} (bucket {status.bucket})"
    elif status.entered:
        what += f", {status.done:,} all-reduces done"
    return f"{status.state}, {what}" if status.state else what


def waits(status: ProcessStatus) -> bool:
    """Whether a process waits in a step: for its devices, and these perhaps for others.

    Its script may wait for its devices, too, or do something else meanwhile.
    """
    if status.phase == BETWEEN:
        return status.is_running or status.entered > status.done
    return status.phase in _WAITING


def _advice(causes: list[ProcessStatus], begun: list[ProcessStatus]) -> str:
    phases = {it.phase for it in causes}
    if any(it.state == "stopped" for it in causes):
        return "A signal stopped it: kill -CONT continues it."
    if all(it.phase == ENDED for it in begun):
        return "It does not exit: what it registered with atexit hangs, as its stack shows."
    if phases == {WAITING} and any(it.phase != WAITING for it in begun):
        return (
            "It waits for the others elsewhere than in their step. All processes must make the "
            "same steps: look for an early break or return on this process."
        )
    if ENDED in phases:
        return (
            "All processes must make the same steps: look for an early return, or for data that "
            "ends earlier on this process."
        )
    if DATA in phases:
        return "Look at the loader: its stack shows what it waits for."
    if any(map(waits, causes)):
        return (
            "Each waits for a step: a device hangs, or a process makes other collectives than the "
            "others. Their stacks show what the hosts do."
        )
    if BEFORE in phases:
        return "What stands before jdp.init() may take its time, but not so long on some processes."
    if phases <= {BETWEEN, STARTING}:
        return (
            "It is in the script's own code: its stack shows where. Put long work of your own into "
            "`with jdp.phase(name, timeout_s=...)`."
        )
    return "If it needs longer, write jdp.phase(name, timeout_s=...) or jdp.init(timeout_s=...)."


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
