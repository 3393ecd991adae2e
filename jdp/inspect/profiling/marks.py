"""The marks of a process while it is profiled: its phases, and its calls of training steps.

The process writes them to its slot in any case, for the hang detector. A profile puts a slot in its
place that passes each mark on, so that a process without one does nothing for it.
"""

from collections.abc import Callable
from time import time_ns
from typing import NamedTuple

from jdp.distributed import in_flight
from jdp.distributed.step_call import StepCall
from jdp.worker import phases
from jdp.worker.own_progress import own
from jdp.worker.progress_board import Slot, phase_name


class MarkedCall(NamedTuple):
    """A training step that this process has called.

    Attributes:
      begin: when, in nanoseconds since 1970.
      end: when the call returned. The devices may run on.
      call: of a decorated step; None where only `Checkpointer.step` sees the steps.
    """

    begin: int
    end: int
    call: StepCall | None


class Marks:
    """The marks of this process between `begin` and `end`.

    Args:
      on_begin: called when a step is called.
      on_step: called when it has returned.

    Attributes:
      phases: when each began, in nanoseconds since 1970, and its name.
    """

    def __init__(self, on_begin: Callable[[], None], on_step: Callable[[MarkedCall], None]) -> None:
        self.phases: list[tuple[int, str]] = []
        self._on_begin, self._on_step = on_begin, on_step
        self._begun, self._seen = time_ns(), in_flight.latest_call()
        self._new: StepCall | None = None
        self._before = own.slot
        self._slot = _MarkedSlot(self._before, self)

    def begin(self) -> None:
        """Begin to pass on marks."""
        own.slot = self._slot

    def end(self) -> None:
        """Leave no trace in the process."""
        if own.slot is self._slot:  # else this is a forked child, with its own slot
            own.slot = self._before

    def phase(self, record: bytes) -> None:
        """Record a phase that begins."""
        name, now = phase_name(record), time_ns()
        self.phases.append((now, name))
        self._look()
        # A step returns to this phase from those within it, such as compiling.
        if name == phases.STEP and all(each is not record for each, _ in own.phases):
            self._begun = now
            self._on_begin()

    def step(self, record: bytes) -> None:
        """Record the end of a step, and the phase that follows."""
        self._look()
        done = MarkedCall(self._begun, time_ns(), self._new)
        self._new, self._begun = None, done.end
        self.phases.append((done.end, phase_name(record)))
        self._on_step(done)

    def _look(self) -> None:
        call = in_flight.latest_call()
        if call is not None and call is not self._seen and call.spec.returns_state:
            self._seen = self._new = call


class _MarkedSlot(Slot):
    def __init__(self, slot: Slot, marks: Marks) -> None:
        super().__init__(slot.memory, slot.times)
        write_phase, write_step = self.write_phase, self.write_step

        def phase_and_mark(progress_ns: int, since_ns: int, phase: bytes) -> None:
            write_phase(progress_ns, since_ns, phase)
            marks.phase(phase)

        def step_and_mark(steps: int, progress_ns: int, since_ns: int, phase: bytes) -> None:
            write_step(steps, progress_ns, since_ns, phase)
            marks.step(phase)

        self.write_phase, self.write_step = phase_and_mark, step_and_mark
