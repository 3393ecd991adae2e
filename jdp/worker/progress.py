"""The progress of this process: written where the launcher reads it, or watched by itself."""

import atexit
import math
import os
import time

from jdp.worker import launcher_client, phases
from jdp.worker.own_progress import own
from jdp.worker.process_status import ENDED
from jdp.worker.progress_board import Board, record
from jdp.worker.step_clock import StepClock
from jdp.worker.watchdog import SelfWatch, show_stacks_when_asked


class Phase:
    """A context in which the process is in a phase; may be entered again and again.

    Args:
      name: of the phase.
      limit_s: seconds without progress; inf for no limit, 0 for that of the name.
    """

    __slots__ = ("_record",)

    def __init__(self, name: str, limit_s: float = 0.0):
        self._record = record(name, limit_s)

    def __enter__(self) -> None:
        own.phases.append((self._record, own.slot.enter(self._record)))
        own.record_unusual()

    def __exit__(self, *exception: object) -> None:
        _leave_phase(self._record)
        own.slot.enter(*own.phases[-1])


class TrainStep:
    """A context in which a training step is called, which counts at its end.

    Its devices may still be running then.
    """

    __slots__ = ()

    # Inlined, since every step pays for it.
    def __enter__(self) -> None:
        now = time.monotonic_ns()
        own.slot.write_phase(now, now, _STEP)
        own.phases.append((_STEP, now))

    def __exit__(self, kind: type | None, *exception: object) -> None:
        begun = own.phases
        if begun[-1][0] is _STEP:
            begun.pop()
        else:
            _leave_phase(_STEP)
        if kind is not None:
            own.slot.enter(*begun[-1])
            return
        begun[0] = own.between
        _record_step()


class Data(Phase):
    """A phase in which a batch is waited for: from the first one on, the process is watched."""

    __slots__ = ()

    def __enter__(self) -> None:
        if own.phases[0][0] is _STARTING:
            own.phases[0] = own.unstepped
        own.phases.append((self._record, own.slot.enter(self._record)))

    def __exit__(self, *exception: object) -> None:
        begin_ns, end_ns = dict(own.phases)[self._record], time.monotonic_ns()
        own.slot.counter.add_data_wait(end_ns - begin_ns)
        if own.step_clock is not None:
            own.step_clock.add_data_wait(begin_ns, end_ns)
        super().__exit__(*exception)


def count_step() -> None:
    """Count a step of a loop of the author's own, unless `train_step` has counted it already."""
    if own.num_steps == own.num_counted:
        own.phases[0] = own.between_own
        _record_step()
    own.num_counted = own.num_steps


def _record_step() -> None:
    own.num_steps += 1
    phase, since_ns = own.phases[-1]
    now = time.monotonic_ns()
    own.slot.write_step(own.num_steps, now, since_ns or now, phase)
    own.slot.counter.count_rows()
    if own.is_first_step:
        _tell_first_step()


def _leave_phase(phase: bytes) -> None:
    if own.phases[-1][0] is phase:
        own.phases.pop()
    else:  # a phase of another thread began later and is still active
        own.phases.remove(next(it for it in reversed(own.phases) if it[0] is phase))


_STARTING = record(phases.STARTING)
_STEP = record(phases.STEP)
TRAIN_STEP = TrainStep()
EVAL_STEP = Phase(phases.STEP)
FIRST_STEP = Phase(phases.FIRST)
DATA = Data(phases.DATA)
WAITING = Phase(phases.WAITING)
EVALUATING = Phase("evaluating")
SAVING = Phase(phases.SAVING)
COMPARING = Phase("comparing ranks")
_COMPILING = Phase(phases.COMPILING)


