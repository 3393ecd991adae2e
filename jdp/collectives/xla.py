"""XLA's all-reduce: NCCL between GPUs, gloo between CPU processes."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jdp import axis
from jdp.analysis.marks import ALL_REDUCED, mark
from jdp.axis import AxisName
from jdp.collectives.buckets import pack, unpack

Scale = float | jax.Array
Leaf = tuple[jax.Array, int | None]  # with the dim of its shards; None: it stays whole

MiB = 2**20
# GPUs of a host send about this in an all-reduce's startup time.
_LEAST_COMBINED = 8 * MiB
# XLA's default of `xla_gpu_all_reduce_combine_threshold_bytes`.
_MOST_COMBINED = 30 * MiB


def xla(
    buckets: Sequence[Sequence[jax.Array]],
    axis_name: AxisName,
    *,
    scale: Scale = 1.0,
    mesh: Mesh | None = None,
) -> list[list[jax.Array]]:
    """Sum every leaf over `axis_name` with `lax.psum`, one call for each bucket.

    The other algorithms are tested against it. XLA may merge the calls. Between CPU processes a
    bucket is sent as one array, 16-bit floats as words.

    Args:
      buckets: lists of leaves, one dtype each; any shapes.
      axis_name: a name, or a tuple of names, bound by `shard_map` or `pmap`.
      scale: multiplies the sum; a number, or `[]` float, equal on all ranks.
      mesh: the ranks' mesh, since CPUs need another program; None: JAX's default devices.

    Returns:
      The same lists, summed and scaled, in each leaf's dtype.
    """
    names, results = axis.names(axis_name), []
    can_pack = packs(names, mesh)
    for bucket in buckets:
        if can_pack and _is_short(bucket[0].dtype):
            leaves = [(leaf, None) for leaf in bucket]
            results.append(exchanged(leaves, names, scale=scale))
            continue
        before, after = split_scale(scale, bucket[0].dtype)
        parts = [scaled(leaf, before) for leaf in bucket]
        is_packed = can_pack and len(bucket) > 1
        sent = [pack(lax.optimization_barrier(parts))] if is_packed else parts
        sums = axis.psum(sent, names, axis.platform(mesh))
        sums = unpack(sums[0], like=bucket) if is_packed else sums
        results.append([scaled(leaf, after) for leaf in sums])
    return results


def packs(axes: tuple[str, ...], mesh: Mesh | None) -> bool:
    """Whether a bucket is sent as one array, for which the compiler must split no leaf."""
    around = axis.enclosing_mesh()
    left = [name for name, size in around.shape.items() if size > 1]
    is_manual = set(axes) | set(left) <= set(around.manual_axes)
    return is_manual and axis.is_between_processes(mesh) and not axis.is_typed(axes)


class Wire(NamedTuple):
    """An encoding of whole blocks of numbers."""

    encode: Callable[[jax.Array], jax.Array]
    decode: Callable[[jax.Array], jax.Array]
    block: int = 1


def exchanged(
    leaves: Sequence[Leaf],
    axes: tuple[str, ...],
    *,
    scale: Scale = 1.0,
    wire: Wire | None = None,
) -> list[jax.Array]:
    """Sum leaves of one dtype by an all-to-all and an all-gather, in the order of native sums.

    The derivatives are those of the exact sum. `wire` sends, by default, the leaves' own bits.
    """
    if not sum(leaf.size for leaf, _ in leaves):
        return [_shard(leaf, leaf, dim, axis.size(axes)) for leaf, dim in leaves]
    bucket, dims = zip(*leaves, strict=True)
    if wire is None:
        wire = _words(bucket[0].dtype) if _is_short(bucket[0].dtype) else _EXACT
    is_constant = isinstance(scale, (int, float))

    def exact(bucket: Sequence[jax.Array], factor: Any) -> list[jax.Array]:
        pairs = [*zip(bucket, dims, strict=True)]
        return _exchange(pairs, axes, scale if is_constant else factor, _EXACT)

    if wire is _EXACT:
        return exact(bucket, scale)

    @jax.custom_jvp
    def rounded(bucket: Sequence[jax.Array], factor: Any) -> list[jax.Array]:
        pairs = [*zip(bucket, dims, strict=True)]
        return _exchange(pairs, axes, scale if is_constant else factor, wire)

    @rounded.defjvp
    def _jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        return rounded(*primals), jax.jvp(exact, primals, tangents)[1]

    return rounded(bucket, None if is_constant else scale)


_EXACT = Wire(lambda x: x, lambda x: x)


def _words(dtype: np.dtype) -> Wire:
    # XLA:CPU sends 16-bit floats as float32.
    return Wire(
        lambda x: lax.bitcast_convert_type(x.astype(dtype), jnp.uint16),
        lambda x: lax.bitcast_convert_type(x, dtype).astype(jnp.float32),
    )


def _is_short(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2


def _exchange(
    leaves: Sequence[Leaf], axes: tuple[str, ...], scale: Scale, wire: Wire
) -> list[jax.Array]:
    num_ranks = axis.size(axes)
    rows = [_rows(leaf, dim, num_ranks, wire.block) for leaf, dim in leaves]
    sent = wire.encode(jnp.concatenate(lax.optimization_barrier(rows), 1))
    total = _tree_sum(wire.decode(lax.all_to_all(sent, axes, 0, 0)))
    # As in `xla`, so that each rank has the whole derivative by the scale.
    total, after = (total, scale) if wire is _EXACT else (scaled(total, scale), 1.0)
    parts = jnp.split(total, np.cumsum([x.shape[1] for x in rows])[:-1])
    whole = [part for part, (_, dim) in zip(parts, leaves, strict=True) if dim is None]
    if whole:
        gathered = wire.decode(lax.all_gather(wire.encode(jnp.concatenate(whole)), axes))
        gathered = mark(gathered, kind=ALL_REDUCED, path="", axes=axes)
        whole = jnp.split(gathered, np.cumsum([part.size for part in whole])[:-1], 1)
    of_leaves = iter(whole)
    return [
        scaled(
            _whole(next(of_leaves), leaf) if dim is None else _shard(part, leaf, dim, num_ranks),
            after,
        ).astype(leaf.dtype)
        for part, (leaf, dim) in zip(parts, leaves, strict=True)
    ]


def _rows(leaf: jax.Array, dim: int | None, num_ranks: int, block: int) -> jax.Array:
    """Return each rank's part, `[ranks, size]`, wide enough to sum, padded to whole blocks."""
    flat = leaf.ravel() if dim is None else jnp.moveaxis(leaf, dim, 0).ravel()
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        flat = flat.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    width = math.ceil(leaf.size / num_ranks)
    rows = jnp.pad(flat, (0, num_ranks * width - leaf.size)).reshape(num_ranks, width)
    return jnp.pad(rows, ((0, 0), (0, -width % block)))


