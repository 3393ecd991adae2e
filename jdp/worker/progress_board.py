"""Each process's status in shared memory, for the launcher.

Only a process writes its slot, by word stores without locks, so its last status stays readable
however it hangs or ends.
"""

import functools
import mmap
import os
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

from jdp.worker.process_status import (
    BEFORE,
    COUNTS_BYTES,
    TIMEOUT_S,
    Counter,
    ProcessStatus,
    counts_in,
)

# The time from the end of a step on the devices to the end of the next has five parts:
#
#   data     idle devices while the process waited for a batch
#   paused   idle devices while the process saved, evaluated or was in a phase of the author's;
#            or they copied the state for a commit
#   host     idle devices for another reason: code between steps, dispatch
#   waited   for others, in a collective of jdp's library or between steps; a wait in XLA's
#            collectives is unknown and counts as computation
#   compute  the rest


# Records for a decision, see `Window`.
NUM_RECORDS = 25
# One is always being written, and a reader may lag by another.
_NUM_SLOTS = NUM_RECORDS + 2
_RECORD = struct.Struct("7q")
_BEGIN = 64
TIMES_BYTES = 64 * -(-(_BEGIN + _NUM_SLOTS * _RECORD.size) // 64)


class StepRecord(NamedTuple):
    """Consecutive steps and their ns; `num_in_xla` ran XLA's collectives, with unknown waits."""

    num_steps: int
    step_ns: int
    data_ns: int = 0
    host_ns: int = 0
    waited_ns: int = 0
    paused_ns: int = 0
    num_in_xla: int = 0


class _StepTimes:
    """A process's latest records, written by it alone, without a lock."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._num_written = memory[:8].cast("q")

    @property
    def num_written(self) -> int:
        return self._num_written[0]

    def clear(self) -> None:
        self._num_written[0] = 0

    def write(self, record: StepRecord) -> None:
        number = self._num_written[0]
        _RECORD.pack_into(self._memory, _place(number), *record)
        self._num_written[0] = number + 1

    def latest(self) -> list[StepRecord]:
        end = self._num_written[0]
        numbers = range(max(0, end - NUM_RECORDS), end)
        records = [StepRecord(*_RECORD.unpack_from(self._memory, _place(i))) for i in numbers]
        # The writer may have overwritten the oldest.
        num_lost = max(0, self._num_written[0] + 1 - _NUM_SLOTS - numbers.start)
        return records[num_lost:]


def _place(number: int) -> int:
    return _BEGIN + number % _NUM_SLOTS * _RECORD.size


class Window(NamedTuple):
    """Step times over a process's latest records, in us.

    Attributes:
      num_written: the process's records.
      num_records: records in this window.
      step, data, host, paused, compute, waited: medians.
      waited_low, waited_high: the 10 % and 90 % quantiles of `waited`.
      idle, idle_low, idle_high: likewise of `data` + `host` + `paused`.
      knows_waits: 0 if a step had collectives of XLA, else 1.
    """

    num_written: int
    num_records: int
    step: int
    data: int
    host: int
    paused: int
    compute: int
    waited: int
    waited_low: int
    waited_high: int
    idle: int
    idle_low: int
    idle_high: int
    knows_waits: int


def window_of(num_written: int, records: Sequence[StepRecord]) -> Window:
    """Return the window of at least one record."""

    def ordered(of: Sequence[int]) -> list[int]:
        return sorted(ns // it.num_steps // 1000 for ns, it in zip(of, records, strict=True))

    idle = ordered([it.data_ns + it.host_ns + it.paused_ns for it in records])
    waited = ordered([it.waited_ns for it in records])
    rest = [it.data_ns + it.host_ns + it.paused_ns + it.waited_ns for it in records]
    compute = [it.step_ns - ns for ns, it in zip(rest, records, strict=True)]
    middle, few = len(records) // 2, len(records) // 10
    return Window(
        num_written,
        len(records),
        ordered([it.step_ns for it in records])[middle],
        ordered([it.data_ns for it in records])[middle],
        ordered([it.host_ns for it in records])[middle],
        ordered([it.paused_ns for it in records])[middle],
        ordered(compute)[middle],
        waited[middle],
        waited[few],
        waited[-1 - few],
        idle[middle],
        idle[few],
        idle[-1 - few],
        int(not any(it.num_in_xla for it in records)),
    )


SLOT_BYTES = 320
_STRIDE = SLOT_BYTES + TIMES_BYTES
_NAME_BYTES = 64

# Indices of 8-byte words.
_PID, _GENERATION, _TIMEOUT, _STEPS, _PROGRESS, _SINCE = range(6)
# The limit and the name are written together.
_LIMIT, _NAME = 6, slice(56, 56 + _NAME_BYTES)
_PIECE = f"{8 + _NAME_BYTES}s"
_write_step = struct.Struct(f"qqq{_PIECE}").pack_into
_write_phase = struct.Struct(f"qq{_PIECE}").pack_into
# Written by the native library's threads, on their own cache line: all-reduces entered and left,
# the last bucket entered, ns of waiting.
NATIVE = slice(128, 160)
_ENTERED, _DONE, _BUCKET, _WAITED = range(16, 20)
# Written by the watchdog's thread.
_RUNNING, _DEBUGGED = 24, 25
_COUNTS = slice(SLOT_BYTES - COUNTS_BYTES, SLOT_BYTES)


class Board:
    """The slots of a host's processes."""

    def __init__(self, memory: mmap.mmap, fd: int = -1):
        self.fd = fd
        self.num_slots = len(memory) // _STRIDE
        self._memory = memory

    @classmethod
    def create(cls, num_slots: int) -> "Board":
        """Return a board, to attach in other processes by its `fd`."""
        size = num_slots * _STRIDE
        if not hasattr(os, "memfd_create"):
            return cls(mmap.mmap(-1, size))
        fd = os.memfd_create("jdp-board")
        os.ftruncate(fd, size)
        return cls(mmap.mmap(fd, size), fd)

    @classmethod
    def attach(cls, fd: int) -> "Board":
        """Return the board in the file `fd`, which stays open."""
        return cls(mmap.mmap(fd, os.fstat(fd).st_size), fd)

    def slot(self, index: int) -> "Slot":
        """Return a slot by its index."""
        if not 0 <= index < self.num_slots:
            raise IndexError(f"slot {index} of a board of {self.num_slots}.")
        memory = memoryview(self._memory)[index * _STRIDE :][:_STRIDE]
        return Slot(memory[:SLOT_BYTES], _StepTimes(memory[SLOT_BYTES:]))


class Slot:
    """One process's part of a board; a write takes less than a microsecond.

    The progress time is written before the progress: a reader in between sees a process as too
    busy, never as stalled.

    Attributes:
      write_phase: `write_phase(progress_ns, since_ns, phase)`, one C call; `phase` is a `record`.
      write_step: `write_step(steps, progress_ns, since_ns, phase)`, likewise.
    """

    def __init__(self, memory: memoryview, times: _StepTimes):
        self.memory, self.times = memory, times
        self._words = memory.cast("q")
        self._floats = memory.cast("d")
        self.counter = Counter(memory[_COUNTS])
        self.write_phase = functools.partial(_write_phase, memory, 8 * _PROGRESS)
        self.write_step = functools.partial(_write_step, memory, 8 * _STEPS)

    def expect(self, pid: int, generation: int) -> None:
        """Reserve the slot for a process before `jdp.init()`."""
        self._reset(pid, generation, TIMEOUT_S)
        self.enter(record(BEFORE))

    def claim(self, generation: int, timeout_s: float) -> None:
        """Claim the slot for this process; `timeout_s` may be inf."""
        self._reset(os.getpid(), generation, timeout_s)

    def _reset(self, pid: int, generation: int, timeout_s: float) -> None:
        words = self._words
        words[_STEPS] = words[_RUNNING] = words[_DEBUGGED] = 0
        self.counter.reset()
        words[_GENERATION] = generation
        self._floats[_TIMEOUT] = timeout_s
        words[_PROGRESS] = words[_SINCE] = time.monotonic_ns()
        words[_PID] = pid
        self.times.clear()

    def clear(self) -> None:
        """Clear the slot."""
        self.memory[:] = bytes(SLOT_BYTES)
        self.times.clear()

    def enter(self, phase: bytes, since_ns: int = 0) -> int:
        """Write a phase that began at `since_ns` (0: now); return its begin."""
        now = time.monotonic_ns()
        since_ns = since_ns or now
        self.write_phase(now, since_ns, phase)
        return since_ns

    def write_progress(self) -> None:
        """Write that the process made progress."""
        self._words[_PROGRESS] = time.monotonic_ns()

    def write_seen(self, is_running: bool, is_debugged: bool) -> None:
        """Write what no other process can see."""
        self._words[_RUNNING] = is_running
        self._words[_DEBUGGED] = is_debugged

    def waited_ns(self) -> int:
        """Return the total wait in the library's collectives."""
        return self._words[_WAITED]

    def read(self) -> ProcessStatus:
        """Return the status, with the process's state in the system."""
        # Two equal reads: no write is in progress.
        seen, again = bytes(self.memory), bytes(self.memory)
        while seen != again:
            seen, again = again, bytes(self.memory)
        view = memoryview(seen)
        words, floats = view.cast("q"), view.cast("d")
        pid = words[_PID]
        # struct clears its target before it writes: a process stopped there has no phase.
        name = seen[_NAME] if words[_PROGRESS] else b""
        return ProcessStatus(
            pid=pid,
            generation=words[_GENERATION],
            steps=words[_STEPS],
            progress_s=words[_PROGRESS] / 1e9,
            phase=name.rstrip(b"\0").decode(errors="ignore"),
            since_s=words[_SINCE] / 1e9,
            limit_s=floats[_LIMIT],
            timeout_s=floats[_TIMEOUT],
            entered=words[_ENTERED],
            done=words[_DONE],
            bucket=words[_BUCKET],
            is_running=bool(words[_RUNNING]),
            state="debugged" if words[_DEBUGGED] else _state(pid),
            counts=counts_in(seen[_COUNTS]),
        )


def record(name: str, limit_s: float = 0.0) -> bytes:
    """Return a phase as a slot holds it; names have 64 bytes."""
    return struct.pack(f"d{_NAME_BYTES}s", limit_s, name.encode())


def phase_name(phase: bytes) -> str:
    """Return the name of a `record`."""
    return phase[8:].rstrip(b"\0").decode(errors="ignore")


def _state(pid: int) -> str:
    if not pid or not os.path.isdir("/proc/self"):
        return ""
    try:
        with open(f"/proc/{pid}/status") as file:
            lines = dict(line.split(":\t", 1) for line in file if ":\t" in line)
    except OSError:
        return "gone"
    if int(lines.get("TracerPid", 0)):
        return "debugged"
    return {"T": "stopped", "Z": "gone"}.get(lines["State"][0], "")
