"""The report of a hang: a line for each process, and advice."""

from collections.abc import Mapping

from jdp.worker.phases import BETWEEN, DATA, STARTING, UNSTEPPED, WAITING, waits
from jdp.worker.process_status import BEFORE, ENDED, ProcessStatus


def hang_report(
    now: float, verdict: str, statuses: Mapping[int, ProcessStatus], causes: list[int]
) -> str:
    """Return the report of a run that hangs because others wait for the processes `causes`.

    Args:
      now: monotonic time of the statuses, in seconds.
    """
    advice = _advice([statuses[i] for i in causes], [*statuses.values()])
    return "\n".join([verdict, *_lines(now, statuses, causes), f"  {advice}"])


def in_seconds(seconds: float) -> str:
    """Return a time in words.

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
        return "It does not exit: a function that it registered with atexit hangs, see its stack."
    if phases == {WAITING} and any(it.phase != WAITING for it in statuses):
        return (
            "It waits for the others, but not in the step that they are in. All processes must "
            "make the same steps: look for an early break or return, or an `if` around the step."
        )
    if ENDED in phases:
        return (
            "All processes must make the same steps: look for an early return, or for data that "
            "ends earlier on this process."
        )
    if DATA in phases:
        return "Look at the data loader: its stack shows where it waits."
    if any(map(waits, causes)):
        return (
            "All of them wait in a step: a device hangs, or the processes call different "
            "collectives. Their stacks show where the hosts are."
        )
    if BEFORE in phases:
        return "Code before jdp.init() may take this long, but not on some of the processes alone."
    if phases <= {BETWEEN, STARTING, UNSTEPPED}:
        return (
            "It is in the script's own code: its stack shows where. Put long work of your own into "
            "`with jdp.phase(name, timeout_s=...)`."
        )
    return "If it needs longer, write jdp.phase(name, timeout_s=...) or jdp.init(timeout_s=...)."
