"""`sharded_embedding`: rows of a table split over the ranks."""

import logging
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdp import axis
from jdp.analysis.marks import MEAN, SHARD, WEIGHTED_SUM, mark
from jdp.collectives import split_rows
from jdp.collectives.xla import scaled, split_scale
from jdp.distributed.this_process import log_once
from jdp.reduction import global_mean, mixed_precision, shard_registry, step_context, weighted_sum
from jdp.reduction.shard_registry import Shard
from jdp.reduction.step_context import Scope
from jdp.reduction.weighted_sum import Weighting

OutOfRange = Literal["nan", "zero", "clip"]
_CHOICES = ("nan", "zero", "clip")


def sharded_embedding(table: Any, ids: Any, *, out_of_range: OutOfRange = "nan") -> jax.Array:
    """Return `table[ids]`; a table that is split over the ranks is never gathered.

    Inside a step of a state with `jdp.sharded(tx, stage=3)`, `table` is a parameter. Each rank
    requests each needed row once from its owner. The gradient is sent back, and the owner gets the
    mean over the ranks. All ids of a batch may be rows of one rank. Every rank must make the call.

    An unsplit table (outside of a step, on one rank, at other stages, or if no dim divides by the
    ranks) is indexed directly. A step on several ranks logs that once, to the logger "jdp".
    Differentiate with `jdp.value_and_grad`; inside `jax.value_and_grad`, or after
    `table.astype(...)`, the table is a whole array.

    Args:
      table: `[rows, ...]`, any float dtype; rows, or else another dim, divide by the ranks.
      ids: any integer dtype and shape; each rank its own.
      out_of_range: result for ids below 0, or not below `rows`. "nan": a row of NaN, which makes
        the loss NaN. "zero": a row of zeros, for padding. Both have no gradient. "clip": the first
        or the last row. JAX's `table[ids]` counts negative ids from the end, clips others, and
        drops their gradient.

    Returns:
      `[*ids.shape, ...]`, in the table's dtype.

    Raises:
      TypeError: `ids` are not integers, or for "nan" the dtype of `table` has no NaN.
      ValueError: `out_of_range` is another word, `table` has no dims, or there is no row to
        clip to.

    >>> import jax.numpy as jnp
    >>> table = jnp.arange(6.0).reshape(3, 2)
    >>> sharded_embedding(table, jnp.array([2, 0, -1]), out_of_range="zero")
    Array([[4., 5.],
           [0., 1.],
           [0., 0.]], dtype=float32)
    """
    if not isinstance(table, jax.Array) and hasattr(table, "__jax_array__"):  # an nnx.Param
        table = table.__jax_array__()
    ids = _integers(ids)
    num_rows = _require_table(table, ids, out_of_range)
    shape = (*ids.shape, *jnp.shape(table)[1:])
    dtype = jnp.result_type(table)
    fill = jnp.full(shape, jnp.nan if out_of_range == "nan" else 0, dtype)
    if not num_rows or not ids.size:
        return fill
    inside = jnp.clip(ids, 0, num_rows - 1)
    # In the state's dtype, in which gradients add up.
    index_dtype = jnp.int32 if num_rows <= np.iinfo(np.int32).max else jnp.int64
    rows = mixed_precision.cast(_rows(table, inside.astype(index_dtype)), dtype)
    if out_of_range == "clip":
        return rows
    is_row = (ids == inside).reshape(*ids.shape, *[1] * (len(shape) - ids.ndim))
    return jnp.where(is_row, rows, fill)


def _integers(ids: Any) -> jax.Array:
    found = jnp.asarray(ids)
    if not jnp.issubdtype(found.dtype, jnp.integer):
        raise TypeError(
            f"ids must be integers, got {found.dtype}{list(found.shape)}: they index the rows of "
            "the table. Write ids.astype(jnp.int32)."
        )
    # A smaller type may not hold the number of rows.
    return found if found.dtype.itemsize >= 4 else found.astype(jnp.int32)


