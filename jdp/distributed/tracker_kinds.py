"""Runs of CSV, TensorBoard, Weights & Biases and MLflow, each by its own library."""

import contextlib
import csv
import json
import numbers
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

# Kind -> the package that it needs, by the name of its module.
NEEDS = {"csv": "csv", "mlflow": "mlflow", "tensorboard": "tensorboardX", "wandb": "wandb"}


@dataclass(frozen=True)
class NamedTracker:
    """The arguments of `jdp.tracker`."""

    kind: str
    run: str | None
    config: Mapping[str, Any]
    options: Mapping[str, Any]


def beside(file: Path, what: str) -> Path:
    """Return the path of a file that belongs to one file of metrics.

    >>> beside(Path("metrics.jsonl"), "csv").name
    'metrics.jsonl.csv'
    """
    return file.with_name(f"{file.name}.{what}")


class RunNote:
    """Metadata of a tracker's run, in a file beside the file of metrics.

    Args:
      file: the file of metrics; another first line means another run.
      kind: the tracker.

    Attributes:
      last: the last step that the run is known to have, -1 before the first.
      names: the sets of metric names that were tracked.
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
        """Return the id of the run, of a new one from `begin`."""
        if self._id is None:
            self._id = begin()
        return self._id

    def write(self) -> None:
        """Write the metadata; the file of metrics has a line by then."""
        names = sorted(map(sorted, self.names))
        found = {"run": self._id, "last": self.last, "names": names}
        part = self._path.with_name(f"{self._path.name}.part")
        part.write_text(json.dumps(found | {"begins": self._first_line()}))
        part.rename(self._path)

    def _first_line(self) -> str:
        with open(self._file) as lines:
            return lines.readline()


class TrackedRun(Protocol):
    """A run of a tracker, which resumes the earlier run of the same file."""

    def lacking(self, step: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values of a line that the resumed run does not have."""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the values of a step."""

    def flush(self) -> None:
        """Write out buffered values."""

    def close(self) -> None:
        """End the run."""


class _Rebuilt:
    """A run that is rebuilt from the file of metrics when it resumes."""

    def lacking(self, step: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return values


class _Table(_Rebuilt):
    """A CSV table with a row for each line; a new name adds a column."""

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
    """Event files in a folder beside the file of metrics."""

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
    """A run of Weights & Biases."""

    def __init__(self, settings: NamedTracker, file: Path, note: RunNote):
        import wandb  # pyrefly: ignore[missing-import]

        self._note = note
        given = {"name": settings.run, "config": dict(settings.config), "dir": str(file.parent)}
        self._run = wandb.init(
            id=note.run_id(lambda: uuid.uuid4().hex[:8]),
            resume="allow",
            **{**given, **settings.options},
        )
        # Offline, W&B does not know the steps of the resumed run.
        note.last = max(note.last, self._run.step - 1)

    def lacking(self, step: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return values if step >= self._note.last else {}  # W&B merges the values of a step

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(dict(values), step=step)
        self._note.last = step

    def flush(self) -> None:
        """Do nothing: a process of the library writes the values."""

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """A run of MLflow."""

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
