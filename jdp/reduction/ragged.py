"""Ragged all-to-all: ranks exchange different numbers of rows."""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec as P

from jdp import axis, pytrees
from jdp.axis import AxisName
from jdp.collectives import split_rows
from jdp.distributed import this_process
from jdp.reduction import step_context, weighted_sum

_log = logging.getLogger("jdp")

_NO_GRADIENT = (
    "jdp.ragged_all_to_all over the ranks of a step with weight= has no gradient: a rank whose own "
    "rows have weight 0 would drop that of the rows that it received.\nWrite train_step without "
    "weight=, and a loss of n * sum(w * losses) / jdp.sum_over_ranks(sum(w)) for n ranks."
)


def ragged_all_to_all(
    rows: jax.Array, counts: jax.Array, *, max_rows: int, axis_name: AxisName = "data"
) -> tuple[jax.Array, jax.Array, Callable[[jax.Array], jax.Array]]:
    """Send each rank another number of rows, as mixtures of experts without a capacity do.

    Each rank sorts its rows by destination, and for one destination by block, such as that rank's
    experts. They arrive sorted by block, and for one block by source, so `jax.lax.ragged_dot` can
    compute all experts of a rank.

    Exchanges are linear, with exact gradients. On GPUs and TPUs they are
    `jax.lax.ragged_all_to_all`. CPUs exchange in rounds, one if ranks receive equally many:
    natively over the ranks of `jdp.sharded(tx, stage=3)`, else by XLA.

    Args:
      rows: `[rows, ...]`, any dtype but typed keys. Rows after the last block are not sent.
      counts: int, `[n, k]`, >= 0: this rank sends `counts[i, j]` rows for block j of rank i.
      max_rows: rows of the result, >= 1, equal on all ranks.
      axis_name: the axis of the n ranks, or a tuple; not necessarily the data axis.

    Returns:
      received: `[max_rows, ...]`; rows after the last block are 0.
      sizes: int, `[k, n]`: this rank received `sizes[j, i]` rows for block j from rank i.
      back: sends rows ordered as the received ones, `[max_rows, ...]` of any dtype, back
        to the places of those in `rows`; unsent rows are 0.

    Raises:
      ValueError: `counts` are not integers `[n, k]`, `rows` has no dims or are typed keys,
        `max_rows` < 1, or for a gradient over the ranks of a step with `weight=`.
      RuntimeError: by a later call of the step, on all ranks, if there are more rows than
        `max_rows`. Outside of a step that is logged, and the first row is NaN; 0 of integers.

    Source: MegaBlocks, https://arxiv.org/abs/2211.15841.

    >>> import jax, jax.numpy as jnp, jdp
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> mesh = Mesh(jax.devices()[:2], "data")
    >>> @jax.jit
    ... @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    ... def double(rows, counts):
    ...     received, _, back = jdp.ragged_all_to_all(rows, counts, max_rows=4)
    ...     return received, back(2 * received)
    >>> counts = jnp.array([[2], [1], [0], [3]])  # rank 0 keeps 2 rows of 3, rank 1 keeps all
    >>> received, doubled = double(jnp.array([1, 2, 3, 4, 5, 6]), counts)
    >>> received.tolist(), doubled.tolist()
    ([1, 2, 0, 0, 3, 4, 5, 6], [2, 4, 6, 8, 10, 12])
    """
    rows, counts, num_ranks = jnp.asarray(rows), jnp.asarray(counts), axis.size(axis_name)
    _require_counts(rows, counts, max_rows, num_ranks)
    axes = axis.names(axis_name) if axis.is_bound(axis_name) else ()
    limits = jnp.iinfo(counts.dtype)
    counts = jnp.clip(counts, max(limits.min, -1), min(limits.max, 2**31 - 1)).astype(jnp.int32)
    sent = lax.all_gather(axis.as_varying(counts, axes), axes) if axes else counts[None]
    misfit = _misfit(sent, (len(rows), max_rows), axes)
    sent = jnp.maximum(sent, 0)
    at_source = _starts(sent)
    at_destination = jnp.transpose(_starts(jnp.transpose(sent, (1, 2, 0))), (2, 0, 1))
    there = _Blocks(sent, at_source, at_destination, len(rows), max_rows, axes)
    counts, first, to = (jnp.swapaxes(x, 0, 1) for x in (sent, at_destination, at_source))
    back = _Blocks(counts, first, to, max_rows, len(rows), axes)
    received = there.exchanged(rows, by_block=True)
    is_inexact = jnp.issubdtype(received.dtype, jnp.inexact)
    wrong = misfit.astype(received.dtype) if is_inexact else jnp.zeros((), received.dtype)
    first_row = jnp.where(jnp.isnan(misfit), wrong, received[:1])
    return (
        received.at[:1].set(first_row),
        counts[axis.rank(axis_name)].T,
        functools.partial(back.exchanged, by_block=False),
    )


