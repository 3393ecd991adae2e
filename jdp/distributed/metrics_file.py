"""A metrics file, written by a thread while the steps run."""

import contextlib
import errno
import fcntl
import io
import json
import logging
import math
import os
import queue
import shutil
import stat
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jdp import jax_compat
from jdp.distributed import this_process
from jdp.distributed.trackers import NamedTracker, OwnTracker, Tracker, TrackerQueue
from jdp.pytrees import is_deleted
from jdp.worker import launcher_client
from jdp.worker.launcher_client import Assignment
from jdp.worker.progress import own

# The run's id, in `metrics.jsonl.run`, so no run continues another's file. In the file itself it
# would be a row without a step.
_claimed: set[Path] = set()


def may_continue(path: Path, *, is_later: bool) -> bool:
    """Whether this run may append to a file with lines.

    A new run may not, whatever its first step; its later generations may append to its own file.
    Without `jdp run` there is no id, and the script may keep its own checkpoints: it may append if
    it begins later than the file.
    """
    assigned = _assignment()
    if launcher_client.is_asked_to_resume():
        return True
    if assigned is None:
        return is_later or this_process.current.has_restored
    if assigned.generation == 0:
        return assigned.resumes or this_process.current.has_restored or path in _claimed
    return _owner(path) == assigned.run_id


def claim(path: Path) -> None:
    """Record that a file belongs to this run."""
    _claimed.add(path)
    assigned = _assignment()
    if assigned is None or _owner(path) == assigned.run_id:
        return
    # Renamed, so a death leaves all of it or no file.
    part = path.with_name(f"{path.name}.run.part")
    part.write_text(assigned.run_id)
    part.rename(_owner_file(path))


def _assignment() -> Assignment | None:
    member = launcher_client.current()
    return None if member is None else member.assignment


def _owner(path: Path) -> str | None:
    try:
        return _owner_file(path).read_text(errors="replace")  # of no run, if damaged
    except FileNotFoundError:
        return None


def _owner_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.run")


_log = logging.getLogger("jdp")

# Lines that wait for their steps; only a slow disk makes more wait.
_MAX_WAITING = 1000
_END_S = 10.0
# Between attempts to write a line, and until an error.
_RETRY_S, _PATIENCE_S = 0.2, 10.0
# A killed process may still be exiting.
_LOCK_S = 5.0
# File systems without locks, such as Lustre without -o flock.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
_REPEATED = (
    "jdp: the metrics of step %d are not written to %s, which already has metrics up to step %d. "
    "Count steps over all epochs, as `state.step` and `checkpointer.steps` do."
)
OWN_NAMES = ("step", "time")
# The progress line's metrics, and users' names for them.
_SHOWN = {
    "loss": ("train/loss", "loss"),
    "learning_rate": ("lr", "learning_rate"),
    "gradient_norm": ("grad_norm", "gradient_norm"),
}
# The launcher reads the step plus one in 8 bytes; TensorBoard has as many.
MAX_STEP = 2**63 - 1

# A forked child closes these, since it may outlive this process and its locks.
_open: weakref.WeakSet[io.FileIO] = weakref.WeakSet()


def _close_in_child() -> None:
    for file in _open:
        file.close()


os.register_at_fork(after_in_child=_close_in_child)


