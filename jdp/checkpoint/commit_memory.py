"""The last commit, in host memory that outlives the processes that write it.

The memory is an anonymous file of the launcher, with two records of commits on its first page. A
write clears the older commit's record, writes values and facts, then the new record. So at any
death of the writer, at least one record describes an intact commit.
"""

import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# Magic, which changes with the format; commit number, higher in the newer; offset of the values;
# bytes of the facts, and of the values; checksum of these fields and the facts.
_RECORD = struct.Struct("<16sQQQQI")
_MAGIC = b"jdp commit 2".ljust(16, b"\0")
_PAGE_BYTES = 4096
_ALIGNMENT = 64
# The file is sparse. An area holds the records, each commit's facts, and the values.
_AREA_BYTES = 1 << 42
_FACTS_BYTES = 1 << 30
MARKS = 3 << 30  # between facts and values, for `host_commits.py`
_VALUES = 1 << 32
# Offset of the values in their page: at a multiple of 64 JAX on CPUs would alias them.
_SHIFT_BYTES = 16


class Commit(NamedTuple):
    """An intact commit."""

    number: int
    start: int  # of its values, in the area
    text: bytes
    num_bytes: int

    @property
    def facts(self) -> dict[str, Any]:
        """The facts written with the values."""
        return json.loads(self.text)


class Draft(NamedTuple):
    """A commit being written."""

    slot: int
    number: int
    start: int
    values: np.ndarray  # [num_bytes] uint8, the memory itself
    form: int | None = None  # of `HostCommits.begin`


