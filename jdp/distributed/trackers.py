"""Dispatch the metrics of a run to functions, writers, and trackers such as W&B."""

import importlib.util
import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jdp.distributed.tracker_kinds import BEGIN, NEEDS, NamedTracker, RunNote


class OwnTracker:
    """A function or writer of the author's, who closes it."""

    def __init__(self, write: Callable[[int, Mapping[str, Any]], Any], writer: Any):
        self.write, self.writer = write, writer
        self.name: str = getattr(writer, "__qualname__", None) or type(writer).__qualname__

    def flush(self) -> None:
        """Flush the writer, if it has a method for it."""
        if callable(flush := getattr(self.writer, "flush", None)):
            flush()

    def close(self) -> None:
        """Do nothing."""


class FileTracker:
    """The run of a named tracker that mirrors one file of metrics."""

    def __init__(self, named: NamedTracker, file: Path):
        self.named, self.name = named, named.kind
        self._note = RunNote(file, named.kind)
        self._run = BEGIN[named.kind](named, file, self._note)
        self._before = [*_in_file(file)]  # written by earlier processes
        self._pending: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._is_retry = False

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the values of a step; the first call also writes lines that the run lacks."""
        if frozenset(values) not in self._note.names:
            self._note.names.add(frozenset(values))
            self._note.write()
        for each, found in self._before:
            if frozenset(found) in self._note.names:
                if lacking := self._run.lacking(each, found):
                    self._pending.append((each, lacking))
        self._before = []
        self._pending.append((step, values))
        self._write_pending()

    def _write_pending(self) -> None:
        while self._pending:
            try:
                self._run.write(*self._pending[0])
            except Exception:
                if self._is_retry:
                    self._pending.popleft()
                self._is_retry = not self._is_retry
                raise
            self._is_retry = False
            self._pending.popleft()

    def flush(self) -> None:
        """Retry failed lines, and write out buffered values."""
        self._write_pending()
        self._run.flush()
        self._note.write()

    def close(self) -> None:
        """End the run."""
        self._run.close()


# Both have a name, and receive lines by `write`, `flush` and `close`.
Tracker = OwnTracker | FileTracker


class TrackerQueue:
    """Dispatches the lines of one file of metrics to its trackers, in a thread of its own."""

    def __init__(self, file: Path):
        self._file = file
        self._runs: list[FileTracker] = []
        self._own: list[OwnTracker] = []
        self._lines: queue.Queue[Any] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._opening = threading.Lock()  # held while runs begin
        self._writing = threading.Lock()  # held while a tracker is called
        self._error: BaseException | None = None

    def opened(self, given: Sequence[OwnTracker | NamedTracker]) -> tuple[list[Tracker], bool]:
        """Return the trackers of this file, and whether a run began, in the caller's thread."""
        num_runs = len(self._runs)
        with self._opening:
            found = [self._opened(each) for each in given]
            # Not by the thread that writes: at the end of the interpreter no thread can start.
            if found and self._thread is None:
                self._thread = threading.Thread(
                    target=self._dispatch, name="jdp track", daemon=True
                )
                self._thread.start()
            return found, len(self._runs) > num_runs

    def _opened(self, given: OwnTracker | NamedTracker) -> Tracker:
        if isinstance(given, OwnTracker):
            if all(each.writer is not given.writer for each in self._own):
                # A function has nothing to flush, and each call may make another one.
                self._own += [given] if hasattr(given.writer, "flush") else []
            return given
        for each in self._runs:
            if each.named == given:
                return each
        self._runs.append(FileTracker(given, self._file))
        return self._runs[-1]

    def put(self, step: int, values: Mapping[str, Any], trackers: Sequence[Tracker]) -> None:
        """Queue the values of a step, which the file has; called in one thread."""
        if trackers:
            self._lines.put((step, values, trackers))

    def flush(self, timeout_s: float) -> bool:
        """Wait until all lines are dispatched and flushed; return whether they are."""
        return self._for_all(timeout_s, lambda each: each.flush())

    def close(self, timeout_s: float) -> int:
        """Flush, and end the runs; return the number of lines that are left."""
        if self.flush(timeout_s):
            self._for_all(timeout_s, lambda each: each.close())
        return self._lines.unfinished_tasks

    def _for_all(self, timeout_s: float, call: Callable[[Tracker], None]) -> bool:
        end = time.monotonic() + timeout_s
        with self._lines.all_tasks_done:
            while self._lines.unfinished_tasks and (left := end - time.monotonic()) > 0:
                self._lines.all_tasks_done.wait(left)
        if self._lines.unfinished_tasks:
            return False
        if not self._writing.acquire(timeout=max(0.0, end - time.monotonic())):
            return False
        try:
            for each in (*self._runs, *self._own):
                try:
                    call(each)
                except Exception as error:  # raised by the next call
                    self._error = error
        finally:
            self._writing.release()
        return True

    def raise_error(self) -> None:
        """Raise the error of a tracker, once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _dispatch(self) -> None:
        while True:
            step, values, trackers = self._lines.get()
            for each in trackers:
                try:
                    with self._writing:
                        each.write(step, values)
                except BaseException as error:  # raised by the next call
                    failed = RuntimeError(
                        f"also={each.name} failed at step {step}: {type(error).__name__}: {error} "
                        f"The metrics are in {self._file}."
                    )
                    failed.__cause__ = error
                    self._error = failed
            self._lines.task_done()


def tracker(
    kind: str,
    *,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> NamedTracker:
    """Describe a tracker for `jdp.log(..., also=...)`.

    Process 0 starts the tracker's run with the first metrics. A resumed run resumes the tracker's
    run, and writes the lines of the file that it lacks, so each step is tracked once.

    Args:
      kind: "csv", "mlflow", "tensorboard" (written by the package tensorboardX) or "wandb". For
        the file `metrics.jsonl` the first is `metrics.jsonl.csv`, and the third a folder
        `metrics.jsonl.tensorboard`.
      name: of the run, for people. Default: one that the tracker makes.
      config: hyperparameters by name: numbers, texts and the like.
      **options: of `wandb.init` or `mlflow.start_run`, such as `project="digits"`, or of
        `tensorboardX.SummaryWriter`.

    Raises:
      ValueError: if there is no such kind.
      ImportError: if its library is not installed.

    >>> tracker("csv").kind
    'csv'
    """
    if kind not in NEEDS:
        raise ValueError(f"tracker({kind!r}): write one of {', '.join(map(repr, NEEDS))}.")
    if importlib.util.find_spec(NEEDS[kind]) is None:
        raise ImportError(
            f"the tracker {kind!r} needs a package that is not installed: pip install {NEEDS[kind]}"
        )
    return NamedTracker(kind, name, dict(config or {}), options)


def trackers_of(also: Any) -> Sequence[OwnTracker | NamedTracker]:
    """Return the trackers in the `also` of `jdp.log`."""
    if also is None:
        return ()
    if isinstance(also, (list, tuple)):
        return [found for each in also for found in trackers_of(each)]
    if isinstance(also, NamedTracker):
        return (also,)
    if isinstance(also, str):
        return (tracker(also),)
    if callable(add := getattr(also, "add_scalar", None)):

        def add_all(step: int, values: Mapping[str, Any]) -> None:
            for each, value in values.items():
                add(each, value, step)

        return (OwnTracker(add_all, also),)
    if not callable(also):
        raise TypeError(
            f"also={also!r} cannot receive metrics. Give a function, an object with a method "
            f"add_scalar, or one of {', '.join(map(repr, NEEDS))}."
        )
    return (OwnTracker(also, also),)


def _in_file(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the step and values of each line of a file of metrics."""
    with open(file) as lines:
        for line in lines:
            if not line.endswith("\n"):
                return  # a thread is writing it
            found = json.loads(line)
            values = {name: x for name, x in found.items() if name not in ("step", "time")}
            yield found["step"], {name: _number(x) for name, x in values.items()}


def _number(x: Any) -> Any:
    """Return the float of a text such as "nan", which JSON has no number for."""
    return float(x) if isinstance(x, str) and "j" not in x else x
