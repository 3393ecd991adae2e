"""The status of each process, in shared memory that processes write and the launcher reads.

Each process has a slot, which it alone writes, with stores of words: there are no locks, and the
last status of a process stays readable however it hangs or ends.
"""

import functools
import mmap
import os
import struct
import time

from jdp.worker import step_times
from jdp.worker.process_status import BEFORE, TIMEOUT_S, ProcessStatus
from jdp.worker.run_counts import NUM_BYTES, Counter, counts_in
from jdp.worker.step_times import StepTimes

SLOT_BYTES = 320
_STRIDE = SLOT_BYTES + step_times.NUM_BYTES
_NAME_BYTES = 64

# Words of 8 bytes, in the byte order of the host.
_PID, _GENERATION, _TIMEOUT, _STEPS, _PROGRESS, _SINCE = range(6)
# The limit and the name of the phase, written together.
_LIMIT, _NAME = 6, slice(56, 56 + _NAME_BYTES)
_PIECE = f"{8 + _NAME_BYTES}s"
_write_step = struct.Struct(f"qqq{_PIECE}").pack_into
_write_phase = struct.Struct(f"qq{_PIECE}").pack_into
# Written by threads of the native library, in a cache line of their own: the number of all-reduces
# that ranks of this process have entered and left, the bucket of the last one entered, and how long
# this process has waited in them for others.
NATIVE = slice(128, 160)
_ENTERED, _DONE, _BUCKET, _WAITED = range(16, 20)
# Written by the watchdog's thread.
_RUNNING, _DEBUGGED = 24, 25
_COUNTS = slice(SLOT_BYTES - NUM_BYTES, SLOT_BYTES)


class Board:
    """Slots of the processes of one host.

    >>> board = Board.create(num_slots=2)
    >>> slot = board.slot(1)
    >>> slot.claim(generation=3, timeout_s=600.0)
    >>> since_ns = slot.enter(record("waiting for data"))
    >>> board.slot(1).read().phase, board.slot(0).read().pid
    ('waiting for data', 0)
    """

    def __init__(self, memory: mmap.mmap, fd: int = -1):
        self.fd = fd
        self.num_slots = len(memory) // _STRIDE
        self._memory = memory

    @classmethod
    def create(cls, num_slots: int) -> "Board":
        """Return a new board, which other processes attach by its `fd`, for `num_slots` >= 1."""
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
        """Return a slot, from 0 to num_slots - 1."""
        if not 0 <= index < self.num_slots:
            raise IndexError(f"slot {index} of a board of {self.num_slots}.")
        memory = memoryview(self._memory)[index * _STRIDE :][:_STRIDE]
        return Slot(memory[:SLOT_BYTES], StepTimes(memory[SLOT_BYTES:]))


class Slot:
    """The part of a board that belongs to one process. A write takes less than a microsecond.

    The time of the progress is written before the progress: a reader in between, or one that finds
    the process killed there, takes it for busier than it is, never for stalled.

    Attributes:
      counter: writes its counts.
      write_phase: `write_phase(progress_ns, since_ns, phase)`, one call of C: writes the time of
        the progress, and a phase, made by `record`.
      write_step: `write_step(steps, progress_ns, since_ns, phase)`: writes the number of steps,
        too.
      times: of its latest steps.
    """

    def __init__(self, memory: memoryview, times: StepTimes):
        self.memory, self.times = memory, times
        self._words = memory.cast("q")
        self._floats = memory.cast("d")
        self.counter = Counter(memory[_COUNTS])
        self.write_phase = functools.partial(_write_phase, memory, 8 * _PROGRESS)
        self.write_step = functools.partial(_write_step, memory, 8 * _STEPS)

    def expect(self, pid: int, generation: int) -> None:
        """Reserve the slot for a process that has not come to `jdp.init()` yet."""
        self._reset(pid, generation, TIMEOUT_S)
        self.enter(record(BEFORE))

    def claim(self, generation: int, timeout_s: float) -> None:
        """Begin to use the slot for this process; `timeout_s` is inf for no limit."""
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
        """Write a phase that begins now, or began at `since_ns`, and return when it began.

        Times are those of `time.monotonic_ns`.
        """
        now = time.monotonic_ns()
        since_ns = since_ns or now
        self.write_phase(now, since_ns, phase)
        return since_ns

    def write_progress(self) -> None:
        """Write that the process made progress."""
        self._words[_PROGRESS] = time.monotonic_ns()

    def write_seen(self, is_running: bool, is_debugged: bool) -> None:
        """Write facts that no other process can see."""
        self._words[_RUNNING] = is_running
        self._words[_DEBUGGED] = is_debugged

    def waited_ns(self) -> int:
        """Return how long the process has waited for others in collectives of the library."""
        return self._words[_WAITED]

    def read(self) -> ProcessStatus:
        """Return the status of the process, with its state in the system."""
        # Two equal reads in a row mean that no write is in progress.
        seen, again = bytes(self.memory), bytes(self.memory)
        while seen != again:
            seen, again = again, bytes(self.memory)
        view = memoryview(seen)
        words, floats = view.cast("q"), view.cast("d")
        pid = words[_PID]
        # struct clears its target before it writes, the time first: a process that was stopped
        # there has no phase.
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
    """Return a phase as a slot holds it: `limit_s`, and the first 64 bytes of its name."""
    return struct.pack(f"d{_NAME_BYTES}s", limit_s, name.encode())


def phase_name(phase: bytes) -> str:
    """Return the name of a phase, given what `record` returned.

    >>> phase_name(record("saving"))
    'saving'
    """
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