def phase(name: str, *, timeout_s: float | None = None) -> Phase:
    """Name what the process does for a long time, so that it is not taken for a hang.

    While a process evaluates in its own loop, downloads, or writes a table, it makes no steps and
    the other processes wait. A phase names this work in hang reports and sets its time limit. jdp
    names its own phases: compiling, evaluating, saving.

    Args:
      name: what is done, such as "downloading".
      timeout_s: seconds, > 0, without a step and without another phase, after which the run ends;
        `math.inf` for no limit. Default: six times that of `jdp.init`.

    Returns:
      A context manager. Phases may nest; when an inner one ends, the outer limit restarts.

    Raises:
      ValueError: if the name is empty or `timeout_s` is not positive.

    >>> import jdp
    >>> with jdp.phase("counting", timeout_s=3600.0):
    ...     sum(range(10))
    45
    """
    if not name:
        raise ValueError('phase needs a name for the reports, such as "downloading".')
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(
            f"timeout_s={timeout_s} would end the phase {name!r} before it begins. Write the "
            "seconds after which something must be wrong, or math.inf."
        )
    return Phase(name, timeout_s or 0.0)


def record_joining() -> None:
    """Record that this process waits for the others, until `begin_watching`."""
    own.phases[0] = record(phases.JOINING), time.monotonic_ns()
    own.slot.enter(*own.phases[-1])
    show_stacks_when_asked()


def begin_watching(timeout_s: float | None, process: int = 0, num_processes: int = 1) -> None:
    """Begin to watch this process, or begin anew.

    Args:
      timeout_s: seconds that a step may take, > 0; None: no limit.
      process: index of this process.
      num_processes: that train together.

    Raises:
      ValueError: if `timeout_s` is not positive.
    """
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(
            f"timeout_s={timeout_s} would end the run before its first step. Write the seconds "
            "after which a step that is not done never will be, such as 600, or None."
        )
    limit_s = math.inf if timeout_s is None else timeout_s
    own.longest_wait_s = limit_s * phases.PATIENCE
    launcher = launcher_client.current()
    is_alone = launcher is None and num_processes == 1
    # No other process waits for user code here, which may take days.
    own_limit_s = math.inf if is_alone else 0.0
    own.between = record(phases.BETWEEN, own_limit_s), 0
    # The entire step is user code here and may include compilation.
    own.between_own = record(phases.BETWEEN, own_limit_s or own.longest_wait_s), 0
    own.unstepped = record(phases.UNSTEPPED, own_limit_s), 0
    own.phases[0] = _STARTING, time.monotonic_ns()
    own.num_steps = own.num_counted = 0
    own.is_first_step, own.compile_s = not is_alone, 0.0
    assigned = None if launcher is None else launcher.assignment
    own.slot.claim(assigned.generation if assigned else 0, limit_s)
    own.slot.enter(*own.phases[-1])
    # Handlers run last in, first out. With several processes, JAX's handler is registered by now,
    # and a process waits for the others in it.
    atexit.unregister(_end)
    atexit.register(_end)
    _stop_watch()
    if not is_alone:
        show_stacks_when_asked()
    is_launched = launcher is not None
    own.watch = SelfWatch(own.slot, limit_s, process, is_launched=is_launched, is_alone=is_alone)
    own.watch.start(lambda: own.num_running())
    own.step_clock = StepClock(own.slot) if is_launched else None


def compiling_begins() -> None:
    """Record that a step is traced, and will be compiled."""
    _COMPILING.__enter__()


def compiling_ends() -> None:
    """Record that it is compiled, and handed to the devices."""
    own.compile_s += (time.monotonic_ns() - own.phases[-1][1]) / 1e9
    _COMPILING.__exit__()


def _tell_first_step() -> None:
    own.is_first_step = False
    launcher = launcher_client.current()
    if launcher is not None:
        seconds = time.monotonic() - launcher.woken
        launcher.tell("first_step", s=seconds, compile_s=own.compile_s)


def record_end() -> None:
    """Record that the script has ended, before the process waits for others in its exit."""
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


def _end() -> None:
    _stop_watch()
    record_end()


# A forked child, which may load data, does not write to the slot of this process.
def _forked() -> None:
    own.slot = Board.create(1).slot(0)
    own.step_clock = None


os.register_at_fork(after_in_child=_forked)
