"""The watch over this process, from `init` to its exit."""

import atexit
import math
import numbers
import os
import time
from typing import Any

from jdp.worker import launcher_client, process_status
from jdp.worker.hang_detector import SelfWatch, show_stacks_when_asked
from jdp.worker.process_status import ENDED
from jdp.worker.progress import STARTING, StepClock, own
from jdp.worker.progress_board import record
from jdp.worker.progress_line import ProgressLine


def record_joining() -> None:
    """Record that this process waits for the others."""
    own.phases[0] = record(process_status.JOINING), time.monotonic_ns()
    own.slot.enter(*own.phases[-1])
    show_stacks_when_asked()


def require_limit(timeout_s: Any) -> None:
    """Refuse a nonpositive limit, except None."""
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, numbers.Real):
        raise TypeError(
            f"timeout_s={timeout_s!r} is not a number of seconds. Write timeout_s=600, or None "
            "for no limit."
        )
    if not float(timeout_s) > 0:  # false for NaN
        raise ValueError(
            f"timeout_s={timeout_s} must be positive: the run would end before its first step. "
            "Write more seconds than the longest step can take, such as 600, or None for no "
            "limit."
        )


def begin_watching(
    timeout_s: float | None,
    process: int = 0,
    num_processes: int = 1,
    *,
    shows_progress: bool = True,
) -> None:
    """Begin to watch this process, or begin anew."""
    require_limit(timeout_s)
    _stop_watch()
    limit_s = math.inf if timeout_s is None else timeout_s
    own.longest_wait_s = limit_s * process_status.PATIENCE
    launcher = launcher_client.current()
    is_alone = launcher is None and num_processes == 1
    # A lone process's code may take days.
    own_limit_s = math.inf if is_alone else 0.0
    own.between = record(process_status.BETWEEN, own_limit_s), 0
    # The step is user code here, and may compile.
    own.between_own = record(process_status.BETWEEN, own_limit_s or own.longest_wait_s), 0
    own.unstepped = record(process_status.UNSTEPPED, own_limit_s), 0
    own.phases[0] = STARTING, time.monotonic_ns()
    own.num_steps = own.num_counted = own.num_own_steps = 0
    own.restored, own.closed_steps = {}, 0
    own.is_first_step, own.compile_s, own.is_uncached = not is_alone, 0.0, False
    assigned = None if launcher is None else launcher.assignment
    own.slot.claim(assigned.generation if assigned else 0, limit_s)
    own.slot.enter(*own.phases[-1])
    # Last in, first out: JAX's handler, which waits for the others, is already registered.
    atexit.unregister(_end)
    atexit.register(_end)
    if not is_alone:
        show_stacks_when_asked()
    is_launched = launcher is not None
    own.watch = SelfWatch(own.slot, limit_s, process, is_launched=is_launched, is_alone=is_alone)
    own.watch.start(lambda: own.num_running())
    own.step_clock = StepClock(own.slot) if is_launched else None
    wanted = os.environ.get("JDP_PROGRESS", "auto").lower()  # as in `jdp run`
    if shows_progress and wanted not in ("off", "0", "false") and not is_launched and process == 0:
        own.line = ProgressLine(is_plain=wanted == "plain")
        own.line.start()


def record_end() -> None:
    """Record the script's end, before the process waits for others."""
    own.slot.enter(record(ENDED))
    launcher = launcher_client.current()
    if launcher is not None:
        launcher.tell_end(steps=own.num_steps)


def _stop_watch() -> None:
    if own.watch is not None:
        own.watch.stop_watching()
    if own.step_clock is not None:
        own.step_clock.stop_clock()
        own.step_clock = None
    if own.line is not None:
        own.line.stop()
        own.line = None


def _end() -> None:
    _stop_watch()
    record_end()
