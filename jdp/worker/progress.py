"""How this process gets on: noted where the launcher reads it, or watched by the process itself."""

import atexit
import ctypes
import math
import os
import time
from collections.abc import Callable

from jdp.worker import hang_detector, launcher_client
from jdp.worker.own_progress import own
from jdp.worker.progress_board import ENDED, NATIVE, Board, record
from jdp.worker.watchdog import SelfWatch, show_stacks_when_asked


class Phase:
    """A context in which the process is said to do something; may be entered again and again.

    Args:
      name: what it does.
      limit_s: how long without progress; inf for ever, 0 as the name says.
    """

    __slots__ = ("_record",)

    def __init__(self, name: str, limit_s: float = 0.0):
        self._record = record(name, limit_s)

    def __enter__(self) -> None:
        own.phases.append((self._record, own.slot.enter(self._record)))

    def __exit__(self, *exception: object) -> None:
        _close(self._record)
        own.slot.enter(*own.phases[-1])


class TrainStep:
    """A context in which a training step is called: a phase, and a step more at its end.

    The last few steps called may still be running then.
    """

    __slots__ = ()

    # Written out, since every step pays for it.
    def __enter__(self) -> None:
        now = time.monotonic_ns()
        own.slot.write_phase(now, now, _STEP)
        own.phases.append((_STEP, now))

    def __exit__(self, kind: type | None, *exception: object) -> None:
        phases, slot = own.phases, own.slot
        if phases[-1][0] is _STEP:
            phases.pop()
        else:
            _close(_STEP)
        if kind is not None:
            slot.enter(*phases[-1])
            return
        own.num_steps += 1
        phases[0] = own.between
        phase, since_ns = phases[-1]
        now = time.monotonic_ns()
        slot.write_step(own.num_steps, now, since_ns or now, phase)
        if own.is_first_step:
            _tell_first_step()


def _close(phase: bytes) -> None:
    if own.phases[-1][0] is phase:
        own.phases.pop()
    else:  # one of another thread began later, and goes on
        own.phases.remove(next(it for it in reversed(own.phases) if it[0] is phase))


_STEP = record(hang_detector.STEP)
TRAIN_STEP = TrainStep()
EVAL_STEP = Phase(hang_detector.STEP)
FIRST_STEP = Phase(hang_detector.FIRST)
DATA = Phase(hang_detector.DATA)
WAITING = Phase(hang_detector.WAITING)
EVALUATING = Phase("evaluating")
SAVING = Phase(hang_detector.SAVING)
COMPARING = Phase("comparing ranks")
_COMPILING = Phase(hang_detector.COMPILING)


def phase(name: str, *, timeout_s: float | None = None) -> Phase:
    """Name what the process does for a long time, so that it is not taken for a hang.

    While a process evaluates in a loop of its own, downloads, or writes a table, its steps do not
    get on, and the other processes wait. A phase says so in the reports of a run that hangs, and
    gives the time that it may take. jdp names its own: compiling, evaluating, saving.

    Args:
      name: what is done, such as "downloading".
      timeout_s: seconds, > 0, without a step and without another phase, after which the run ends;
        `math.inf` for no limit. Default: six times that of `jdp.init`.

    Returns:
      A context manager. Other phases may begin in it; when one ends, this one's time begins anew.

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


def joins() -> None:
    """Record that this process waits for the others, until `begin`."""
    own.phases[0] = record(hang_detector.JOINING), time.monotonic_ns()
    own.slot.enter(*own.phases[-1])
    show_stacks_when_asked()


def begin(timeout_s: float | None, process: int = 0, num_processes: int = 1) -> None:
    """Begin to watch this process, or begin anew.

    Args:
      timeout_s: how long a step may take, > 0; None: nobody watches.
      process: index of this one.
      num_processes: how many train together.

    Raises:
      ValueError: if `timeout_s` is not positive.
    """
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(
            f"timeout_s={timeout_s} would end the run before its first step. Write the seconds "
            "after which a step that is not done never will be, such as 600, or None."
        )
    limit_s = math.inf if timeout_s is None else timeout_s
    own.longest_wait_s = limit_s * hang_detector.PATIENCE
    launcher = launcher_client.current()
    is_alone = launcher is None and num_processes == 1
    # Alone nobody waits for the author's own code, which may well take days.
    own_limit_s = math.inf if is_alone else 0.0
    own.between = record(hang_detector.BETWEEN, own_limit_s), 0
    own.phases[0] = record(hang_detector.STARTING, own_limit_s), time.monotonic_ns()
    own.num_steps, own.is_first_step, own.compile_s = 0, not is_alone, 0.0
    assigned = None if launcher is None else launcher.assignment
    own.slot.begin(assigned.generation if assigned else 0, limit_s)
    own.slot.enter(*own.phases[-1])
    # Handlers are called last in, first out: in JAX's, which is there by now if there are several
    # processes, one waits for the others.
    atexit.unregister(_end)
    atexit.register(_end)
    _stop_watch()
    if not is_alone:
        show_stacks_when_asked()
    is_launched = launcher is not None
    own.watch = SelfWatch(own.slot, limit_s, process, is_launched=is_launched, is_alone=is_alone)
    own.watch.start(lambda: own.num_running())


def compiling_begins() -> None:
    """Record that a step is traced, and will be compiled."""
    _COMPILING.__enter__()


def compiling_ends() -> None:
    """Record that it is compiled, and handed to the devices."""
    own.compile_s += (time.monotonic_ns() - own.phases[-1][1]) / 1e9
    _COMPILING.__exit__()


def ask_devices(num_running: Callable[[], int]) -> None:
    """Let the watch ask how many steps the devices have not finished, from a thread of its own."""
    own.num_running = num_running


def is_first_step() -> bool:
    """Whether no training step was called yet, by a process that is not alone."""
    return own.is_first_step


def longest_wait_s() -> float:
    """Return for how long another process may keep this one waiting before the watch ends the run.

    Returns:
      Seconds; inf if nobody watches.
    """
    return own.longest_wait_s


def kept(step: int, where: str) -> None:
    """Record the newest step that this run could go on from."""
    own.kept = f"step {step} ({where})"


def latest_kept() -> str | None:
    """Return the step that this run could go on from, in words; None if nothing keeps any."""
    return own.kept


def native_numbers() -> int:
    """Return the address of the numbers that the native library writes, valid for ever."""
    numbers = (ctypes.c_char * (NATIVE.stop - NATIVE.start)).from_buffer(own.slot.memory[NATIVE])
    # Never freed: XLA's threads may write while the interpreter ends.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(numbers))
    return ctypes.addressof(numbers)


def _tell_first_step() -> None:
    own.is_first_step = False
    launcher = launcher_client.current()
    if launcher is not None:
        seconds = time.monotonic() - launcher.woken
        launcher.tell("first_step", s=seconds, compile_s=own.compile_s)


def ends() -> None:
    """Record that the script came to its end, before the process waits for others in its exit."""
    own.slot.enter(record(ENDED))
    launcher = launcher_client.current()
    if launcher is not None:
        launcher.tell_end(steps=own.num_steps)


def _stop_watch() -> None:
    if own.watch is not None:
        own.watch.stop()


def _end() -> None:
    _stop_watch()
    ends()


# What a process forks off, for instance to load data, does not speak for it.
def _forked() -> None:
    own.slot = Board.create(1).slot(0)


os.register_at_fork(after_in_child=_forked)
