"""`evaluate`: metrics over all rows, exact on any number of ranks."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jdp.data import host_arrays
from jdp.data.dataset import find_mask
from jdp.data.loops import Batches, why_repeated
from jdp.distributed import in_flight
from jdp.reduction import metrics
from jdp.training.step import Step, require_step
from jdp.worker import progress


def evaluate(step: Step, state: Any, batches: Iterable[Any], *rest: Any, **keywords: Any) -> Any:
    """Run an `eval_step` over all batches, and combine its metrics.

    Every row counts once: the result is not the mean of batch means. Padding rows of the last batch
    do not count if the step is `eval_step(weight=lambda batch: batch["mask"].sum())`.

    Args:
      step: a function decorated with `jdp.eval_step`.
      state: its first argument.
      batches: `jdp.batches(dataset, batch_size, epochs=1, shuffle=False)`, read from its first row,
        or any iterable of global batches.
      *rest: its further arguments.
      **keywords: its keyword arguments. Pass one named `step` or `batches` by position, or in a
        `functools.partial`.

    Returns:
      The step's metrics, as numpy: floats averaged by weight over all batches (in float64, complex
      ones in complex128), also those of `jdp.sum_over_ranks` and `jdp.max_over_ranks`; integers and
      booleans summed; `jdp.rows` concatenated in the batches' order, without padding rows.

    Raises:
      ValueError: there are no batches.
      TypeError: `step` is not an `eval_step`, or takes other arguments; or `batches` is an array or
        a dict.

    >>> import numpy as np, jdp
    >>> mesh = jdp.init(cpu_ranks=2)
    >>> @jdp.eval_step(weight=lambda batch: batch["mask"].sum())
    ... def measure(params, batch):
    ...     x, mask = batch["x"], batch["mask"]
    ...     return {"mean": (x * mask).sum() / mask.sum(), "x": jdp.rows(x)}
    >>> rows = {"x": np.arange(5.0, dtype="float32")}
    >>> batches = jdp.batches(rows, 4, epochs=1, shuffle=False)
    >>> metrics = jdp.evaluate(measure, None, batches)
    >>> float(metrics["mean"]), metrics["x"].tolist()
    (2.0, [0.0, 1.0, 2.0, 3.0, 4.0])
    """
    why = "A train step would change and donate the state."
    require_step("evaluate", step, ["jdp.eval_step"], why)
    instead = "jdp.batches(dataset, batch_size, epochs=1, shuffle=False)"
    host_arrays.require_batches("evaluate", batches, instead)
    if isinstance(batches, Batches):
        batches.position = 0
        if text := why_repeated(batches):
            warnings.warn(text, stacklevel=2)
    counter = progress.own.slot.counter
    of_training = counter.next_rows, counter.num_left
    counter.write_evaluating(True)
    try:
        with progress.EVALUATING:
            return _evaluate(lambda batch: step.run(state, batch, *rest, **keywords), batches)
    finally:
        counter.write_evaluating(False)
        counter.next_rows, counter.num_left = of_training


def _evaluate(run: Callable[[Any], Any], batches: Iterable[Any]) -> Any:
    fetched: list[tuple[Any, float]] = []
    waiting: Any = None  # One batch behind, so that devices never wait.
    for batch in batches:
        _, reported, weight = run(batch)
        if waiting is not None:
            fetched.append(_fetch(*waiting))
        waiting = reported, weight, find_mask(batch)
    if waiting is None:
        raise ValueError("evaluate got no batches; the mean over no rows is undefined.")
    fetched.append(_fetch(*waiting))
    in_flight.drain()  # Only raises errors of different arguments.
    weights = [weight for _, weight in fetched]
    trees = [tree for tree, _ in fetched]
    return jax.tree.map(lambda *parts: _joined(parts, weights), *trees, is_leaf=metrics.is_rows)


def _fetch(reported: Any, weight: Any, mask: Any) -> tuple[Any, float]:
    counts = None if mask is None else _whole(mask)

    def fetch(leaf: Any) -> Any:
        if not metrics.is_rows(leaf):
            return np.asarray(leaf)
        values = _whole(leaf.values)
        return metrics.Rows(values if counts is None else values[counts], values.ndim)

    return jax.tree.map(fetch, reported, is_leaf=metrics.is_rows), float(weight)


def _whole(values: Any) -> np.ndarray:
    if isinstance(values, jax.Array) and not values.is_fully_addressable:
        return multihost_utils.process_allgather(values, tiled=True)
    return np.asarray(values)


def _joined(parts: tuple, weights: list[float]) -> Any:
    if metrics.is_rows(parts[0]):
        return np.concatenate([part.values for part in parts])
    if not jnp.issubdtype(parts[0].dtype, jnp.inexact):  # only jnp knows bfloat16 as inexact
        # NumPy widens its own integers, but none of fewer than 8 bits.
        dtype = np.int64 if parts[0].dtype.kind == "V" else None
        return np.sum(parts, axis=0, dtype=dtype)
    widest = np.complex128 if np.iscomplexobj(parts[0]) else np.float64
    # A batch of weight 0 may report NaN.
    weighed = [(part.astype(widest), w) for part, w in zip(parts, weights, strict=True) if w > 0]
    if not weighed:
        return np.full_like(parts[0], np.nan, widest)  # a mean over no rows
    return sum(part * w for part, w in weighed) / sum(w for _, w in weighed)
