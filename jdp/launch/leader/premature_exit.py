"""Processes that wait in a step for others which have ended."""

from collections.abc import Mapping

from jdp.launch.leader import failure
from jdp.launch.leader.failure import Cause
from jdp.worker.phases import BETWEEN, waits
from jdp.worker.process_status import ProcessStatus


def find(
    now: float,
    grace_s: float,
    statuses: Mapping[int, ProcessStatus],
    steps_of_ended: Mapping[int, int],
) -> Cause | None:
    """Return why a process waits in a step for ones that ended without calling it, None if none.

    A step that all have called, and the final work of a single process, are limited by the watch.
    """
    for i, status in statuses.items():
        if i in steps_of_ended or not waits(status) or now - status.progress_s < grace_s:
            continue
        called = status.steps + (status.phase != BETWEEN)
        if missing := [other for other, steps in steps_of_ended.items() if steps < called]:
            return failure.early_end(min(missing), i, grace_s)
    return None