class CommitMemory:
    """Two commits in an area of a file; only the older is overwritten.

    Processes with shards each have an area; several may write a commit together. Any process may
    read while none writes. The file starts empty.
    """

    def __init__(self, file: int, area: int = 0) -> None:
        self._file, self._base = file, area * _AREA_BYTES
        self._mapped = np.empty(0, np.uint8)

    @property
    def name(self) -> str:
        """The file's name, which no other file of any host has."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.fstat(self._file).st_ino}"

    def areas(self) -> "list[CommitMemory]":
        """Return all of the file's areas."""
        num_areas = -(-os.fstat(self._file).st_size // _AREA_BYTES)
        return [CommitMemory(self._file, area) for area in range(num_areas)]

    def intact(self) -> list[Commit]:
        """Return the intact commits."""
        return [commit for slot in (0, 1) if (commit := self._commit(slot))]

    def latest(self, accepts: Callable[[dict[str, Any]], bool] | None = None) -> Commit | None:
        """Return the latest intact commit with accepted facts."""
        found = [each for each in self.intact() if accepts is None or accepts(each.facts)]
        return max(found, default=None, key=lambda commit: commit.number)

    def forget(self, accepts: Callable[[dict[str, Any]], bool]) -> None:
        """Clear the records of commits with accepted facts."""
        for slot in (0, 1):
            found = self._commit(slot)
            if found is not None and accepts(found.facts):
                _write(self._file, bytes(_RECORD.size), self._base + slot * _RECORD.size)

    def free_areas(self, num_areas: int) -> None:
        """Free the memory of all areas but the first `num_areas`."""
        if os.fstat(self._file).st_size > num_areas * _AREA_BYTES:
            os.ftruncate(self._file, num_areas * _AREA_BYTES)

    def read(self, commit: Commit, first: int = 0, num_bytes: int | None = None) -> np.ndarray:
        """Copy values of a commit, `[num_bytes]` uint8, from byte `first`; default: all."""
        num_bytes = commit.num_bytes - first if num_bytes is None else num_bytes
        # Aligned, so JAX on CPU needs no copy.
        room = np.empty(num_bytes + _ALIGNMENT, np.uint8)
        skipped = -room.ctypes.data % _ALIGNMENT
        data = room[skipped : skipped + num_bytes]
        start, done = self._base + commit.start + first, 0
        while done < data.size:
            count = os.preadv(self._file, [data[done:].data], start + done)
            if not count:
                raise OSError(f"the commit memory ends after {done} of {data.size} bytes.")
            done += count
        return data

    def view(self, commit: Commit) -> np.ndarray:
        """Return a commit's values, `[num_bytes]` uint8, read-only, until it is overwritten."""
        if not commit.num_bytes:
            return np.empty(0, np.uint8)
        first = self._base + commit.start
        skipped = first % mmap.ALLOCATIONGRANULARITY
        size = skipped + commit.num_bytes
        mapped = mmap.mmap(self._file, size, prot=mmap.PROT_READ, offset=first - skipped)
        return np.frombuffer(mapped, np.uint8)[skipped:]

    def write(self, facts: dict[str, Any], parts: Sequence[np.ndarray]) -> None:
        """Write a commit of values, each `[bytes]` uint8, over the older one."""
        draft, at = self.begin(sum(part.size for part in parts)), 0
        for part in parts:
            np.copyto(draft.values[at : at + part.size], part)
            at += part.size
        self.finish(draft, facts)

    def begin(self, num_bytes: int) -> Draft:
        """Return the memory for a commit's values, over the older one."""
        commits = [self._commit(slot) for slot in (0, 1)]
        numbers = [0 if commit is None else commit.number for commit in commits]
        slot = numbers.index(min(numbers))
        start = _room(commits[1 - slot], num_bytes)
        self._make_room(start + num_bytes)
        _write(self._file, bytes(_RECORD.size), self._base + slot * _RECORD.size)
        first = start - _VALUES
        values = self._mapped[first : first + num_bytes]
        return Draft(slot, max(numbers) + 1, start, values)

    def finish(self, draft: Draft, facts: dict[str, Any]) -> None:
        """Make a completely written draft the latest commit."""
        text = json.dumps(facts).encode()
        assert len(text) <= _FACTS_BYTES, len(text)
        _write(self._file, text, self._base + _facts_at(draft.slot))
        fields = _MAGIC, draft.number, draft.start, len(text), draft.values.size
        record = _RECORD.pack(*fields, _checksum(fields, text))
        _write(self._file, record, self._base + draft.slot * _RECORD.size)

    def reserve(self, num_bytes: int, own: slice = slice(None)) -> None:
        """Allocate two commits, and map the bytes written by this process."""
        next_one = Commit(0, _room(self.latest(), num_bytes), b"", num_bytes)
        last = max(next_one.start, _room(next_one, num_bytes))
        self._make_room(last + num_bytes)
        # Reading a page maps it and keeps the commits.
        for start in {next_one.start - _VALUES, last - _VALUES}:
            np.max(self._mapped[start : start + num_bytes][own][::_PAGE_BYTES], initial=0)

    # Storing into a mapping is faster than a write call, and raises SIGBUS when the host is out of
    # memory, so all pages are allocated first.
    def _make_room(self, stop: int) -> None:
        num_bytes, start = stop - _VALUES, self._base + _VALUES
        if num_bytes > self._mapped.size:
            os.posix_fallocate(self._file, start, num_bytes)
            mapped = mmap.mmap(self._file, num_bytes, offset=start)
            self._mapped = np.frombuffer(mapped, np.uint8)
        elif num_bytes and os.fstat(self._file).st_size < start + num_bytes:
            # The host's first process has freed the area.
            os.posix_fallocate(self._file, start, self._mapped.size)

    def _commit(self, slot: int) -> Commit | None:
        record = os.pread(self._file, _RECORD.size, self._base + slot * _RECORD.size)
        if len(record) < _RECORD.size:
            return None
        *fields, checksum = _RECORD.unpack(record)
        magic, number, start, text_bytes, num_bytes = fields
        if magic != _MAGIC:
            return None
        text = os.pread(self._file, text_bytes, self._base + _facts_at(slot))
        if checksum != _checksum(fields, text):
            return None
        return Commit(number, start, text, num_bytes)


def _checksum(fields: Sequence[Any], text: bytes) -> int:
    return zlib.crc32(text, zlib.crc32(_RECORD.pack(*fields, 0)))


def _facts_at(slot: int) -> int:
    return _PAGE_BYTES + slot * _FACTS_BYTES


# Offset before or after the values to keep. Commits of equal size alternate between the two.
def _room(stays: Commit | None, num_bytes: int) -> int:
    first = _VALUES + (_SHIFT_BYTES if num_bytes else 0)  # empty values need no memory
    if stays is None or first + num_bytes <= stays.start:
        return first
    stop = stays.start + stays.num_bytes
    return stop + -stop % _PAGE_BYTES + first - _VALUES


def _write(file: int, data: bytes, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], start + done)
