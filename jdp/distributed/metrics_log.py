"""`log`: metrics of steps as lines of JSON, each step once however often processes die."""

import atexit
import fcntl
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jdp.pytrees import is_deleted
from jdp.validation import int_at_least
from jdp.worker import launcher_client

# Metrics that wait for their steps. Steps in flight are few, so more wait only for a slow disk.
_MAX_WAITING = 1000
_FLUSH_S = 10.0
_OWN_NAMES = ("step", "time")


def log(
    metrics: Mapping[str, Any],
    step: int,
    *,
    file: str | os.PathLike[str] = "metrics.jsonl",
    also: Any = None,
) -> None:
    """Write the metrics of a step to a file, as one line of JSON, without waiting for the step.

    A thread waits for the values. Process 0 writes; on other processes the call checks its
    arguments. When a run continues after a death or with `--resume`, it repeats some steps: a step
    that the file holds with the same names is not written again. A file of another run is refused.

    Args:
      metrics: names and scalars: arrays of one element, or numbers. A mapping in it adds its name:
        `{"eval": {"loss": x}}` is written as "eval/loss". NaN and infinities become strings.
      step: number of the step, >= 0, such as `checkpointer.steps`.
      file: is created if it does not exist; relative to the working directory.
      also: gets what is written, in the thread: a function `also(step, values)`, for example
        `lambda step, values: wandb.log(values, step=step)`, or a writer of TensorBoard, with a
        method `add_scalar(name, value, step)`.

    Raises:
      TypeError: if a metric is not a number, or `also` is neither.
      ValueError: if a metric is not a scalar, was donated, or is named "step" or "time"; or if the
        file holds the steps of an earlier run.
      OSError: if a line of an earlier call could not be written.

    >>> import tempfile, jdp
    >>> from jdp.distributed import metrics_log
    >>> path = os.path.join(tempfile.mkdtemp(), "metrics.jsonl")
    >>> jdp.log({"loss": jax.numpy.float32(0.5), "eval": {"rows": 3}}, 10, file=path)
    >>> metrics_log.end()  # as at the end of the script
    >>> line = json.loads(Path(path).read_text())
    >>> line["step"], line["loss"], line["eval/rows"]
    (10, 0.5, 3)
    """
    step = int_at_least("step", step, least=0)
    scalars = dict(_scalars("", metrics))
    hand_out = _handed_to(also)
    if jax.process_index() != 0:
        return
    path = Path(file).expanduser().absolute()
    if path not in _files:
        _files[path] = _File(path, step)
    _files[path].put(step, scalars, hand_out)


def flush(timeout_s: float = _FLUSH_S) -> None:
    """Wait until all lines of earlier calls are written; at most `timeout_s` for each file."""
    for each in list(_files.values()):
        each.flush(timeout_s)


def end() -> None:
    """Wait until all lines are written, and close the files; a later `log` opens its file again."""
    for each in list(_files.values()):
        each.flush(_FLUSH_S)
        each.end_thread()
    _files.clear()