def _starts(counts: jax.Array) -> jax.Array:
    flat = counts.reshape(len(counts), -1)
    return (jnp.cumsum(flat, axis=1) - flat).reshape(counts.shape)


class _Blocks(NamedTuple):
    """An exchange of row blocks.

    Attributes:
      counts: `[n, n, k]`, by source, destination and block.
      at_source: `[n, n, k]`, the first row of each block in the source.
      at_destination: the same in the destination.
      num_given: rows of each source.
      num_received: rows of each destination.
      axes: those of the ranks; empty without a bound axis.
    """

    counts: jax.Array
    at_source: jax.Array
    at_destination: jax.Array
    num_given: int
    num_received: int
    axes: tuple[str, ...]

    def exchanged(self, rows: jax.Array, *, by_block: bool) -> jax.Array:
        """Return the received rows, by block and source, or by source and block."""
        if jnp.shape(rows)[:1] != (self.num_given,):
            raise ValueError(
                f"`back` of jdp.ragged_all_to_all got rows {list(jnp.shape(rows))}. They return to "
                f"the sources of the received rows.\nPass [{self.num_given}, ...]."
            )
        rows = axis.as_varying(jnp.asarray(rows), self.axes) if self.axes else rows
        shape = self.num_received, *rows.shape[1:]
        if 0 in (self.num_given, self.counts.size, *shape):
            received = axis.as_typed_like(jnp.zeros(shape, rows.dtype), rows)
        elif self.axes and step_context.platform() != "cpu":
            received = self._by_xla(rows)
        else:
            received = self._by_lookup(rows, by_block)
        step = step_context.around(self.axes) if self.axes else None
        if step is None or step.weight is None:
            return received
        return weighted_sum.without_transpose(received, _NO_GRADIENT)

    def _by_xla(self, rows: jax.Array) -> jax.Array:
        # Wrong counts must not write out of bounds.
        first = jnp.clip(self.at_source, 0, self.num_given)
        to = jnp.clip(self.at_destination, 0, self.num_received)
        sizes = jnp.minimum(self.num_given - first, self.num_received - to)
        sizes = jnp.clip(self.counts, 0, sizes)
        zeros = jnp.zeros((self.num_received, *rows.shape[1:]), rows.dtype)
        zeros, rank = axis.as_varying(zeros, self.axes), lax.axis_index(self.axes)
        own = (x.reshape(-1) for x in (first[rank], sizes[rank], to[rank], sizes[:, rank]))
        return lax.ragged_all_to_all(rows, zeros, *own, axis_name=self.axes)

    def _by_lookup(self, rows: jax.Array, by_block: bool) -> jax.Array:
        rank = lax.axis_index(self.axes) if self.axes else 0
        counts, first = self.counts[:, rank], self.at_source[:, rank]
        source = jnp.broadcast_to(jnp.arange(len(counts))[:, None], counts.shape)
        own = counts, first, source
        counts, first, source = ((x.T if by_block else x).reshape(-1) for x in own)
        ends, place = jnp.cumsum(counts), jnp.arange(self.num_received)
        # jnp.searchsorted fails in a typed shard_map beside an axis split by the compiler.
        block = jnp.cumsum(jnp.zeros_like(place).at[ends].add(1, mode="drop"))
        is_sent = block < len(ends)
        row = (first + counts - ends)[block] + place
        ids = source[block] * self.num_given + jnp.clip(row, 0, self.num_given - 1)
        ids = jnp.where(is_sent, ids, rank * self.num_given)  # unsent: a row of this rank
        taken = split_rows.take_rows(rows, ids, 0, self.axes) if self.axes else rows[ids]
        is_sent = is_sent.reshape(-1, *[1] * (rows.ndim - 1))
        return jnp.where(is_sent, taken, jnp.zeros((), rows.dtype))


def _require_counts(rows: jax.Array, counts: jax.Array, max_rows: int, num_ranks: int) -> None:
    is_fit = counts.ndim == 2 and len(counts) == num_ranks
    if not is_fit or not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ValueError(
            f"jdp.ragged_all_to_all got counts {counts.dtype}{list(counts.shape)}. They are the "
            f"rows for each rank.\nWrite integers [{num_ranks}, k], with k blocks for each rank."
        )
    if rows.ndim == 0 or max_rows < 1:
        raise ValueError(
            f"jdp.ragged_all_to_all got rows {rows.dtype}{list(rows.shape)} and "
            f"max_rows={max_rows}. Dim 0 of both sides is that of the rows.\n"
            "Write rows [rows, ...], and max_rows >= 1."
        )
    if pytrees.is_key(rows):
        raise ValueError(
            f"jdp.ragged_all_to_all got rows {rows.dtype}{list(rows.shape)}, typed keys, which "
            "collectives cannot send.\nWrite jax.random.key_data(rows), and wrap_key_data after."
        )


