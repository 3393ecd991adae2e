"""What gets the metrics of a run besides their file: functions, writers, and trackers by name."""

import importlib.util
import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jdp.distributed.tracker_kinds import BEGIN, NEEDS, RunNote, Settings


class Tracker(Protocol):
    """Something that takes the metrics of a run, one call at a time."""

    @property
    def name(self) -> str:
        """The name, for errors."""

    @property
    def is_kept(self) -> bool:
        """Whether it holds lines, which `flush` brings to the disk."""

    def of_file(self, file: Path) -> "Tracker":
        """Return the tracker for one file of metrics, and begin its run."""

    def take(self, step: int, values: Mapping[str, Any]) -> None:
        """Take the values of a step."""

    def flush(self) -> None:
        """Bring to the disk, or to a service, what it still holds."""

    def close(self) -> None:
        """End its run."""


@dataclass(frozen=True)
class OwnTracker:
    """A function or a writer of the author's, who closes it.

    Attributes:
      name: for errors.
      write: takes a step and its values by name.
      writer: the writer, or the function.
    """

    name: str
    write: Callable[[int, Mapping[str, Any]], Any]
    writer: Any

    def take(self, step: int, values: Mapping[str, Any]) -> None:
        """Take the values of a step."""
        self.write(step, values)

    @property
    def is_kept(self) -> bool:
        """Whether it has a method `flush`."""
        return callable(getattr(self.writer, "flush", None))

    def of_file(self, file: Path) -> "OwnTracker":
        """Return itself."""
        return self

    def flush(self) -> None:
        """Bring to the disk what a writer still holds."""
        if self.is_kept:
            self.writer.flush()

    def close(self) -> None:
        """Do nothing."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnTracker) and self.writer is other.writer

    __hash__ = None  # type: ignore[assignment]


class NamedTracker:
    """A tracker by its name, see `tracker`."""

    is_kept = True

    def __init__(self, settings: Settings):
        self._settings = settings

    @property
    def name(self) -> str:
        """The name, for errors."""
        return self._settings.kind

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedTracker) and self._settings == other._settings

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        kind, name, config, options = self._settings
        given = {"name": name, "config": config, **options}
        words = "".join(f", {key}={value!r}" for key, value in given.items() if value)
        return f"jdp.tracker({kind!r}{words})"

    def of_file(self, file: Path) -> "TrackerOfFile":
        """Return the tracker for one file of metrics, and begin or continue its run."""
        return TrackerOfFile(self._settings, file)

    def take(self, step: int, values: Mapping[str, Any]) -> None:
        """Refuse values that are of no file."""
        raise TypeError("a tracker takes metrics by jdp.log(..., also=tracker)")

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class TrackerOfFile(NamedTracker):
    """A tracker whose run has the lines of one file."""

    def __init__(self, settings: Settings, file: Path):
        super().__init__(settings)
        self._note = RunNote(file, settings.kind)
        self._run = BEGIN[settings.kind](settings, file, self._note)
        self._before = [*_in_file(file)]  # lines of processes before this one
        self._left: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._has_failed = False

    def take(self, step: int, values: Mapping[str, Any]) -> None:
        """Take the values of a step, the first time after those that the run lacks."""
        if frozenset(values) not in self._note.names:
            self._note.names.add(frozenset(values))
            self._note.write()
        for each, found in self._before:
            if frozenset(found) in self._note.names:
                if lacking := self._run.lacking(each, found):
                    self._left.append((each, lacking))
        self._before = []
        self._left.append((step, values))
        self._take_left()

    def _take_left(self) -> None:
        while self._left:
            try:
                self._run.take(*self._left[0])
            except Exception:
                if self._has_failed:  # twice
                    self._left.popleft()
                self._has_failed = not self._has_failed
                raise
            self._has_failed = False
            self._left.popleft()

    def flush(self) -> None:
        """Bring to the disk, or to a service, what it still holds."""
        self._take_left()
        self._run.flush()
        self._note.write()

    def close(self) -> None:
        """End its run."""
        self._run.close()


# Called when a run has begun: its library may have registered what ends it as Python ends.
after_begin: list[Callable[[], None]] = []


class HandOut:
    """Hands the lines of a file of metrics to its trackers, in a thread of its own."""

    def __init__(self, file: Path):
        self._file = file
        self._trackers: list[Tracker] = []
        self._lines: queue.Queue[Any] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def known(self, trackers: Sequence[Tracker]) -> list[Tracker]:
        """Return the trackers of this file that are equal to some, in the caller's thread.

        A call may make trackers of its own. The run of a new one begins.
        """
        return [self._of_file(each) if each.is_kept else each for each in trackers]

    def _of_file(self, tracker: Tracker) -> Tracker:
        for each in self._trackers:
            if each == tracker:
                return each
        self._trackers.append(tracker.of_file(self._file))
        for call in after_begin:
            call()
        return self._trackers[-1]

    def put(self, step: int, values: Mapping[str, Any], trackers: Sequence[Tracker]) -> None:
        """Have the thread hand out the values of a step, which the file has."""
        if not trackers:
            return
        self._lines.put((step, values, trackers))
        if self._thread is None:
            self._thread = threading.Thread(target=self._hand_out, name="jdp track", daemon=True)
            self._thread.start()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all lines are handed out and flushed; return whether they are."""
        end = time.monotonic() + timeout_s
        with self._lines.all_tasks_done:
            while self._lines.unfinished_tasks and (left := end - time.monotonic()) > 0:
                self._lines.all_tasks_done.wait(left)
        if self._lines.unfinished_tasks:
            return False
        for each in self._trackers:
            self._try(each.flush)
        return True

    def close(self, timeout_s: float) -> int:
        """Hand out all lines, and end the runs; return how many lines are left."""
        if self.flush(timeout_s):
            for each in self._trackers:
                self._try(each.close)
        return self._lines.unfinished_tasks

    def raise_error(self) -> None:
        """Raise the error of a tracker, once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _hand_out(self) -> None:
        while True:
            step, values, trackers = self._lines.get()
            for each in trackers:
                try:
                    each.take(step, values)
                except BaseException as error:  # raised by the next call
                    text = f"also={each.name} did not take the metrics of step {step}, which are in"
                    name = type(error).__name__
                    self._error = RuntimeError(f"{text} {self._file}: {name}: {error}")
                    self._error.__cause__ = error
            self._lines.task_done()

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # raised by the next call
            self._error = error


# The trackers that `also="wandb"` names: the same in each call.
_by_kind: dict[str, NamedTracker] = {}


def tracker(
    kind: str,
    *,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> NamedTracker:
    """Describe a tracker for `jdp.log(..., also=...)`.

    Process 0 begins its run with the first metrics. A run that continues, after a death or with
    `--resume`, continues the run of the tracker, which then gets the lines of the file that it
    lacks: it has each step once.

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

    >>> tracker("csv").name
    'csv'
    """
    if kind not in NEEDS:
        raise ValueError(f"tracker({kind!r}): write one of {', '.join(map(repr, NEEDS))}.")
    if importlib.util.find_spec(NEEDS[kind]) is None:
        raise ImportError(
            f"the tracker {kind!r} needs a package that is not installed: pip install {NEEDS[kind]}"
        )
    return NamedTracker(Settings(kind, name, dict(config or {}), options))


def trackers_of(also: Any) -> Sequence[Tracker]:
    """Return the trackers that a user gave.

    Args:
      also: a function of a step and its values; an object with `add_scalar(name, value, step)`,
        whose `flush`, if it has one, is called where lines must not be lost; a `tracker`, or the
        name of one; or a list of these. None for none.

    Raises:
      TypeError: if it is nothing of these.
      ValueError, ImportError: as from `tracker`.
    """
    if also is None:
        return ()
    if isinstance(also, (list, tuple)):
        return [found for each in also for found in trackers_of(each)]
    if isinstance(also, NamedTracker):
        return (also,)
    if isinstance(also, str):
        if also not in _by_kind:
            _by_kind[also] = tracker(also)
        return (_by_kind[also],)
    name = getattr(also, "__qualname__", None) or type(also).__qualname__
    if callable(add := getattr(also, "add_scalar", None)):

        def add_all(step: int, values: Mapping[str, Any]) -> None:
            for each, value in values.items():
                add(each, value, step)

        return (OwnTracker(name, add_all, also),)
    if not callable(also):
        raise TypeError(
            f"also={also!r} is neither a function, nor has a method add_scalar, nor names a "
            f"tracker: {', '.join(map(repr, NEEDS))}."
        )
    return (OwnTracker(name, also, also),)


def _in_file(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the steps of a file of metrics with their values, in its order."""
    with open(file) as lines:
        for line in lines:
            found = json.loads(line)
            values = {name: x for name, x in found.items() if name not in ("step", "time")}
            yield found["step"], {name: _number(x) for name, x in values.items()}


def _number(x: Any) -> Any:
    """Return a number that JSON has none for, such as NaN, as which the file has a text."""
    return float(x) if isinstance(x, str) and "j" not in x else x