class _File:
    """A file of metrics, and the thread that writes to it."""

    def __init__(self, path: Path, first_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = open(path, "a+b")
        try:
            self._lock()
            self._written = self._read(first_step)
        except Exception:
            self._file.close()
            raise
        self._error: Exception | None = None
        self._lines: queue.Queue[Any] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._write_lines, name="jdp log", daemon=True)
        self._thread.start()

    def put(self, step: int, scalars: dict[str, Any], hand_out: Callable[..., None]) -> None:
        """Have the thread write a line, unless the file has it; raise its error of earlier ones."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if (step, frozenset(scalars)) in self._written:
            return
        self._written.add((step, frozenset(scalars)))
        for value in scalars.values():
            if isinstance(value, jax.Array):
                value.copy_to_host_async()
        self._lines.put((step, time.time(), scalars, hand_out))

    def flush(self, timeout_s: float) -> None:
        """Wait until the thread has written all lines, at most for `timeout_s`."""
        end = time.monotonic() + timeout_s
        with self._lines.all_tasks_done:
            while self._lines.unfinished_tasks and (left := end - time.monotonic()) > 0:
                self._lines.all_tasks_done.wait(left)

    def end_thread(self) -> None:
        """End the thread once it has written all lines; it then closes the file."""
        self._lines.put(None)
        self._thread.join(_FLUSH_S)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"{self._path} is written by another run, whose lines would be mixed with these. "
                "Write jdp.log(..., file=...) with another file."
            ) from None

    # The lines of the file from `first_step` on, as (step, names); drops a line that a killed
    # process did not complete.
    def _read(self, first_step: int) -> set[tuple[int, frozenset[str]]]:
        self._file.seek(0)
        found, end = [], 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            end += len(line)
            try:
                names = json.loads(line)
                found.append((int(names["step"]), frozenset(names) - {*_OWN_NAMES}))
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"line {number} of {self._path} is not a line of metrics. Write jdp.log(..., "
                    "file=...) with another file."
                ) from None
        if found and first_step <= found[0][0] and not _continues():
            raise ValueError(
                f"{self._path} holds the metrics of an earlier run, up to step "
                f"{max(step for step, _ in found)}, and this run begins at step {first_step}. Move "
                "the file away, write jdp.log(..., file=...) with another one, or continue that "
                "run with --resume or JDP_RESUME=1."
            )
        self._file.truncate(end)
        return {each for each in found if each[0] >= first_step}

    def _write_lines(self) -> None:
        with self._file:
            while (line := self._lines.get()) is not None:
                try:
                    self._write(*line)
                except Exception as error:  # raised by the next call
                    self._error = error
                finally:
                    self._lines.task_done()

    def _write(self, step: int, at: float, scalars: dict[str, Any], hand_out: Any) -> None:
        try:
            values = {name: _number(value) for name, value in scalars.items()}
        except RuntimeError:
            return  # the step failed, and its own error is raised by the next call of a step
        line = {"step": step, "time": round(at, 3)} | {k: _in_json(v) for k, v in values.items()}
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        hand_out(step, values)


_files: dict[Path, _File] = {}
atexit.register(end)


def _scalars(prefix: str, metrics: Mapping[str, Any]) -> Any:
    for key, value in metrics.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _scalars(f"{name}/", value)
            continue
        if name in _OWN_NAMES:
            raise ValueError(f"a metric is named {name!r}, as a field of each line is: rename it.")
        if is_deleted(value):
            raise ValueError(f"metrics[{name!r}] was donated to a step and is gone.")
        array = value if hasattr(value, "dtype") else np.asarray(value)
        if not any(jax.numpy.issubdtype(array.dtype, kind) for kind in (np.number, np.bool_)):
            raise TypeError(f"metrics[{name!r}] must be a number, got dtype {array.dtype}.")
        if array.size != 1:
            raise ValueError(
                f"metrics[{name!r}] has shape {array.shape}: a line holds scalars. Write its "
                "mean, or each element under a name of its own."
            )
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            if not value.is_fully_replicated:
                raise ValueError(f"metrics[{name!r}] lies on another process alone.")
        yield name, value


def _number(value: Any) -> Any:
    found = np.asarray(value)
    return float(found.item()) if jax.numpy.issubdtype(found.dtype, np.floating) else found.item()


def _in_json(value: Any) -> Any:
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value


def _handed_to(also: Any) -> Callable[[int, dict[str, Any]], None]:
    if also is None:
        return lambda step, values: None
    if callable(add := getattr(also, "add_scalar", None)):

        def add_all(step: int, values: dict[str, Any]) -> None:
            for name, value in values.items():
                add(name, value, step)

        return add_all
    if not callable(also):
        raise TypeError(f"also={also!r} is neither a function nor has a method add_scalar.")
    return also


# Whether this process may repeat steps of an earlier one.
def _continues() -> bool:
    member = launcher_client.current()
    if member is not None and member.assignment is not None and member.assignment.resumes:
        return True
    return os.environ.get("JDP_RESUME", "") not in ("", "0")