class MetricsFile:
    """A metrics file, and the thread that writes it."""

    def __init__(self, path: Path, first_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file, self._last = _opened(path, first_step)
        self._own: set[frozenset[str]] = set()  # names of lines of this process
        self._has_warned = False
        self._error: BaseException | None = None
        self._refusal: OSError | None = None  # of the line being retried
        self._refused_at = 0.0
        self._tracked = TrackerQueue(path)
        self._is_over = threading.Event()
        self._lines: queue.Queue[Any] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._write_lines, name="jdp log", daemon=True)
        self._thread.start()

    def put(self, step: int, scalars: dict[str, Any], trackers: Sequence[Tracker] = ()) -> None:
        """Queue a line that the file lacks; raise the error of an earlier one, which is retried."""
        self.raise_error()
        names = frozenset(scalars)
        if step <= self._last.get(names, -1):
            if names in self._own and not self._has_warned:
                self._has_warned = True
                _log.warning(_REPEATED, step, self._path, self._last[names])
            return
        self._own.add(names)
        for value in scalars.values():
            if isinstance(value, jax.Array):
                jax_compat.start_copy_to_host(value)
        line = (step, time.time(), scalars, trackers)
        self._last[names] = step
        while not self._has_put(line):
            try:
                self._raise_refusal(_PATIENCE_S)
            except OSError:
                self._last[names] = step - 1
                raise
        self._raise_refusal(_PATIENCE_S)

    def opened(self, given: Sequence[OwnTracker | NamedTracker]) -> tuple[Sequence[Tracker], bool]:
        """Return this file's trackers, and whether a run began."""
        return self._tracked.opened(given)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all lines are written; return whether they are."""
        end = time.monotonic() + timeout_s
        with self._lines.all_tasks_done:
            while self._lines.unfinished_tasks and (left := end - time.monotonic()) > 0:
                self._lines.all_tasks_done.wait(left)
        self._raise_refusal(0.0)
        return not self._lines.unfinished_tasks

    def flush_trackers(self, timeout_s: float) -> bool:
        """Wait until trackers have all lines; return whether they have."""
        return self._tracked.flush(timeout_s)

    def end_thread(self) -> None:
        """End the thread after all lines; log an unraised error."""
        with contextlib.suppress(OSError):
            self.flush(_END_S)
        hangs = self._lines.unfinished_tasks and self._refusal is None
        self._is_over.set()  # a line is tried once more
        self._has_put(None)  # the thread then closes the file
        if hangs:
            left = self._lines.unfinished_tasks
            _log.error("jdp: %d lines of %s are missing: a step still runs.", left, self._path)
        else:
            self._thread.join(_END_S)
        if left := self._tracked.close(_END_S):
            _log.error("jdp: %d lines of %s did not reach also= in time.", left, self._path)
        if self._error is not None:
            _log.error("jdp: lines of %s are missing: %s", self._path, self._error)
        try:
            self._tracked.raise_error()
        except Exception as error:
            _log.error("jdp: %s", error)

    def raise_error(self) -> None:
        """Raise the error of an earlier line, or of a tracker, once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        self._tracked.raise_error()

    def _has_put(self, line: Any) -> bool:
        with contextlib.suppress(queue.Full):
            self._lines.put(line, timeout=_RETRY_S)
            return True
        return False

    def _raise_refusal(self, after_s: float) -> None:
        refusal = self._refusal
        if refusal is not None and time.monotonic() - self._refused_at >= after_s:
            raise refusal

    def _write_lines(self) -> None:
        try:
            while (line := self._lines.get()) is not None:
                try:
                    self._write(*line)
                except BaseException as error:  # raised by the next call
                    self._error = error
                finally:
                    self._lines.task_done()
        finally:
            self._file.close()

    def _write(
        self, step: int, at: float, scalars: dict[str, Any], trackers: Sequence[Tracker]
    ) -> None:
        try:
            values = {name: _number(value) for name, value in scalars.items()}
        except RuntimeError:
            if gone := [name for name, value in scalars.items() if is_deleted(value)]:
                raise ValueError(
                    f"metrics[{gone[0]!r}] of step {step} was donated before it was written, so "
                    "the line is missing. Pass a copy to jdp.log: jnp.copy(x)."
                ) from None
            # The step failed; its next call raises the error.
            self._last[frozenset(scalars)] = step - 1
            return
        line = {"step": step, "time": round(at, 3)} | {k: _in_json(v) for k, v in values.items()}
        text = json.dumps(line).encode() + b"\n"
        while not self._has_appended(step, text):
            if self._is_over.is_set() and self._refusal is not None:
                raise self._refusal
            self._is_over.wait(_RETRY_S)
        _show_loss(step, values)
        self._tracked.put(step, values, trackers)

    def _has_appended(self, step: int, text: bytes) -> bool:
        try:
            if not _is_at(self._file, self._path):  # the file was moved away
                self._file.close()
                self._file, _ = _opened(self._path, step)
            _append(self._file, text)
        except OSError as error:
            if self._refusal is None:
                self._refused_at = time.monotonic()
                _log.warning("jdp: %s", _refused(self._path, error))
            self._refusal = _refused(self._path, error)
            return False
        self._refusal = None
        return True


