"""Takes the time of each training step: when the devices had it, and when they were done."""

import threading
import time
from queue import SimpleQueue
from typing import Any, NamedTuple

from jdp.worker.progress_board import Slot
from jdp.worker.step_times import StepRecord

# Shorter steps share a record, so that a window is not one moment of a busy machine.
_LEAST_NS = 33_000_000
# Waits that are kept for a step; further ones count as time on the host.
_MOST_WAITS = 1000


class DispatchedStep(NamedTuple):
    """A step that the devices have, and what came before it."""

    output: Any  # a jax.Array, ready when the step has run
    dispatched_ns: int
    waits: "HostWaits"
    is_counted: bool
    waits_in_xla: bool = False


class HostWaits(NamedTuple):
    """What the training thread waited for between two dispatches: begins and ends.

    Attributes:
      data: for batches.
      others: for other processes.
      paused: in other phases: it saved, evaluated, committed, or was in a phase of the author's.
    """

    data: list[tuple[int, int]]
    others: list[tuple[int, int]]
    paused: list[tuple[int, int]]

    def within(self, begin_ns: int, end_ns: int) -> tuple[int, int, int]:
        """Return the nanoseconds of each kind between two times. None counts twice.

        >>> HostWaits(data=[(0, 4)], others=[(3, 6)], paused=[(2, 9)]).within(1, 20)
        (3, 2, 3)
        """
        data_ns = _covered(self.data, begin_ns, end_ns)
        both_ns = _covered([*self.data, *self.others], begin_ns, end_ns)
        all_ns = _covered([*self.data, *self.others, *self.paused], begin_ns, end_ns)
        return data_ns, both_ns - data_ns, all_ns - both_ns


_NONE = HostWaits([], [], [])


class CopiedState(NamedTuple):
    """A copy of the state for a commit, which the devices make between two steps."""

    outputs: list[Any]  # jax.Arrays, ready when it is made


class StepClock:
    """Records the times of the steps of this process in its slot, see `step_times`.

    A thread waits for each step to end. The training thread only queues it, and synchronizes with
    nothing.

    Args:
      slot: of this process.

    Attributes:
      is_usual: whether nothing but steps, batches and code of the author's has run since the last
        step. Another one, such as a step before which the process saved, is not counted unless
        the step before it was not usual either: then it is what the loop does in each step.
    """

    def __init__(self, slot: Slot) -> None:
        self.is_usual = False
        self._slot = slot
        self._was_usual = True
        self._waits = _NONE
        self._dispatched_ns = 0
        self._calls: SimpleQueue[DispatchedStep | CopiedState | None] = SimpleQueue()
        self._end_ns = self._waited_ns = 0  # of the last step
        self._copied_ns = 0  # end of the last copy of a state
        self._sums = StepRecord(0, 0)
        self._thread = threading.Thread(target=self._run, name="jdp-step-clock", daemon=True)
        self._thread.start()

    def add_data_wait(self, begin_ns: int, end_ns: int) -> None:
        """Record a wait for a batch."""
        self._add(0, begin_ns, end_ns)

    def add_pause(self, begin_ns: int, end_ns: int, *, for_others: bool = False) -> None:
        """Record that the training thread did something else than steps, or waited for others."""
        self._add(1 if for_others else 2, begin_ns, end_ns)

    # In a loop without `train_step` no dispatch takes them away.
    def _add(self, kind: int, begin_ns: int, end_ns: int) -> None:
        if self._waits is _NONE:
            self._waits = HostWaits([], [], [])
        waits = self._waits[kind]
        if len(waits) < _MOST_WAITS:
            waits.append((begin_ns, end_ns))

    def add_copy(self, outputs: list[Any]) -> None:
        """Record that the devices copy the state of the last step; `outputs` are ready then."""
        self._calls.put(CopiedState(outputs))

    def begin_dispatch(self) -> None:
        """Record that a step is about to be handed to the devices."""
        self._dispatched_ns = time.monotonic_ns()

    def end_dispatch(self, output: Any, waits_in_xla: bool = False) -> None:
        """Record that the step was handed to the devices."""
        is_counted = self.is_usual or not self._was_usual
        self._calls.put(
            DispatchedStep(output, self._dispatched_ns, self._waits, is_counted, waits_in_xla)
        )
        self._was_usual, self._waits, self.is_usual = self.is_usual, _NONE, True

    def stop_clock(self, timeout_s: float = 1.0) -> None:
        """End the thread, after the steps that run."""
        self._calls.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                for output in call.outputs if isinstance(call, CopiedState) else [call.output]:
                    output.block_until_ready()
            except Exception:  # it failed or was deleted, which concerns the training thread
                self._end_ns = 0
                continue
            if isinstance(call, CopiedState):
                self.record_copy(time.monotonic_ns())
            else:
                self.record_end(call, time.monotonic_ns(), self._slot.waited_ns())

    def record_copy(self, end_ns: int) -> None:
        """Record the monotonic time at which the devices had copied the state of the last step."""
        self._copied_ns = end_ns

    def record_end(self, call: DispatchedStep, end_ns: int, waited_ns: int) -> None:
        """Record that a step has ended, and how long this process has waited in all its steps."""
        last_ns, self._end_ns = self._end_ns, end_ns
        waited_ns, self._waited_ns = waited_ns - self._waited_ns, waited_ns
        if not last_ns or not call.is_counted:
            return
        given_ns = max(call.dispatched_ns, last_ns)  # the devices were idle until then
        data_ns, others_ns, paused_ns = call.waits.within(last_ns, given_ns)
        start_ns = min(max(given_ns, self._copied_ns), end_ns)
        self._sums = sums = StepRecord(
            self._sums.num_steps + 1,
            self._sums.step_ns + end_ns - last_ns,
            self._sums.data_ns + data_ns,
            self._sums.host_ns + given_ns - last_ns - data_ns - others_ns - paused_ns,
            self._sums.waited_ns + others_ns + min(waited_ns, end_ns - start_ns),
            self._sums.paused_ns + paused_ns + start_ns - given_ns,
            self._sums.num_in_xla + call.waits_in_xla,
        )
        if sums.step_ns >= _LEAST_NS:
            self._slot.times.write(sums)
            self._sums = StepRecord(0, 0)


def _covered(intervals: list[tuple[int, int]], begin_ns: int, end_ns: int) -> int:
    """Return how much of the time between two times the intervals cover together."""
    covered, last = 0, begin_ns
    for begin, end in sorted(intervals):
        begin, end = max(begin, last), min(end, end_ns)
        if end > begin:
            covered, last = covered + end - begin, end
    return covered