def _misfit(given: jax.Array, sizes: tuple[int, int], axes: tuple[str, ...]) -> jax.Array:
    """Return 0, or NaN on all ranks for misfits in `[n, n, k]` counts: a stop would block ranks."""
    # A negative count must not look like none.
    by_rank = jnp.where((given < 0).any(2), -1, given.sum(2))
    most = (2**31 - 1) // len(given)  # so that sums over ranks do not wrap around
    by_rank = jnp.where(given.astype(jnp.float32).sum(2) > most, most, by_rank)
    others = tuple(name for name in axis.enclosing_mesh().manual_axes if name not in axes)
    groups = by_rank[None]
    if others:  # a sum, since JAX types gathered values as varying
        groups = jnp.zeros((lax.axis_size(others), *by_rank.shape), by_rank.dtype)
        groups = lax.psum(groups.at[lax.axis_index(others)].set(by_rank), others)
    names = "/".join(axes), "/".join(others)

    def report(groups: jax.Array) -> jax.Array:
        return _misfit_p.bind(groups, sizes=sizes, names=names)

    around = axis.enclosing_mesh()
    if left := set(around.axis_names) - set(around.manual_axes):  # else JAX refuses callbacks
        report = jax.shard_map(report, axis_names=left, in_specs=P(), out_specs=P())
    return lax.cond(
        _is_misfit(groups, sizes).any(),
        report,
        lambda groups: axis.as_typed_like(jnp.float32(0), groups),
        groups,
    )


def _is_misfit(groups: Any, sizes: tuple[int, int]) -> Any:
    is_negative = (groups < 0).any((1, 2))
    return is_negative | (groups.sum(2) > sizes[0]).any(1) | (groups.sum(1) > sizes[1]).any(1)


def _report(groups: Any, *, sizes: tuple[int, int], names: tuple[str, str]) -> np.float32:
    """Record the first misfit, and return NaN; 0 if all fit."""
    groups = np.asarray(groups)
    wrong = _is_misfit(groups, sizes)
    if not wrong.any():  # under a vmap, which calls both branches
        return np.float32(0)
    by_rank = groups[wrong.argmax()]
    sent, received = by_rank.sum(1), by_rank.sum(0)
    of = f"of {names[0]}" + f" (group {wrong.argmax()} of {names[1]})" * (len(groups) > 1)
    if (by_rank < 0).any():
        rank = int((by_rank < 0).any(1).argmax())
        why = f"rank {rank} {of} has negative counts.\nWrite counts >= 0."
    elif (sent > sizes[0]).any():
        rank = int(sent.argmax())
        why = (
            f"rank {rank} {of} has {sizes[0]} rows and sends {by_rank[rank].tolist()}.\n"
            "Write counts whose sum is at most the number of rows."
        )
    else:
        rank = int(received.argmax())
        why = (
            f"rank {rank} {of} receives {by_rank[:, rank].tolist()} rows, more than "
            f"max_rows={sizes[1]}.\nWrite max_rows={received[rank]} or more."
        )
    if this_process.current.exchange_error is None:
        this_process.current.exchange_error = f"jdp.ragged_all_to_all: {why}"
        _log.error("%s", this_process.current.exchange_error)
    return np.float32(np.nan)


# groups -> NaN, on the host; `explain` compiles for absent devices, without a host.
_misfit_p = jax.extend.core.Primitive("jdp_misfit")
_misfit_p.def_impl(_report)


@_misfit_p.def_abstract_eval
def _typed(groups: Any, **params: Any) -> Any:
    return axis.reshaped(groups, (), jnp.dtype("float32"))


def _by_host(groups: jax.Array, **params: Any) -> jax.Array:
    number = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.pure_callback(functools.partial(_report, **params), number, groups)


def _nan(groups: jax.Array, **params: Any) -> jax.Array:
    return jnp.float32(np.nan)


def _lower(platform: str, context: Any, *args: Any, **params: Any) -> Any:
    try:
        jax.devices(platform)
        run = _by_host
    except RuntimeError:
        run = _nan
    return mlir.lower_fun(run, multiple_results=False)(context, *args, **params)


def _batch(args: tuple, dims: tuple, **params: Any) -> tuple[Any, Any]:
    rows = jnp.moveaxis(args[0], dims[0], 0)
    return jnp.stack([_misfit_p.bind(row, **params) for row in rows]), 0


batching.primitive_batchers[_misfit_p] = _batch
for _platform in ("cpu", "cuda", "rocm", "tpu"):
    mlir.register_lowering(_misfit_p, functools.partial(_lower, _platform), platform=_platform)
