"""The times of the latest training steps of a process, in memory that its launcher reads.

The time from the end of a step on the devices to the end of the next one has five parts:

  data     the devices had nothing to do, and the process waited for a batch
  paused   the devices had nothing to do since the process saved, evaluated or was in a phase of the
           author's; or they copied the state for a commit
  host     the devices had nothing to do for another reason: code between steps, dispatch
  waited   the process waited for others: in a collective of jdp's library, or between steps. In
           XLA's collectives the wait is not known and counts as computation
  compute  the rest
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

# A decision takes this many records, see `Window`.
NUM_RECORDS = 25
# A slot is being written at any time, and readers may be late by another.
_NUM_SLOTS = NUM_RECORDS + 2
_RECORD = struct.Struct("7q")
_BEGIN = 64
NUM_BYTES = 64 * -(-(_BEGIN + _NUM_SLOTS * _RECORD.size) // 64)


class StepRecord(NamedTuple):
    """Some steps in a row, and the nanoseconds that they took together.

    `num_in_xla` of the steps ran collectives of XLA's too, in which waits are not known.
    """

    num_steps: int
    step_ns: int
    data_ns: int = 0
    host_ns: int = 0
    waited_ns: int = 0
    paused_ns: int = 0
    num_in_xla: int = 0


class StepTimes:
    """The latest records of a process, which it alone writes, without a lock.

    >>> times = StepTimes(memoryview(bytearray(NUM_BYTES)))
    >>> times.write(StepRecord(num_steps=1, step_ns=20_000_000, waited_ns=4_000_000))
    >>> times.latest()
    [StepRecord(num_steps=1, step_ns=20000000, data_ns=0, host_ns=0, waited_ns=4000000, \
paused_ns=0, num_in_xla=0)]
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._num_written = memory[:8].cast("q")

    @property
    def num_written(self) -> int:
        """The number of records that were written since the process began."""
        return self._num_written[0]

    def clear(self) -> None:
        """Forget all records."""
        self._num_written[0] = 0

    def write(self, record: StepRecord) -> None:
        """Add a record, and forget the oldest."""
        number = self._num_written[0]
        _RECORD.pack_into(self._memory, _place(number), *record)
        self._num_written[0] = number + 1

    def latest(self) -> list[StepRecord]:
        """Return the latest records, at most NUM_RECORDS, the oldest first."""
        end = self._num_written[0]
        numbers = range(max(0, end - NUM_RECORDS), end)
        records = [StepRecord(*_RECORD.unpack_from(self._memory, _place(i))) for i in numbers]
        # The writer may have overwritten the oldest meanwhile.
        num_lost = max(0, self._num_written[0] + 1 - _NUM_SLOTS - numbers.start)
        return records[num_lost:]


def _place(number: int) -> int:
    return _BEGIN + number % _NUM_SLOTS * _RECORD.size


class Window(NamedTuple):
    """The times of a step over the latest records of a process, in whole microseconds.

    Attributes:
      num_written: records that the process has written so far.
      num_records: of them in this window.
      step, data, host, paused, compute, waited: medians.
      waited_low, waited_high: nine of ten records have at least, at most so much `waited`.
      idle, idle_low, idle_high: likewise for `data`, `host` and `paused` together.
      knows_waits: 1 if all waits of these steps are known, 0 if XLA has collectives in one.
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
    """Return the window of some records, at least one.

    >>> records = [StepRecord(1, 20_000_000, data_ns=3_000_000)] * 24 + [StepRecord(1, 10**9)]
    >>> window = window_of(25, records)
    >>> window.step, window.data, window.compute, window.idle_low
    (20000, 3000, 17000, 3000)
    """

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
