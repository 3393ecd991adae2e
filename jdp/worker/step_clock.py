"""Takes the time of each training step: when the devices had it, and when they were done."""

import threading
import time
from queue import SimpleQueue
from typing import Any, NamedTuple

from jdp.worker.progress_board import Slot
from jdp.worker.step_times import StepRecord

# Shorter steps share a record, so that a window is not one moment of a busy machine.
_LEAST_NS = 33_000_000


class DispatchedStep(NamedTuple):
    """A step that the devices have, and what came before it."""

    output: Any  # a jax.Array, ready when the step has run
    dispatched_ns: int
    data_waits: list[tuple[int, int]]  # begin and end
    is_usual: bool


class StepClock:
    """Records the times of the steps of this process in its slot, see `step_times`.

    A thread waits for each step to end. The training thread only queues it, and synchronizes with
    nothing.

    Args:
      slot: of this process.

    Attributes:
      is_usual: whether nothing but steps, batches and code of the author's has run since the last
        step. Others are not counted, such as a step before which the process saved.
    """

    def __init__(self, slot: Slot) -> None:
        self.is_usual = False
        self._slot = slot
        self._data_waits: list[tuple[int, int]] = []
        self._dispatched_ns = 0
        self._calls: SimpleQueue[DispatchedStep | None] = SimpleQueue()
        self._end_ns = self._waited_ns = 0  # of the last step
        self._sums = StepRecord(0, 0)
        self._thread = threading.Thread(target=self._run, name="jdp-step-clock", daemon=True)
        self._thread.start()

    def add_data_wait(self, begin_ns: int, end_ns: int) -> None:
        """Record a wait for a batch."""
        self._data_waits.append((begin_ns, end_ns))

    def begin_dispatch(self) -> None:
        """Record that a step is about to be handed to the devices."""
        self._dispatched_ns = time.monotonic_ns()

    def end_dispatch(self, output: Any) -> None:
        """Record that the step was handed to the devices; `output` is ready when it has run."""
        self._calls.put(
            DispatchedStep(output, self._dispatched_ns, self._data_waits, self.is_usual)
        )
        self._data_waits, self.is_usual = [], True

    def stop_clock(self, timeout_s: float = 1.0) -> None:
        """End the thread, after the steps that run."""
        self._calls.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call.output.block_until_ready()
            except Exception:  # it failed or was deleted, which concerns the training thread
                self._end_ns = 0
                continue
            self.record_end(call, time.monotonic_ns(), self._slot.waited_ns())

    def record_end(self, call: DispatchedStep, end_ns: int, waited_ns: int) -> None:
        """Record that a step has ended, and how long this process has waited in all its steps.

        Args:
          call: the step.
          end_ns: monotonic time at which it ended.
          waited_ns: nanoseconds that this process has waited for others so far, in all steps.
        """
        last_ns, self._end_ns = self._end_ns, end_ns
        waited_ns, self._waited_ns = waited_ns - self._waited_ns, waited_ns
        if not last_ns or not call.is_usual:
            return
        start_ns = max(call.dispatched_ns, last_ns)
        waits = [min(end, start_ns) - max(begin, last_ns) for begin, end in call.data_waits]
        data_ns = sum(wait for wait in waits if wait > 0)
        self._sums = sums = StepRecord(
            self._sums.num_steps + 1,
            self._sums.step_ns + end_ns - last_ns,
            self._sums.data_ns + data_ns,
            self._sums.host_ns + start_ns - last_ns - data_ns,
            self._sums.waited_ns + min(waited_ns, end_ns - start_ns),
        )
        if sums.step_ns >= _LEAST_NS:
            self._slot.times.write(sums)
            self._sums = StepRecord(0, 0)
