"""The phases and steps of this process, written where its launcher or its own watch reads them."""

import time

from jdp.worker import launcher_client, phases
from jdp.worker.own_progress import own
from jdp.worker.progress_board import record


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
        begin_ns = _leave_phase(self._record)
        own.slot.enter(*own.phases[-1])
        own.record_pause(begin_ns, for_others=self is WAITING)


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
        if own.phases[0][0] is STARTING:
            own.phases[0] = own.unstepped
        own.phases.append((self._record, own.slot.enter(self._record)))

    def __exit__(self, *exception: object) -> None:
        begin_ns, end_ns = _leave_phase(self._record), time.monotonic_ns()
        own.slot.counter.add_data_wait(end_ns - begin_ns)
        if own.step_clock is not None:
            own.step_clock.add_data_wait(begin_ns, end_ns)
        own.slot.enter(*own.phases[-1])


def count_step() -> None:
    """Count a step of a loop of the author's own, unless `train_step` has counted it already."""
    if own.num_steps == own.num_counted:
        own.phases[0] = own.between_own
        own.num_own_steps += 1
        _record_step()
    own.num_counted = own.num_steps


def num_steps() -> tuple[int, int]:
    """Return how many steps of its own, and calls of train steps, this process has made."""
    return own.num_own_steps, own.num_steps - own.num_own_steps


def _record_step() -> None:
    own.num_steps += 1
    phase, since_ns = own.phases[-1]
    now = time.monotonic_ns()
    own.slot.write_step(own.num_steps, now, since_ns or now, phase)
    own.slot.counter.count_rows(own.num_steps)
    if own.is_first_step:
        _tell_first_step()


def _leave_phase(phase: bytes) -> int:
    """Leave a phase, and return the monotonic time at which it began."""
    if own.phases[-1][0] is phase:
        return own.phases.pop()[1]
    # A phase of another thread began later and is still active.
    left = next(it for it in reversed(own.phases) if it[0] is phase)
    own.phases.remove(left)
    return left[1]


STARTING = record(phases.STARTING)
_STEP = record(phases.STEP)
TRAIN_STEP = TrainStep()
EVAL_STEP = Phase(phases.STEP)
FIRST_STEP = Phase(phases.FIRST)
DATA = Data(phases.DATA)
WAITING = Phase(phases.WAITING)
EVALUATING = Phase(phases.EVALUATING)
SAVING = Phase(phases.SAVING)
RESTORING = Phase(phases.RESTORING)
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
