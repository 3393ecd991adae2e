"""Marks of the processes of a host, for the commits that they write together."""

import contextlib
import os
import struct
import zlib
from typing import NamedTuple

from jdp.checkpoint.commit_memory import MARKS

# The fields of `CommitMark`. A checksum follows: a mark may be read while it is written.
_MARK = struct.Struct("<QQQQQQ")
_MARK_BYTES = _MARK.size + 4
# Why a process writes no more shares, behind all marks.
_REASONS, _REASON_BYTES = MARKS + (1 << 20), 2048

# That a process writes its share now; that it has written it, and of share 0 that there is a
# commit; that it writes no more shares in this life.
BEGUN, WRITTEN, ENDED = 1, 2, 3


class CommitMark(NamedTuple):
    """Whether a process writes its share or has written it, and of which state.

    Attributes:
      life: checksum of the tag of the life, since the memory has marks of earlier ones.
      status: BEGUN, WRITTEN or ENDED.
      number: of the draft that has the share.
      form: checksum of the layout.
      step: of the state.
      num_calls: how many calls of train steps led to the state.
    """

    life: int
    status: int
    number: int = 0
    form: int = 0
    step: int = 0
    num_calls: int = 0


class CommitMarks:
    """The latest mark of each process of a host, in the memory of its commits.

    >>> file = os.memfd_create("example")
    >>> CommitMarks(file, 1).write(CommitMark(5, WRITTEN, number=2, step=7))
    >>> CommitMarks(file, 0).read(1).step
    7

    Args:
      file: descriptor of the memory.
      number: of the share of this process.
    """

    def __init__(self, file: int, number: int) -> None:
        self._file, self._number = file, number

    def write(self, mark: CommitMark, reason: str = "") -> None:
        """Write the mark of this process, and the reason for which it ends."""
        text = reason.encode(errors="replace")[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0")
        if mark.status == ENDED:
            with contextlib.suppress(OSError):  # out of memory, which may be the reason
                os.pwrite(self._file, text, _REASONS + self._number * _REASON_BYTES)
        data = _MARK.pack(*mark)
        data += zlib.crc32(data).to_bytes(4)
        os.pwrite(self._file, data, MARKS + self._number * _MARK_BYTES)

    def read(self, number: int) -> CommitMark | None:
        """Return the mark of a share; None if it is being written, or there is none yet."""
        data = os.pread(self._file, _MARK_BYTES, MARKS + number * _MARK_BYTES)
        mark, checksum = data[: _MARK.size], data[_MARK.size :]
        is_whole = len(data) == _MARK_BYTES and zlib.crc32(mark).to_bytes(4) == checksum
        return CommitMark(*_MARK.unpack(mark)) if is_whole else None

    def reason(self, number: int) -> str:
        """Return why the process of a share has ended; "" if that is not worth a word."""
        data = os.pread(self._file, _REASON_BYTES, _REASONS + number * _REASON_BYTES)
        return data.rstrip(b"\0").decode(errors="replace")
