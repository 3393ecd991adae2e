"""The names of the phases that a process can be in, and which of them wait for another process."""

from collections.abc import Iterable

from jdp.worker.process_status import BEFORE, ENDED, ProcessStatus

# Phases that a sound run leaves within `timeout_s`.
STEP, BETWEEN, DATA = "running a step", "between steps", "waiting for data"
BRIEF = frozenset([STEP, BETWEEN, DATA])
# All others (compiling, evaluating, saving, what comes before the first step is done, an author's
# own) may take PATIENCE times as long without anything being wrong: XLA compiles large programs for
# tens of minutes, and data and checkpoints come over networks. Six times 600 s is an hour.
PATIENCE = 6.0
JOINING = "waiting in jdp.init() for the others"
STARTING, FIRST = "starting", "waiting for the first step"
UNSTEPPED = "before the first step"
WAITING = "waiting for the other processes"
COMPILING, SAVING, RESTORING = "compiling", "saving", "restoring"
EVALUATING = "evaluating"
# Phases that people who watch the run are not told of: other words say the same.
QUIET = frozenset([STEP, BETWEEN, JOINING, STARTING, FIRST, UNSTEPPED, WAITING, BEFORE, ENDED, ""])
_LONG_S = 2.0

# In these a process waits for another, or for its devices, and these perhaps for another process.
_WAITING = frozenset([JOINING, WAITING, STEP, FIRST])


def waits(status: ProcessStatus) -> bool:
    """Whether a process waits in a step: for its devices, and these perhaps for others.

    Its script may wait for its devices, too, or do something else meanwhile.
    """
    if status.phase == BETWEEN:
        return status.is_running or status.entered > status.done
    return status.phase in _WAITING


def activity(now: float, statuses: Iterable[ProcessStatus]) -> str | None:
    """Return what the process does that has been longest in a phase of more than two seconds.

    >>> activity(107.0, [ProcessStatus(7, phase="compiling", since_s=100.0)])
    'compiling for 7 s'
    """
    since_s, phase = min(
        ((each.since_s, each.phase) for each in statuses if each.phase not in QUIET),
        default=(now, ""),
    )
    return f"{phase} for {now - since_s:.0f} s" if now - since_s >= _LONG_S else None
