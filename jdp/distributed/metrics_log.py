"""`log`: lines of JSON, each step once however often processes die."""

import atexit
import functools
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from jdp.distributed.metrics_file import MAX_STEP, OWN_NAMES, MetricsFile
from jdp.distributed.trackers import trackers_of
from jdp.pytrees import is_deleted
from jdp.validation import int_at_least
from jdp.worker import launcher_client

_INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)
_MEASURED = (optax.SnapshotState, optax.MonitorState)


def of_state(state: Any) -> dict[str, Any]:
    """Return the scalars by name, copied, so the state may be donated."""
    leaves, tree = jax.tree.flatten(state)
    indices = _indices(tree)
    if not indices:
        raise ValueError(
            "state= has no learning rate of optax.inject_hyperparams and no value of "
            "optax.snapshot or optax.monitor. Remove state=, or name a value: "
            'optax.chain(optax.snapshot("gradient_norm", optax.tree.norm), ...).'
        )
    found = {name: leaves[i] for name, i in indices.items()}
    if gone := [name for name, value in found.items() if is_deleted(value)]:
        raise ValueError(
            f"the state was donated to a step, and its {gone[0]} with it. Pass the state "
            "returned by the latest step to jdp.log."
        )
    return {name: _copied(value) for name, value in found.items() if np.size(value) == 1}


@functools.lru_cache(maxsize=8)
def _indices(tree: Any) -> dict[str, int]:
    """Return the leaves to log, by their labels of `optax.multi_transform` and names."""
    state = tree.unflatten(range(tree.num_leaves))
    nodes, _ = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda node: isinstance(node, _INJECTED + _MEASURED)
    )
    found: dict[str, int] = {}
    for path, node in nodes:
        labels = _keys(path)
        for own, value in _values(node).items():
            for rest, index in jax.tree_util.tree_leaves_with_path(value):
                name = "/".join([*labels, own, *_keys(rest)])
                number = sum(each.partition(" ")[0] == name for each in found) + 1
                found[name if number == 1 else f"{name} {number}"] = index
    return found


def _values(node: Any) -> dict[str, Any]:
    if isinstance(node, _INJECTED):
        return {k: v for k, v in node.hyperparams.items() if k == "learning_rate"}
    if isinstance(node, optax.SnapshotState):
        return node.measurement
    return node.measurements if isinstance(node, optax.MonitorState) else {}


def _keys(path: Any) -> list[str]:
    return [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]


def _copied(value: Any) -> Any:
    if not isinstance(value, jax.Array):
        return value
    return jax.numpy.copy(value.addressable_data(0))


_FLUSH_S = 10.0


def log(
    metrics: Mapping[str, Any],
    step: int,
    *,
    file: str | os.PathLike[str] = "metrics.jsonl",
    also: Any = None,
    state: Any = None,
) -> None:
    """Write the metrics of a step to a file, as one line of JSON, without waiting for the step.

    A thread waits for the values. Process 0 writes; on other processes the call checks its
    arguments. A resumed or recovered run repeats some steps: a line is not written again up to the
    last step in the file with the same names. So log metrics of the same names in step order. A new
    run cannot continue another run's file.

    Args:
      metrics: names and scalars: arrays of one element, or numbers. A nested mapping adds its name:
        `{"eval": {"loss": x}}` is written as "eval/loss". NaN and infinities become strings.
      step: number of the step, from 0 to 2**63 - 2. With a Checkpointer call this before
        `checkpointer.step`, with `checkpointer.steps + 1`: after SIGTERM a run resumes after the
        saved step, and a later call for it would never be made.
      file: is created if it does not exist; relative to the working directory.
      also: gets the same metrics, in a thread: "csv", "mlflow", "tensorboard" or "wandb"; a
        `jdp.tracker`; a function `also(step, values)`; a writer with a method `add_scalar(name,
        value, step)`; or a list of these. Call `jdp.log.flush()` before you close your own writer.
      state: the returned state, whose optimizer adds to `metrics` the "learning_rate" of
        `optax.inject_hyperparams` and scalars of `optax.snapshot` and `optax.monitor`, unless
        `metrics` has their names. Those of `optax.multi_transform` follow their label and "/".

    Raises:
      TypeError: `metrics` is not a mapping, a metric is not a number, or `also` has another type.
      ImportError: a tracker's library is not installed.
      ValueError: a metric is not a scalar, has more than 64 bits, was donated, or is named "step",
        "time" or like another one; `state` has no such value or was donated; or the file holds the
        steps of an earlier run.
      RuntimeError: before `jdp.init` in a process of `jdp run`; or `also` raised an error in an
        earlier call.
      OSError: `file` cannot be opened, or the disk has refused an earlier line for 10 seconds. The
        lines are kept and retried, also this one while fewer than 1000 wait.

    >>> import json, tempfile, jdp
    >>> from jdp.distributed import metrics_log
    >>> path = os.path.join(tempfile.mkdtemp(), "metrics.jsonl")
    >>> jdp.log({"loss": jax.numpy.float32(0.5), "eval": {"rows": 3}}, 10, file=path)
    >>> metrics_log.end()  # as at the end of the script
    >>> line = json.loads(Path(path).read_text())
    >>> line["step"], line["loss"], line["eval/rows"]
    (10, 0.5, 3)
    """
    step = int_at_least("step", step, least=0)
    if step >= MAX_STEP:
        raise ValueError(f"step must be less than 2**63 - 1, got {step}.")
    scalars = _by_name(metrics)
    trackers = trackers_of(also)
    _require_assignment()
    if state is not None:
        scalars = _by_name(of_state(state)) | scalars
    if jax.process_index() != 0:
        return
    path = Path(file).expanduser().resolve()
    with _open.lock:
        if path not in _open.files:
            _open.files[path] = MetricsFile(path, step)
        found = _open.files[path]
    opened, has_begun = found.opened(trackers)
    if has_begun:  # a library may have registered its own exit handler
        _register_end()
    found.put(step, scalars, opened)


