"""What gets the metrics of a run besides their file: functions, writers, and trackers by name."""

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jdp.distributed.tracker_kinds import BEGIN, NEEDS, Settings, TrackedRun


class Tracker(Protocol):
    """Something that takes the metrics of a run, one call at a time."""

    @property
    def name(self) -> str:
        """The name, for errors."""

    @property
    def is_kept(self) -> bool:
        """Whether it holds lines, which `flush` brings to the disk."""

    def of_file(self) -> "Tracker":
        """Return the tracker for one file of metrics."""

    def take(self, file: Path, step: int, values: Mapping[str, Any]) -> None:
        """Take the values of a step, which a file of metrics already has."""

    def flush(self) -> None:
        """Bring to the disk, or to a service, what it still holds."""

    def close(self) -> None:
        """End its run; a later `take` continues it."""


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

    @property
    def is_kept(self) -> bool:
        """Whether it has a method `flush`."""
        return callable(getattr(self.writer, "flush", None))

    def of_file(self) -> "OwnTracker":
        """Return itself."""
        return self

    def take(self, file: Path, step: int, values: Mapping[str, Any]) -> None:
        """Take the values of a step."""
        self.write(step, values)

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
    """A tracker by its name, see `tracker`; its run begins with the first metrics."""

    is_kept = True

    def __init__(self, settings: Settings):
        self._settings = settings
        self._run: TrackedRun | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedTracker) and self._settings == other._settings

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        kind, name, config, options = self._settings
        given = {"name": name, "config": config, **options}
        words = "".join(f", {key}={value!r}" for key, value in given.items() if value)
        return f"jdp.tracker({kind!r}{words})"

    def of_file(self) -> "NamedTracker":
        """Return another one of the same settings, whose run is of one file."""
        return NamedTracker(self._settings)

    @property
    def name(self) -> str:
        """The name, for errors."""
        return self._settings.kind

    def take(self, file: Path, step: int, values: Mapping[str, Any]) -> None:
        """Take the values of a step; the first time, all those in the file that its run lacks."""
        if self._run is not None:
            return self._run.take(step, values)
        self._run = run = BEGIN[self._settings.kind](self._settings, file)
        for each, found in _in_file(file):
            if lacking := run.lacking(each, found):
                run.take(each, lacking)

    def flush(self) -> None:
        """Bring to the disk, or to a service, what it still holds."""
        if self._run is not None:
            self._run.flush()

    def close(self) -> None:
        """End its run; a later `take` continues it."""
        if self._run is not None:
            self._run.close()
        self._run = None


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
        the file `metrics.jsonl` the first is `metrics.csv`, and the third a folder
        `metrics.tensorboard`.
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
