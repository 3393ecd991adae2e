"""The progress of this process, in one place; `jdp/worker/progress.py` changes it."""

import ctypes
import math
import os
import time
from collections.abc import Callable
from typing import Any

from jdp.worker import fork_server, launcher_client, phases
from jdp.worker.progress_board import NATIVE, Board, Slot, record
from jdp.worker.step_clock import StepClock
from jdp.worker.watchdog import SelfWatch


class OwnProgress:
    """The progress of this process, whatever the thread; there is one, `own`.

    Attributes:
      slot: where it is written.
      phases: that have begun, as in the slot, with their times; the last is shown, and the first
        continues when there is no other.
      between: the first phase once the first step is done, without a time.
      between_own: the same in a loop whose steps only its `Checkpointer` sees.
      unstepped: the first phase once a batch was asked for.
      num_steps: steps called.
      num_counted: steps called when `count_step` was called last.
      num_own_steps: those of them that were not calls of a train step.
      is_first_step: whether no step was called yet, by a process that is not alone.
      compile_s: seconds of compiling.
      longest_wait_s: seconds that others may keep this process waiting; inf for no limit.
      latest_kept: the newest step that this run could continue from, in words.
      restored: what a Checkpointer has restored, see `messages`; empty before.
      closed_steps: steps of Checkpointers that were closed: of models that were trained before.
      line: the `ProgressLine` of this process; None if it has none.
      watch: the thread that watches this process.
      step_clock: takes the times of steps; None if no launcher reads them.
      num_running: returns how many steps the devices have not finished.
    """

    def __init__(self) -> None:
        self.slot = _own_slot()
        self.phases: list[tuple[bytes, int]] = [(record(""), 0)]
        self.between: tuple[bytes, int] = (record(phases.BETWEEN), 0)
        self.between_own = self.unstepped = self.between
        self.num_steps = self.num_counted = self.num_own_steps = 0
        self.is_first_step = False
        self.compile_s = 0.0
        self.longest_wait_s = math.inf
        self.latest_kept: str | None = None
        self.restored: dict[str, Any] = {}
        self.closed_steps = 0
        self.line: Any = None
        self.watch: SelfWatch | None = None
        self.step_clock: StepClock | None = None
        self.num_running: Callable[[], int] = int

    def record_unusual(self) -> None:
        """Record that the time until the next step does not show how fast the process is."""
        if self.step_clock is not None:
            self.step_clock.is_usual = False

    def record_pause(self, begin_ns: int, *, for_others: bool = False) -> None:
        """Record that the training thread has made no steps since `begin_ns`, and why."""
        if self.step_clock is not None:
            self.step_clock.is_usual = False
            self.step_clock.add_pause(begin_ns, time.monotonic_ns(), for_others=for_others)

    def record_copy(self, outputs: list[Any]) -> None:
        """Record that the devices copy the state of the last step; `outputs` are ready then."""
        if self.step_clock is not None:
            self.step_clock.add_copy(outputs)


def native_numbers() -> int:
    """Return the address of the numbers that the native library writes, valid forever."""
    numbers = (ctypes.c_char * (NATIVE.stop - NATIVE.start)).from_buffer(own.slot.memory[NATIVE])
    # Never freed: XLA's threads may write while the interpreter ends.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(numbers))
    return ctypes.addressof(numbers)


def _own_slot() -> Slot:
    launcher = launcher_client.current()
    if launcher is None:
        return Board.create(1).slot(0)
    return Board.attach(launcher.board_file).slot(launcher.slot)


own = OwnProgress()


def _take_slot_of_fork() -> None:
    own.slot = _own_slot()


if (_launcher := launcher_client.current()) is not None:
    _launcher.forked.append(_take_slot_of_fork)


# A forked child, which may load data, does not write to the slot of this process.
def _forked() -> None:
    if fork_server.is_forking.get():
        return
    own.slot = Board.create(1).slot(0)
    own.step_clock = None


os.register_at_fork(after_in_child=_forked)
