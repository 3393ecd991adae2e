"""Dispatches metrics to functions, writers, and trackers such as W&B."""

import contextlib
import csv
import importlib.util
import json
import numbers
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

NEEDS = {"csv": "csv", "mlflow": "mlflow", "tensorboard": "tensorboardX", "wandb": "wandb"}


@dataclass(frozen=True)
class NamedTracker:
    """The arguments of `jdp.tracker`."""

    kind: str
    run: str | None
    config: Mapping[str, Any]
    options: Mapping[str, Any]


def beside(file: Path, what: str) -> Path:
    """Return the path of a file beside a metrics file."""
    return file.with_name(f"{file.name}.{what}")


class RunNote:
    """Metadata of a tracker's run, in a file beside the metrics file.

    Another first line of `file` means another run.

    Attributes:
      last: the last step known in the run, or -1.
      names: tracked sets of metric names.
    """

    def __init__(self, file: Path, kind: str):
        self._file, self._path = file, beside(file, f"{kind}.json")
        found: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError):
            found = json.loads(self._path.read_text())
        is_same = bool(found) and found["begins"] == self._first_line() != ""
        self._id: str | None = found["run"] if is_same else None
        self.last: int = found["last"] if is_same else -1
        self.names = {frozenset(each) for each in found["names"]} if is_same else set()

    def run_id(self, begin: Callable[[], str]) -> str:
        """Return the run's id, or a new one's."""
        if self._id is None:
            self._id = begin()
        return self._id

    def write(self) -> None:
        """Write the metadata; the metrics file has a line by then."""
        names = sorted(map(sorted, self.names))
        found = {"run": self._id, "last": self.last, "names": names}
        part = self._path.with_name(f"{self._path.name}.part")
        part.write_text(json.dumps(found | {"begins": self._first_line()}))
        part.rename(self._path)

    def _first_line(self) -> str:
        with open(self._file) as lines:
            return lines.readline()


