"""Commits by the processes of a host together, each its share of the values.

All processes begin the same draft, because they see the same records. Each marks its share as
begun, and as written. The process of share 0 waits for all marks, makes the draft a commit, and
marks it; then the others begin the next draft.

A process breaks up if it fails, or finds that another has broken up or writes a share of another
state: it marks itself as ended and writes no more shares until the next life. Then share 0 writes
commits alone. So a marked share is never overwritten while share 0 may still commit it.
"""

import contextlib
import logging
import math
import os
import struct
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from jdp.checkpoint.commit_memory import MARKS, CommitMemory, Draft
from jdp.checkpoint.write_plan import Share

# The fields of `CommitMark`; a checksum follows, since reads may overlap a write.
_MARK = struct.Struct("<QQQQQQ")
_MARK_BYTES = _MARK.size + 4
_REASONS, _REASON_BYTES = MARKS + (1 << 20), 2048

# Share 0 writes WRITTEN once there is a commit. ENDED: it has broken up.
BEGUN, WRITTEN, ENDED = 1, 2, 3


class CommitMark(NamedTuple):
    """A process's share: its status and state.

    Attributes:
      life: checksum of the life's tag, since marks of earlier lives remain.
      form: checksum of the layout.
      num_calls: calls of train steps that led to the state.
    """

    life: int
    status: int
    number: int = 0
    form: int = 0
    step: int = 0
    num_calls: int = 0


