"""What faults cost a run: shares of its time, and parts of a recovery. Needs no JAX."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

PARTS = ("detection", "re_forming", "restoring", "tracing", "loading", "first_step")


class Fault(NamedTuple):
    """A fault and its recovery.

    Attributes:
      at: time.time() of the SIGKILL.
      record: the launcher's event "recovered".
    """

    at: float
    record: dict[str, Any]


def summary(
    steps: Sequence[dict[str, Any]],
    first_steps: dict[int, list[dict[str, Any]]],
    faults: Sequence[Fault],
) -> dict[str, Any]:
    """Return the shares of the time, and the medians of the parts of a recovery.

    The time counts from the end of the first step, since a run without faults compiles, too.
    """
    wall = steps[-1]["end"] - steps[0]["end"]
    typical = statistics.median(it["end"] - it["begin"] for it in steps)
    last = {it["step"]: index for index, it in enumerate(steps)}
    counted = repeated = between = 0.0
    for index, it in enumerate(steps[1:], start=1):
        before, duration = steps[index - 1], it["end"] - it["begin"]
        if it["generation"] == before["generation"]:
            between += it["begin"] - before["end"]
        else:  # the rest of a first step is recovery
            duration = min(duration, typical)
        if last[it["step"]] == index:
            counted += duration
        else:
            repeated += duration
    shares = {"ettr": counted, "repeated": repeated, "committing": between}
    row: dict[str, Any] = {name: seconds / wall for name, seconds in shares.items()}
    row |= {"down": 1 - sum(row.values()), "wall_s": wall, "step_s": typical}
    row |= {"steps": len(last), "faults": len(faults)}
    split = [parts(fault, first_steps.get(fault.record["generation"], [])) for fault in faults]
    for name in ("recovery", *PARTS):
        row[f"{name}_s"] = statistics.median(it[name] for it in split) if split else None
    return row


def parts(fault: Fault, first_steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Split the recovery from a fault into its parts, in seconds."""
    record = fault.record
    recovery = record["at"] - fault.at
    told = record["end_s"] + record["form_s"] + record["restore_s"] + record["step_s"]
    tracing = max((it["trace_s"] for it in first_steps), default=0.0)
    loading = max((it["load_s"] for it in first_steps), default=0.0)
    return {
        "recovery": recovery,
        "detection": max(0.0, recovery - told),
        "re_forming": record["end_s"] + record["form_s"],
        "restoring": record["restore_s"],
        "tracing": tracing,
        "loading": loading,
        "first_step": record["step_s"] - tracing - loading,
    }