def _require_table(table: Any, ids: jax.Array, out_of_range: str) -> int:
    if out_of_range not in _CHOICES:
        raise ValueError(f"out_of_range must be one of {_CHOICES}, got {out_of_range!r}.")
    shape, dtype = jnp.shape(table), jnp.result_type(table)
    if not shape:
        raise ValueError(f"table must have rows, [rows, ...], got {dtype}[] without dims.")
    if out_of_range == "nan" and not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            f"the table is {dtype}{list(shape)}, whose dtype has no NaN for ids out of range. "
            'Write out_of_range="zero" or out_of_range="clip".'
        )
    if out_of_range == "clip" and not shape[0] and ids.size:
        raise ValueError(
            f'the table is {dtype}{list(shape)} without rows, but out_of_range="clip" reads the '
            f"nearest row for each of {ids.size} ids. Pass a table with rows."
        )
    return shape[0]


def _rows(table: Any, ids: jax.Array) -> jax.Array:
    """Every id is valid."""
    scope, part = step_context.innermost(), shard_registry.known(table)
    if scope is None or part is None or part.is_kept:
        if scope is not None and lax.axis_size(scope.axis_name) > 1:
            _log_whole(table, scope)
        return jnp.asarray(table).at[ids].get(mode="promise_in_bounds")
    weighting, scale = _weighting(part, scope)
    average = _TableMeans(scope.axis_name, part.axes, scale, step_context.platform())
    (own,) = global_mean.as_local([part.value], average)
    return weighting.total(split_rows.take_rows(own, ids, part.dim, part.axes))


def _weighting(part: Shard, scope: Scope) -> tuple[Weighting, float]:
    weight = step_context.default_weight(scope.axis_name, "jdp.sharded_embedding")
    weights, scale = weighted_sum.factors(weight, scope.axis_name, mean=True)
    before, after = split_scale(scale, part.value.dtype)
    if before == 1:
        return weights, float(after)
    return Weighting(None, is_adjoint=True, after=jnp.float32(before)), float(after)


class _TableMeans(NamedTuple):
    """Averages over all ranks what `add_rows` summed over the table's ranks."""

    axes: tuple[str, ...]
    over: tuple[str, ...]
    scale: float
    platform: str

    def means(self, values: list[jax.Array]) -> list[jax.Array]:
        others = tuple(name for name in self.axes if name not in self.over)
        if others:
            with jax.named_scope(WEIGHTED_SUM):  # The terms are weighted.
                values = axis.psum(values, others, self.platform)
        parts = [scaled(part, self.scale) for part in values]
        parts = [mark(part, kind=SHARD, path="", axes=self.axes) for part in parts]
        return [mark(part, kind=MEAN, path="", axes=self.axes) for part in parts]

    means_of_slopes = means


def _log_whole(table: Any, scope: Scope) -> None:
    shape, dtype, n = jnp.shape(table), jnp.result_type(table), lax.axis_size(scope.axis_name)
    name = f"{dtype}{list(shape)}"
    log_once(
        # Without any shard the author asked for no split table.
        logging.WARNING if scope.shards else logging.INFO,
        f"jdp.sharded_embedding looks up the whole table {name}, so each of {n} ranks holds all "
        f"{int(np.prod(shape)) * dtype.itemsize:,} bytes of it in the step. {_advice(shape, n)}",
    )


def _advice(shape: tuple[int, ...], n: int) -> str:
    if not any(size and size % n == 0 for size in shape):
        more = -(-shape[0] // n) * n
        return f"No dim divides by {n}. Use {more} rows instead of {shape[0]}."
    return (
        "Write jdp.sharded(tx, stage=3), with a min_size below the size of the table, and "
        "jdp.value_and_grad. Look up rows in the parameter itself: results of astype, and "
        "arguments of jax.jit, jax.checkpoint or jax.shard_map inside the step, are whole."
    )