class CommitMarks:
    """The latest mark of each process of a host; this one has share `number`."""

    def __init__(self, file: int, number: int) -> None:
        self._file, self._number = file, number

    def write(self, mark: CommitMark, reason: str = "") -> None:
        """Write this process's mark, and why it ends."""
        text = reason.encode(errors="replace")[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0")
        if mark.status == ENDED:
            with contextlib.suppress(OSError):  # out of memory, perhaps
                os.pwrite(self._file, text, _REASONS + self._number * _REASON_BYTES)
        data = _MARK.pack(*mark)
        data += zlib.crc32(data).to_bytes(4)
        os.pwrite(self._file, data, MARKS + self._number * _MARK_BYTES)

    def read(self, number: int) -> CommitMark | None:
        """Return a share's mark; None: none, or being written."""
        data = os.pread(self._file, _MARK_BYTES, MARKS + number * _MARK_BYTES)
        mark, checksum = data[: _MARK.size], data[_MARK.size :]
        is_whole = len(data) == _MARK_BYTES and zlib.crc32(mark).to_bytes(4) == checksum
        return CommitMark(*_MARK.unpack(mark)) if is_whole else None

    def reason(self, number: int) -> str:
        """Return why the process of a share has ended, or ""."""
        data = os.pread(self._file, _REASON_BYTES, _REASONS + number * _REASON_BYTES)
        return data.rstrip(b"\0").decode(errors="replace")


_log = logging.getLogger("jdp")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.005
# Wait for others when this process ends.
_LAST_S = 2.0
# While the training thread waits.
_PATIENCE_S = 30.0
# For one without a commit in this life.
_ABSENT_S = 10.0


class HostCommits:
    """A host's commit memory, as one of its processes uses it.

    Attributes:
      shared: memory of commits written together.
      own: memory of this process alone.
      is_together: whether this process writes shares in this life.
    """

    def __init__(self, file: int, share: Share) -> None:
        self.share, self.shared = share, CommitMemory(file)
        self.own = CommitMemory(file, share.number) if share.number else self.shared
        self.is_together = share.num_shares > 1
        self._marks = CommitMarks(file, share.number)
        self._life = 0
        self._stops_at = self._awaited_at = math.inf
        self._holds_earlier = share.number == 0
        self._was_absent = False

    def begin_life(self, tag: str) -> None:
        """Join the commits of a life of the run."""
        self._life = zlib.crc32(tag.encode())

    def begin(self, num_bytes: int, *, form: int | None) -> Draft | None:
        """Return the memory for a commit's values; None if this process does not write."""
        self._awaited_at = math.inf
        if form is not None and self.share.number:
            # Share 0 marks its end before it looks for this mark.
            if self.is_together:
                self._marks.write(CommitMark(self._life, BEGUN))
                if self._has_ended(0):
                    self._follow(0)
            if not self.is_together:
                return None
        elif form is None and not self.share.number:
            self._wait_for_shares()
        return self.memory(form).begin(num_bytes)._replace(form=form)

    def memory(self, form: int | None) -> CommitMemory:
        """Return where commits of a form are written."""
        return self.own if form is None else self.shared

    def finish(self, draft: Draft, facts: dict[str, Any]) -> bool:
        """Make a draft the latest commit once all its writers have called this."""
        if draft.form is None or self.share.num_shares == 1:
            self.memory(draft.form).finish(draft, facts)
            if self._was_absent and (who := self._who_is_missing()):
                # This state needs a later step of all processes than the awaited commit.
                raise RuntimeError(
                    f"step {facts['step']} is committed without the shares of others.{who}"
                )
            return True
        if not self.is_together:
            return False
        number, step = draft.number, facts["step"]
        mark = CommitMark(self._life, WRITTEN, number, draft.form, step, facts["num_calls"])
        if self.share.number:
            self._marks.write(mark)
            is_answered = self._wait(lambda: self._marks.read(0) == mark or self._has_ended(0))
            return is_answered and self._is_committed(mark)
        if not self._wait(lambda: self._are_written(mark)) or not self.is_together:
            return False
        self.shared.finish(draft, facts)
        self.free_earlier()
        self._marks.write(mark)
        return True

    def break_up(self, why: str = "") -> None:
        """Write no more shares in this life."""
        if self.is_together:
            self.is_together = False
            self._marks.write(CommitMark(self._life, ENDED), why)

    def free_earlier(self, num_areas: int = 1) -> None:
        """Free the areas of earlier lives but the first ones, once, on the process of share 0.

        Call it after a commit of this life, before other processes may write to their areas.
        """
        if self._holds_earlier:
            self.own.free_areas(num_areas)
            self._holds_earlier = False

    def stop_waiting(self) -> None:
        """From now on wait only briefly, since this process ends."""
        self._stops_at = time.monotonic() + _LAST_S

    def hurry(self) -> None:
        """From now on limit waits: the training thread waits."""
        self._awaited_at = min(self._awaited_at, time.monotonic())

    # All other shares are written, or this process has broken up.
    def _are_written(self, mine: CommitMark) -> bool:
        are_written = True
        for number in range(1, self.share.num_shares):
            mark = self._marks.read(number)
            if self._has_ended(number):
                self._follow(number)
                return True
            if mark is None or (mark.life, mark.status) != (self._life, WRITTEN):
                are_written = False
            elif mark != mine and mark.number == mine.number:
                self._end(_difference(number, mark, mine))
                return True
            are_written = are_written and mark == mine
        return are_written

    # Share 0 has committed this draft, or marked something later.
    def _is_committed(self, mine: CommitMark) -> bool:
        if self._marks.read(0) == mine:
            return True
        found = [commit.facts for commit in self.shared.intact() if commit.number == mine.number]
        self._follow(0)
        return any(facts["step"] == mine.step for facts in found)

    def _has_ended(self, number: int) -> bool:
        mark = self._marks.read(number)
        return mark is not None and (mark.life, mark.status) == (self._life, ENDED)

    def _follow(self, number: int) -> None:
        self._end(self._marks.reason(number))

    def _end(self, why: str) -> None:
        if self.is_together and why:
            _log.warning(
                "jdp: until the next recovery only the process with local rank 0 writes the "
                "commits of this host: %s",
                why,
            )
        self.break_up(why)

    # The others see that this process has ended, and begin no more.
    def _wait_for_shares(self) -> None:
        end = time.monotonic() + _PATIENCE_S
        numbers = range(1, self.share.num_shares)
        while any(self._marks.read(number) == CommitMark(self._life, BEGUN) for number in numbers):
            if time.monotonic() > end:
                raise RuntimeError(
                    "a process of this host did not write its share of an earlier commit within "
                    f"{_PATIENCE_S:g} s, and still uses its memory. The commit before it is "
                    "intact."
                )
            time.sleep(_LONGEST_PAUSE_S)

    # False if this process ends first, or waited too long.
    def _wait(self, is_done: Callable[[], bool]) -> bool:
        began, pause = time.monotonic(), _FIRST_PAUSE_S
        while not is_done():
            now = time.monotonic()
            if now > self._stops_at or not self.is_together:
                return False
            waited_s = now - max(began, self._awaited_at)
            limit_s = min(_ABSENT_S, _PATIENCE_S)
            who = self._who_is_missing() if waited_s > limit_s else ""
            self._was_absent = bool(who)
            limit_s = limit_s if who else _PATIENCE_S
            if waited_s > limit_s:
                self._end(
                    f"the process with local rank {self.share.number} waited {limit_s:g} s for "
                    f"the shares of others, which blocked its training.{who}"
                )
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return True

    def _who_is_missing(self) -> str:
        """Return a sentence about a process without a commit in this life, or ""."""
        marks = [self._marks.read(number) for number in range(self.share.num_shares)]
        for number, mark in enumerate(marks):
            if number != self.share.number and (mark is None or mark.life != self._life):
                return (
                    f" The process with local rank {number} began no share: call "
                    "ckpt.step(state, batches) on every process, not below `if "
                    "jax.process_index() == 0`."
                )
        return ""


def _difference(number: int, mark: CommitMark, own: CommitMark) -> str:
    who = f"that with local rank {number}"
    if (mark.step, mark.num_calls) == (own.step, own.num_calls):
        return (
            f"{who} commits a state with other leaves at step {mark.step}. Paths, shapes, dtypes "
            "and placement on the whole mesh must be equal on all processes."
        )
    return (
        f"{who} commits step {mark.step} after {mark.num_calls} calls of its train steps, and "
        f"local rank 0 step {own.step} after {own.num_calls}. All processes must call ckpt.step "
        "after each step, and continue after the same errors."
    )