def flush(timeout_s: float = _FLUSH_S) -> None:
    """Wait until the files and `also` have all metrics, and flush `also`.

    Call `jdp.log.flush()` before you close a writer: a thread writes to it. jdp flushes at the
    script's end, before exit code 75, and after an uncaught exception.
    """
    end = time.monotonic() + timeout_s
    write_all(timeout_s)
    for each in list(_open.files.values()):
        if not each.flush_trackers(max(0.0, end - time.monotonic())):
            raise TimeoutError(f"also= lacks metrics after {timeout_s:g} s. The file has them.")
        each.raise_error()


def write_all(timeout_s: float = _FLUSH_S) -> None:
    """Wait until all lines are in their files."""
    refusals = []
    for each in list(_open.files.values()):
        try:
            if not each.flush(timeout_s):
                raise TimeoutError(f"not all metrics were written within {timeout_s:g} s.")
        except OSError as error:  # go on with the other files
            refusals.append(error)
    if refusals:
        raise refusals[0]


log.flush = flush  # type: ignore[attr-defined]


def end() -> None:
    """Write all lines, and close the files; a later `log` reopens its file."""
    for each in list(_open.files.values()):
        each.end_thread()
    _open.files.clear()


class _OpenFiles:
    def __init__(self) -> None:
        self.files: dict[Path, MetricsFile] = {}
        self.lock = threading.Lock()


_open = _OpenFiles()


def _register_end() -> None:
    """Let `end` run before all exit handlers registered so far."""
    atexit.unregister(end)
    atexit.register(end)


_register_end()
# A forked child lacks the writing threads, and has its own files.
os.register_at_fork(after_in_child=_open.__init__)


# A standby also runs the code before `jdp.init()`, without a number.
def _require_assignment() -> None:
    member = launcher_client.current()
    if member is not None and member.assignment is None:
        raise RuntimeError(
            "jdp.log was called before jdp.init(), so its process number is unknown, and each "
            "process and standby of `jdp run` would write. Call jdp.init() first."
        )


def _by_name(metrics: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"metrics must be a mapping from names to numbers, got {type(metrics).__name__}. For "
            'example jdp.log({"loss": loss}, step).'
        )
    found: dict[str, Any] = {}
    for name, value in _scalars("", metrics):
        if name in found:
            raise ValueError(f"two metrics of a line are named {name!r}. Rename one of them.")
        found[name] = value
    return found


def _scalars(prefix: str, metrics: Mapping[str, Any]) -> Any:
    for key, value in metrics.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _scalars(f"{name}/", value)
            continue
        if name in OWN_NAMES:
            raise ValueError(
                f"a metric is named {name!r}, a reserved field of each line. Rename it."
            )
        if isinstance(value, jax.core.Tracer):
            raise TypeError(
                f"metrics[{name!r}] is traced and has no value yet. Return it from the step, and "
                "write jdp.log(metrics, step) after the call."
            )
        if is_deleted(value):
            raise ValueError(f"metrics[{name!r}] was donated to a step and is deleted.")
        array = value if hasattr(value, "dtype") else _array(name, value)
        if isinstance(value, int) and array.dtype == object:
            raise ValueError(
                f"metrics[{name!r}] is an integer of {value.bit_length()} bits, but a line holds "
                "64-bit integers, which other programs can read. Write it as a float."
            )
        if not _is_of_numbers(array.dtype):
            raise TypeError(f"metrics[{name!r}] must be a number, got dtype {array.dtype}.")
        if array.size != 1:
            raise ValueError(
                f"metrics[{name!r}] has shape {array.shape}, but a line holds scalars. Write its "
                "mean, or each element under its own name."
            )
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            if not value.is_fully_replicated:
                raise ValueError(f"metrics[{name!r}] is only on another process.")
        # The author may overwrite a NumPy array before the thread reads it.
        yield name, value.copy() if isinstance(value, np.ndarray) else value


def _is_of_numbers(dtype: Any) -> bool:
    is_number = any(jax.numpy.issubdtype(dtype, kind) for kind in (np.number, np.bool_))
    return is_number and dtype.kind != "m"  # NumPy takes a timedelta64 for an integer


def _array(name: str, value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise ValueError(
            f"metrics[{name!r}] is not a scalar: {error} Write its mean, or each element under "
            "its own name."
        ) from None
