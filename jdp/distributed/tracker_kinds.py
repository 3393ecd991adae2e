"""The runs of trackers: a table, TensorBoard, Weights & Biases, MLflow; each by its own library."""

import contextlib
import csv
import json
import numbers
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

# Kind -> the package that it needs, by the name of its module.
NEEDS = {"csv": "csv", "mlflow": "mlflow", "tensorboard": "tensorboardX", "wandb": "wandb"}


class Settings(NamedTuple):
    """What a user says of a tracker, see `jdp.tracker`."""

    kind: str
    run: str | None
    config: Mapping[str, Any]
    options: Mapping[str, Any]


def beside(file: Path, what: str) -> Path:
    """Return the path of what belongs to a file of metrics, and to no other one.

    >>> beside(Path("metrics.jsonl"), "csv").name
    'metrics.jsonl.csv'
    """
    return file.with_name(f"{file.name}.{what}")


class RunNote:
    """What is kept beside a file of metrics of the run of a tracker that has its lines.

    Args:
      file: of metrics. One that begins with another line is of another run.
      kind: of the tracker.

    Attributes:
      last: the last step that the run has got, as far as it is known; -1 for none.
      names: the sets of names of the lines that it was given.
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
        """Write it down, once the file has a line."""
        names = sorted(map(sorted, self.names))
        found = {"run": self._id, "last": self.last, "names": names}
        part = self._path.with_name(f"{self._path.name}.part")
        part.write_text(json.dumps(found | {"begins": self._first_line()}))
        part.rename(self._path)

    def _first_line(self) -> str:
        with open(self._file) as lines:
            return lines.readline()


class TrackedRun(Protocol):
    """A run of a tracker, which continues that of the same file of metrics."""

    def lacking(self, step: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return those values of a line of the file that it has not got before it began again."""

    def take(self, step: int, values: Mapping[str, Any]) -> None:
        """Take the values of a step."""

    def flush(self) -> None:
        """Bring to the disk, or to a service, what it still holds."""

    def close(self) -> None:
        """End it."""


class _Anew:
    """A run that is written anew from the file of metrics where it continues."""

    def lacking(self, step: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return values


class _Table(_Anew):
    """A CSV table with a row for each line; a new name is a new column, of a table written anew."""

    def __init__(self, settings: Settings, file: Path, note: RunNote):
        self._path = beside(file, "csv")
        self._rows: list[dict[str, Any]] = []
        self._names = ["step"]
        self._write()

    def take(self, step: int, values: Mapping[str, Any]) -> None:
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


class _TensorBoard(_Anew):
    """Event files in a folder beside the file of metrics."""

    def __init__(self, settings: Settings, file: Path, note: RunNote):
        from tensorboardX import SummaryWriter

        folder = beside(file, "tensorboard") / (settings.run or "")
        for stale in folder.glob("events.out.tfevents.*"):
            stale.unlink()
        self._writer = SummaryWriter(str(folder), **settings.options)
        if settings.config:
            rows = "".join(f"|{name}|{value}|\n" for name, value in settings.config.items())
            self._writer.add_text("config", f"|name|value|\n|---|---|\n{rows}")

    def take(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in _reals(values):
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """A run of Weights & Biases."""

    def __init__(self, settings: Settings, file: Path, note: RunNote):
        import wandb  # pyrefly: ignore[missing-import]

        self._note = note
        given = {"name": settings.run, "config": dict(settings.config), "dir": str(file.parent)}
        self._run = wandb.init(
            id=note.run_id(lambda: uuid.uuid4().hex[:8]),
            resume="allow",
            **{**given, **settings.options},
        )
        # Offline it does not know the steps of the run that it continues.
        note.last = max(note.last, self._run.step - 1)

    def lacking(self, step: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return values if step >= self._note.last else {}  # values of one step are put together

    def take(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(dict(values), step=step)
        self._note.last = step

    def flush(self) -> None:
        """Do nothing: a process of the library has what it took."""

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """A run of MLflow."""

    def __init__(self, settings: Settings, file: Path, note: RunNote):
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

    def take(self, step: int, values: Mapping[str, Any]) -> None:
        refused = None
        for name, value in _reals(values):
            try:
                self._client.log_metric(self._id, name, value, step=step)
            except self._refusals as error:  # of a name, say: the others are taken
                refused = error
        if refused is not None:
            raise refused

    def flush(self) -> None:
        """Do nothing: each value was sent when it was taken."""

    def close(self) -> None:
        self._client.set_terminated(self._id)


BEGIN: dict[str, Callable[[Settings, Path, RunNote], TrackedRun]] = {
    "csv": _Table,
    "mlflow": _MLflow,
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
}


def _reals(values: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(name, float(x)) for name, x in values.items() if isinstance(x, numbers.Real)]
