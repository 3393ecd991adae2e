"""This process's phases and steps."""

import ctypes
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

from jdp.worker import fork_server, launcher_client, process_status
from jdp.worker.hang_detector import SelfWatch
from jdp.worker.progress_board import NATIVE, Board, Slot, StepRecord, record

# Shorter steps share a record: a window must span more than a moment.
_LEAST_NS = 33_000_000
# Further waits count as host time.
_MOST_WAITS = 1000
# At most, from the end of a step with read metrics to its next dispatch.
_READ_NS = 1_000_000


class DispatchedStep(NamedTuple):
    """A dispatched step and the waits before it.

    Attributes:
      output: ready when the step has run.
      own_ns: from the dispatch before, but for waits in `make_room` and for other processes.
    """

    output: Any
    dispatched_ns: int
    waits: "HostWaits"
    is_counted: bool
    waits_in_xla: bool = False
    own_ns: int = 0


class HostWaits(NamedTuple):
    """The training thread's waits between two dispatches, as (begin, end) in ns.

    Attributes:
      paused: saving, evaluating, committing, the author's phases.
    """

    data: list[tuple[int, int]]
    others: list[tuple[int, int]]
    paused: list[tuple[int, int]]

    def within(self, begin_ns: int, end_ns: int) -> tuple[int, int, int]:
        """Return (data, others, paused) ns between two times; overlaps count once.

        >>> HostWaits(data=[(0, 4)], others=[(3, 6)], paused=[(2, 9)]).within(1, 20)
        (3, 2, 3)
        """
        data_ns = _covered(self.data, begin_ns, end_ns)
        both_ns = _covered([*self.data, *self.others], begin_ns, end_ns)
        all_ns = _covered([*self.data, *self.others, *self.paused], begin_ns, end_ns)
        return data_ns, both_ns - data_ns, all_ns - both_ns


_NONE = HostWaits([], [], [])


class CopiedState(NamedTuple):
    """The devices' copy of the state between two steps."""

    outputs: list[Any]  # ready when it is made