# Return the file, and the last step of each set of metric names.
def _opened(path: Path, first_step: int) -> tuple[io.FileIO, dict[frozenset[str], int]]:
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "ab", buffering=0))
        _open.add(file)
        found = {}
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # not /dev/null
            _lock(file, path)
            found = _read(file, path, first_step)
            claim(path)
        stack.pop_all()
        return file, found


def _lock(file: io.FileIO, path: Path) -> None:
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{path} is in use by another run. Write jdp.log(..., file=...) with another "
                    "file."
                ) from None
            time.sleep(0.02)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return _log.warning(
                "jdp: %s cannot be locked (%s), so jdp would not detect another run that writes "
                "it. Use one file per run.",
                *(path, error.strerror),
            )


# Drops a line left incomplete by a killed process.
def _read(file: io.FileIO, path: Path, first_step: int) -> dict[frozenset[str], int]:
    last: dict[frozenset[str], int] = {}
    begins_at, end = None, 0
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break
            end += len(line)
            try:
                values = json.loads(line)
                step, names = values["step"], frozenset(values) - {*OWN_NAMES}
                if type(step) is not int or not 0 <= step < MAX_STEP:
                    raise ValueError
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ValueError(
                    f"line {number} of {path} is not a line of metrics. Write jdp.log(..., "
                    "file=...) with another file."
                ) from None
            last[names] = max(step, last.get(names, step))
            begins_at = step if begins_at is None else begins_at
    is_later = begins_at is None or first_step > begins_at
    if begins_at is not None and not may_continue(path, is_later=is_later):
        raise ValueError(
            f"{path} holds the metrics of an earlier run, up to step {max(last.values())}, but "
            f"the first line of this run is of step {first_step}. Move the file away, write "
            "jdp.log(..., file=...) with another one, or continue that run with --resume or "
            "JDP_RESUME=1."
        )
    file.truncate(end)
    return last


# `jdp run` shows the loss.
def _show_loss(step: int, values: dict[str, Any]) -> None:
    found = {
        shown: values[name]
        for shown, names in _SHOWN.items()
        for name in names
        if isinstance(values.get(name), int | float)
    }
    if found:
        own.slot.counter.write_metrics(step, **found)


def _is_at(file: io.FileIO, path: Path) -> bool:
    if file.closed:
        return False
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _refused(path: Path, error: OSError) -> OSError:
    try:
        free = f"{shutil.disk_usage(path.parent).free} bytes are free there"
    except OSError as missing:
        free = str(missing)
    return OSError(
        f"a line of {path} cannot be written, and {free}. Error of the disk: {error}. Lines are "
        "kept and retried until the process ends. Free space, or write jdp.log(..., file=...) "
        "elsewhere."
    )


# All of a line, or on a full disk nothing: a part is unreadable.
def _append(file: io.FileIO, line: bytes) -> None:
    done = 0
    try:
        while done < len(line):
            done += file.write(line[done:])
    except OSError:
        if done:
            file.truncate(os.fstat(file.fileno()).st_size - done)
        raise


def _number(value: Any) -> Any:
    found = np.asarray(value)
    # An item of a wide dtype is NumPy's, not Python's.
    for kind, convert in ((np.floating, float), (np.complexfloating, complex)):
        if jax.numpy.issubdtype(found.dtype, kind):
            return convert(found.item())
    return found.item()


def _in_json(value: Any) -> Any:
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value