def _tree_sum(rows: jax.Array) -> jax.Array:
    while len(rows) > 1:
        pairs = rows[: len(rows) // 2 * 2 : 2] + rows[1::2]
        rows = jnp.concatenate([pairs, rows[-1:]]) if len(rows) % 2 else pairs
    return rows[0]


def _whole(rows: jax.Array, leaf: jax.Array) -> jax.Array:
    flat = rows[:, : math.ceil(leaf.size / len(rows))].ravel()
    return flat[: leaf.size].reshape(leaf.shape)


def _shard(part: jax.Array, leaf: jax.Array, dim: int | None, num_ranks: int) -> jax.Array:
    if dim is None:
        return leaf
    others = leaf.shape[:dim] + leaf.shape[dim + 1 :]
    rows = part.ravel()[: leaf.size // num_ranks].reshape(leaf.shape[dim] // num_ranks, *others)
    return jnp.moveaxis(rows, 0, dim)


def combine_options(num_bytes: int) -> dict[str, int]:
    """Return XLA's options for merging a step's psums on GPUs, or {} for its defaults.

    A merged psum starts with its last gradient, and the last psum stays exposed. So a step with few
    gradients is faster with at least eight psums, unless their start dominates.

    >>> combine_options(32 * MiB)
    {'xla_gpu_all_reduce_combine_threshold_bytes': 8388608}
    >>> combine_options(288 * MiB)
    {}
    """
    threshold = max(num_bytes // 8, _LEAST_COMBINED)
    if threshold >= _MOST_COMBINED or num_bytes <= _LEAST_COMBINED:
        return {}
    return {"xla_gpu_all_reduce_combine_threshold_bytes": threshold}


def group_options(group_bytes: int, num_ranks: int) -> dict[str, int]:
    """Return XLA's options for unmerged groups of gathers and reduce-scatters, on GPUs."""
    if not group_bytes:
        return {}
    return {
        "xla_gpu_all_gather_combine_threshold_bytes": group_bytes,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": max(1, group_bytes // num_ranks),
    }


def split_scale(scale: Scale, dtype: np.dtype) -> tuple[Scale, Scale]:
    """Return `[]` factors before and after the sum: before, if a float16 sum could overflow."""
    return (scale, 1.0) if dtype == jnp.float16 else (1.0, scale)


def scaled(x: jax.Array, scale: Scale) -> jax.Array:
    """Return `x` times a `[]` factor, in the dtype of `x`."""
    if isinstance(scale, (int, float)) and scale == 1:
        return x
    # In at least float32, since 1 / 3 in bfloat16 is 0.2 % too large. lax traces faster than jnp.
    wide = jnp.promote_types(x.dtype, jnp.float32)
    product = lax.mul(lax.convert_element_type(x, wide), lax.convert_element_type(scale, wide))
    return lax.convert_element_type(product, x.dtype)