class StepClock:
    """Records this process's step times in its slot, see `progress_board`.

    A thread waits for each step to end; the training thread only queues it. `is_usual`: only steps,
    batches and the author's code ran since the last step. An unusual step, such as one after a
    save, counts only after another: then the loop always does it.
    """

    def __init__(self, slot: Slot) -> None:
        self.is_usual = False
        self._slot = slot
        self._was_usual = True
        self._waits = _NONE
        self._dispatched_ns = self._ready_ns = self._blocked_ns = 0
        self._calls: SimpleQueue[DispatchedStep | CopiedState | None] = SimpleQueue()
        self._end_ns = self._waited_ns = 0  # of the last step
        self._ends_ns: deque[int] = deque(maxlen=8)  # of the latest steps
        self._copied_ns = 0  # end of the last state copy
        self._sums = StepRecord(0, 0)
        self._thread = threading.Thread(target=self._run, name="jdp-step-clock", daemon=True)
        self._thread.start()

    def add_data_wait(self, begin_ns: int, end_ns: int) -> None:
        """Record a wait for a batch."""
        self._add(0, begin_ns, end_ns)

    def add_pause(self, begin_ns: int, end_ns: int, *, for_others: bool = False) -> None:
        """Record the training thread's other work, or a wait for others."""
        self._add(1 if for_others else 2, begin_ns, end_ns)

    # Bounded: a loop without `train_step` never takes them.
    def _add(self, kind: int, begin_ns: int, end_ns: int) -> None:
        if self._waits is _NONE:
            self._waits = HostWaits([], [], [])
        waits = self._waits[kind]
        if len(waits) < _MOST_WAITS:
            waits.append((begin_ns, end_ns))

    def add_copy(self, outputs: list[Any]) -> None:
        """Record a copy of the state, until `outputs` are ready."""
        self._calls.put(CopiedState(outputs))

    def add_blocked(self, since_ns: int) -> None:
        """Record the training thread's wait for steps in flight."""
        self._blocked_ns += time.monotonic_ns() - since_ns

    def begin_dispatch(self) -> None:
        """Record that a dispatch begins."""
        self._dispatched_ns = time.monotonic_ns()

    def end_dispatch(self, output: Any, waits_in_xla: bool = False) -> None:
        """Record a dispatched step."""
        is_counted = self.is_usual or not self._was_usual
        begin_ns = self._dispatched_ns
        others_ns = self._waits.within(self._ready_ns, begin_ns)[1]
        own_ns = begin_ns - self._ready_ns - self._blocked_ns - others_ns
        self._calls.put(
            DispatchedStep(output, begin_ns, self._waits, is_counted, waits_in_xla, own_ns)
        )
        self._ready_ns, self._blocked_ns = time.monotonic_ns(), 0
        self._was_usual, self._waits, self.is_usual = self.is_usual, _NONE, True

    def stop_clock(self, timeout_s: float = 1.0) -> None:
        """End the thread after the running steps."""
        self._calls.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                for output in call.outputs if isinstance(call, CopiedState) else [call.output]:
                    output.block_until_ready()
            except Exception:  # the training thread deals with it
                self._end_ns = 0
                continue
            if isinstance(call, CopiedState):
                self.record_copy(time.monotonic_ns())
            else:
                self.record_end(call, time.monotonic_ns(), self._slot.waited_ns())

    def record_copy(self, end_ns: int) -> None:
        """Record when the devices had copied the state."""
        self._copied_ns = end_ns

    def record_end(self, call: DispatchedStep, end_ns: int, waited_ns: int) -> None:
        """Record a step's end, and the process's total wait in collectives."""
        last_ns, self._end_ns = self._end_ns, end_ns
        self._ends_ns.append(end_ns)
        waited_ns, self._waited_ns = waited_ns - self._waited_ns, waited_ns
        if not last_ns or not call.is_counted:
            return
        given_ns = max(call.dispatched_ns, last_ns)  # idle until then
        data_ns, others_ns, paused_ns = call.waits.within(last_ns, given_ns)
        start_ns = min(max(given_ns, self._copied_ns), end_ns)
        waited_ns, host_ns = min(waited_ns, end_ns - start_ns), given_ns - last_ns
        ends_ns = (end for end in self._ends_ns if end <= call.dispatched_ns)
        earlier_ns = call.dispatched_ns - max(ends_ns, default=0)
        if call.dispatched_ns < last_ns and earlier_ns > _READ_NS:
            # It waited for no earlier step: without others it would dispatch no sooner.
            unavoidable_ns = max(0, waited_ns - max(0, end_ns - last_ns - call.own_ns))
            waited_ns, host_ns = waited_ns - unavoidable_ns, host_ns + unavoidable_ns
        self._sums = sums = StepRecord(
            self._sums.num_steps + 1,
            self._sums.step_ns + end_ns - last_ns,
            self._sums.data_ns + data_ns,
            self._sums.host_ns + host_ns - data_ns - others_ns - paused_ns,
            self._sums.waited_ns + others_ns + waited_ns,
            self._sums.paused_ns + paused_ns + start_ns - given_ns,
            self._sums.num_in_xla + call.waits_in_xla,
        )
        if sums.step_ns >= _LEAST_NS:
            self._slot.times.write(sums)
            self._sums = StepRecord(0, 0)


def _covered(intervals: list[tuple[int, int]], begin_ns: int, end_ns: int) -> int:
    covered, last = 0, begin_ns
    for begin, end in sorted(intervals):
        begin, end = max(begin, last), min(end, end_ns)
        if end > begin:
            covered, last = covered + end - begin, end
    return covered


class OwnProgress:
    """This process's progress, for all threads; `own` is the only instance.

    Attributes:
      phases: (record, begin) of active phases; the last is shown, the first is the base.
      between: the base phase after the first step.
      between_own: the same in a loop whose steps only its `Checkpointer` sees.
      unstepped: the base phase after the first request for a batch.
      num_counted: `num_steps` at the last call of `count_step`.
      num_own_steps: steps other than calls of a train step.
      is_first_step: whether a process among others has called no step yet.
      is_uncached: whether a program bypassed JAX's compilation cache.
      longest_wait_s: how long others may keep this process waiting; inf for no limit.
      latest_kept: the newest step to resume from, in words.
      restored: what a Checkpointer restored, see `messages`.
      closed_steps: of closed Checkpointers, of models trained before.
    """

    def __init__(self) -> None:
        self.slot = _own_slot()
        self.phases: list[tuple[bytes, int]] = [(record(""), 0)]
        self.between: tuple[bytes, int] = (record(process_status.BETWEEN), 0)
        self.between_own = self.unstepped = self.between
        self.num_steps = self.num_counted = self.num_own_steps = 0
        self.is_first_step = False
        self.compile_s, self.is_uncached = 0.0, False
        self.longest_wait_s = math.inf
        self.latest_kept: str | None = None
        self.restored: dict[str, Any] = {}
        self.is_complete = False
        self.closed_steps = 0
        self.line: Any = None
        self.watch: SelfWatch | None = None
        self.step_clock: StepClock | None = None
        self.num_running: Callable[[], int] = int

    def record_pause(self, begin_ns: int, *, for_others: bool = False) -> None:
        """Record a time without steps, from `begin_ns` to now."""
        if self.step_clock is not None:
            self.step_clock.is_usual = False
            self.step_clock.add_pause(begin_ns, time.monotonic_ns(), for_others=for_others)

    def record_copy(self, outputs: list[Any]) -> None:
        """Record a copy of the state, until `outputs` are ready."""
        if self.step_clock is not None:
            self.step_clock.add_copy(outputs)