class TrackedRun(Protocol):
    """A tracker's run, which resumes the same file's earlier run."""

    def lacking(self, step: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values of a line missing in the resumed run."""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write a step's values."""

    def flush(self) -> None:
        """Write out buffered values."""

    def close(self) -> None:
        """End the run."""


class _Rebuilt:
    """Rebuilt from the metrics file when it resumes."""

    def lacking(self, step: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return values


class _Table(_Rebuilt):
    """A CSV table with a row per line; a new name adds a column."""

    def __init__(self, settings: NamedTracker, file: Path, note: RunNote):
        self._path = beside(file, "csv")
        self._rows: list[dict[str, Any]] = []
        self._names = ["step"]
        self._write()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        row = {"step": step, **values}
        self._rows.append(row)
        if new := [name for name in row if name not in self._names]:
            self._names += new
            self._table.close()
            self._write()
        else:
            self._writer.writerow(row)

    def flush(self) -> None:
        self._table.flush()

    def close(self) -> None:
        self._table.close()

    def _write(self) -> None:
        self._table = open(self._path, "w", newline="")
        self._writer = csv.DictWriter(self._table, self._names)
        self._writer.writeheader()
        self._writer.writerows(self._rows)


class _TensorBoard(_Rebuilt):
    def __init__(self, settings: NamedTracker, file: Path, note: RunNote):
        from tensorboardX import SummaryWriter

        folder = beside(file, "tensorboard") / (settings.run or "")
        for stale in folder.glob("events.out.tfevents.*"):
            stale.unlink()
        self._writer = SummaryWriter(str(folder), **settings.options)
        if settings.config:
            rows = "".join(f"|{name}|{value}|\n" for name, value in settings.config.items())
            self._writer.add_text("config", f"|name|value|\n|---|---|\n{rows}")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in _reals(values):
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, settings: NamedTracker, file: Path, note: RunNote):
        import wandb  # pyrefly: ignore[missing-import]

        self._note = note
        given = {"name": settings.run, "config": dict(settings.config), "dir": str(file.parent)}
        self._run = wandb.init(
            id=note.run_id(lambda: uuid.uuid4().hex[:8]),
            resume="allow",
            **{**given, **settings.options},
        )
        # Offline, W&B does not know the resumed run's steps.
        note.last = max(note.last, self._run.step - 1)

    def lacking(self, step: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return values if step >= self._note.last else {}  # W&B merges a step's values

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(dict(values), step=step)
        self._note.last = step

    def flush(self) -> None:
        """Do nothing: a process of the library writes the values."""

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, settings: NamedTracker, file: Path, note: RunNote):
        import mlflow  # pyrefly: ignore[missing-import]

        self._client, options = mlflow.MlflowClient(), dict(settings.options)
        self._refusals = mlflow.exceptions.MlflowException
        if "experiment" in options:
            name = options.pop("experiment")
            options["experiment_id"] = mlflow.set_experiment(name).experiment_id

        def begin() -> str:
            with mlflow.start_run(run_name=settings.run, **options) as run:
                mlflow.log_params(dict(settings.config))
            return run.info.run_id

        self._id = note.run_id(begin)
        self._client.update_run(self._id, status="RUNNING")
        known = self._client.get_run(self._id).data.metrics
        history = {name: self._client.get_metric_history(self._id, name) for name in known}
        self._last = {name: max(each.step for each in found) for name, found in history.items()}

    def lacking(self, step: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: value for name, value in values.items() if step > self._last.get(name, -1)}

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        refused = None
        for name, value in _reals(values):
            try:
                self._client.log_metric(self._id, name, value, step=step)
            except self._refusals as error:  # such as an invalid name; the others are logged
                refused = error
        if refused is not None:
            raise refused

    def flush(self) -> None:
        """Do nothing: `write` has sent each value."""

    def close(self) -> None:
        self._client.set_terminated(self._id)


BEGIN: dict[str, Callable[[NamedTracker, Path, RunNote], TrackedRun]] = {
    "csv": _Table,
    "mlflow": _MLflow,
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
}


def _reals(values: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(name, float(x)) for name, x in values.items() if isinstance(x, numbers.Real)]


class OwnTracker:
    """A function or writer of the author's, who closes it."""

    def __init__(self, write: Callable[[int, Mapping[str, Any]], Any], writer: Any):
        self.write, self.writer = write, writer
        self.name: str = getattr(writer, "__qualname__", None) or type(writer).__qualname__

    def flush(self) -> None:
        """Flush the writer, if it can."""
        if callable(flush := getattr(self.writer, "flush", None)):
            flush()

    def close(self) -> None:
        """Do nothing."""


class FileTracker:
    """A named tracker's run that mirrors one metrics file."""

    def __init__(self, named: NamedTracker, file: Path):
        self.named, self.name = named, named.kind
        self._note = RunNote(file, named.kind)
        self._run = BEGIN[named.kind](named, file, self._note)
        self._before = [*_in_file(file)]  # by earlier processes
        self._pending: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._is_retry = False

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write a step's values, after lines missing in the run."""
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


Tracker = OwnTracker | FileTracker


class TrackerQueue:
    """Dispatches a file's lines to its trackers, in a thread."""

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
        """Return this file's trackers, and whether a run began."""
        num_runs = len(self._runs)
        with self._opening:
            found = [self._opened(each) for each in given]
            # Not by the writing thread: none can start at the interpreter's end.
            if found and self._thread is None:
                self._thread = threading.Thread(
                    target=self._dispatch, name="jdp track", daemon=True
                )
                self._thread.start()
            return found, len(self._runs) > num_runs

    def _opened(self, given: OwnTracker | NamedTracker) -> Tracker:
        if isinstance(given, OwnTracker):
            if all(each.writer is not given.writer for each in self._own):
                # A function needs no flush, and each call may make another one.
                self._own += [given] if hasattr(given.writer, "flush") else []
            return given
        for each in self._runs:
            if each.named == given:
                return each
        self._runs.append(FileTracker(given, self._file))
        return self._runs[-1]

    def put(self, step: int, values: Mapping[str, Any], trackers: Sequence[Tracker]) -> None:
        """Queue a step's values of the file; in one thread."""
        if trackers:
            self._lines.put((step, values, trackers))

    def flush(self, timeout_s: float) -> bool:
        """Wait until all lines are flushed; return whether they are."""
        return self._for_all(timeout_s, lambda each: each.flush())

    def close(self, timeout_s: float) -> int:
        """Flush, and end the runs; return the number of remaining lines."""
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
        """Raise a tracker's error, once."""
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
    kind: str, *, name: str | None = None, config: Mapping[str, Any] | None = None, **options: Any
) -> NamedTracker:
    """Describe a tracker for `jdp.log(..., also=...)`.

    Process 0 starts the tracker's run with the first metrics. A resumed run resumes the tracker's
    run, and writes the lines of the file that it lacks, so each step is tracked once.

    Args:
      kind: "csv", "mlflow", "tensorboard" (written by the package tensorboardX) or "wandb". For the
        file `metrics.jsonl` the first is `metrics.jsonl.csv`, and the third a folder
        `metrics.jsonl.tensorboard`.
      name: of the run, for people. Default: one that the tracker makes.
      config: hyperparameters by name: numbers, strings and the like.
      **options: of `wandb.init` or `mlflow.start_run`, such as `project="digits"`, or of
        `tensorboardX.SummaryWriter`.

    Raises:
      ValueError: there is no such kind.
      ImportError: its library is not installed.

    >>> tracker("csv").kind
    'csv'
    """
    if kind not in NEEDS:
        raise ValueError(f"tracker must be one of {', '.join(map(repr, NEEDS))}, got {kind!r}.")
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
            f"also={also!r} cannot receive metrics. Pass a function, an object with a method "
            f"add_scalar, or one of {', '.join(map(repr, NEEDS))}."
        )
    return (OwnTracker(also, also),)


def _in_file(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with open(file) as lines:
        for line in lines:
            if not line.endswith("\n"):
                return  # a thread is writing it
            found = json.loads(line)
            values = {name: x for name, x in found.items() if name not in ("step", "time")}
            yield found["step"], {name: _number(x) for name, x in values.items()}


def _number(x: Any) -> Any:
    """Return the float of a string such as "nan", which JSON lacks."""
    return float(x) if isinstance(x, str) and "j" not in x else x