def native_numbers() -> int:
    """Return the address of the native library's counters, valid forever."""
    numbers = (ctypes.c_char * (NATIVE.stop - NATIVE.start)).from_buffer(own.slot.memory[NATIVE])
    # XLA's threads may write while the interpreter ends.
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


# A forked data loader must not write to this slot.
def _forked() -> None:
    if fork_server.is_forking.get():
        return
    own.slot = Board.create(1).slot(0)
    own.step_clock = None


os.register_at_fork(after_in_child=_forked)


class Phase:
    """A reusable context in which the process is in a phase.

    `limit_s` is without progress; inf for no limit, 0 for the name's default.
    """

    __slots__ = ("_record",)

    def __init__(self, name: str, limit_s: float = 0.0):
        self._record = record(name, limit_s)

    def __enter__(self) -> None:
        own.phases.append((self._record, own.slot.enter(self._record)))
        if own.step_clock is not None:
            own.step_clock.is_usual = False

    def __exit__(self, *exception: object) -> None:
        begin_ns = _leave_phase(self._record)
        own.slot.enter(*own.phases[-1])
        own.record_pause(begin_ns, for_others=self is WAITING)


class TrainStep:
    """A step's call, counted at its exit; devices may still run it."""

    __slots__ = ()

    # Inlined: every step pays for it.
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
    """A wait for a batch; the first starts the watch."""

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
    """Count a step of the author's loop, unless already counted."""
    if own.num_steps == own.num_counted:
        own.phases[0] = own.between_own
        own.num_own_steps += 1
        _record_step()
    own.num_counted = own.num_steps


def num_steps() -> tuple[int, int]:
    """Return (own steps, train step calls)."""
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
    if own.phases[-1][0] is phase:
        return own.phases.pop()[1]
    # Another thread's phase began later.
    left = next(it for it in reversed(own.phases) if it[0] is phase)
    own.phases.remove(left)
    return left[1]


STARTING = record(process_status.STARTING)
_STEP = record(process_status.STEP)
TRAIN_STEP = TrainStep()
EVAL_STEP = Phase(process_status.STEP)
FIRST_STEP = Phase(process_status.FIRST)
DATA = Data(process_status.DATA)
WAITING = Phase(process_status.WAITING)
EVALUATING = Phase(process_status.EVALUATING)
SAVING = Phase(process_status.SAVING)
RESTORING = Phase(process_status.RESTORING)
COMPARING = Phase("comparing ranks")
_COMPILING = Phase(process_status.COMPILING)


def phase(name: str, *, timeout_s: float | None = None) -> Phase:
    """Name a long activity of the process, so that it is not reported as a hang.

    While a process evaluates in its own loop, downloads, or writes a table, it makes no steps and
    the other processes wait. A phase names this work in hang reports and sets its time limit. jdp
    names its own phases: compiling, evaluating, saving.

    Args:
      name: the activity, such as "downloading".
      timeout_s: seconds, > 0, without a step or another phase, after which the run ends; `math.inf`
        for no limit. Default: six times the timeout of `jdp.init`.

    Returns:
      A context manager. Phases may nest; when an inner one ends, the outer limit restarts.

    Raises:
      ValueError: the name is empty or `timeout_s` is not positive.

    >>> import jdp
    >>> with jdp.phase("counting", timeout_s=3600.0):
    ...     sum(range(10))
    45
    """
    if not name:
        raise ValueError('phase needs a name for the reports, such as "downloading".')
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(
            f"timeout_s={timeout_s} must be positive: the phase {name!r} would end at once. "
            "Write its longest normal duration in seconds, or math.inf."
        )
    return Phase(name, timeout_s or 0.0)


def compiling_begins() -> None:
    """Record that a step is traced and compiled."""
    _COMPILING.__enter__()


def compiling_ends() -> None:
    """Record that it is compiled and dispatched."""
    own.compile_s += (time.monotonic_ns() - own.phases[-1][1]) / 1e9
    _COMPILING.__exit__()


def _tell_first_step() -> None:
    own.is_first_step = False
    launcher = launcher_client.current()
    if launcher is not None:
        seconds = time.monotonic() - launcher.woken
        facts = {"compile_s": own.compile_s, "is_uncached": own.is_uncached}
        launcher.tell("first_step", s=seconds, **facts)
