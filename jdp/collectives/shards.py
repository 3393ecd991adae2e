"""Reduce-scatter, all-gather and all-to-all, natively or with XLA."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh

from jdp import axis
from jdp.axis import AxisName
from jdp.collectives import call_order, native_shards, xla_shards
from jdp.collectives.buckets import joined, parts
from jdp.collectives.native import why_not
from jdp.collectives.quantized import options_of, summed_shards
from jdp.collectives.xla import Scale
from jdp.collectives.xla_shards import Further


def reduce_scatter(
    buckets: Sequence[Sequence[jax.Array]],
    dims: Sequence[Sequence[int | None]],
    axis_name: AxisName,
    *,
    scale: Scale = 1.0,
    mesh: Mesh | None = None,
    further: Further = None,
    all_reduce: Any = None,
) -> list[list[jax.Array]]:
    """Sum every leaf over `axis_name`, and keep this rank's shard.

    In steps on CPUs of one host a shard has the bits of the same slice of `collectives.auto`,
    native in the same cases. It is linear; `all_gather` is its transpose.

    Args:
      dims: each leaf's sharded dim, a multiple of the number of ranks, in the order of
        `lax.axis_index(axis_name)`. None: every rank keeps the whole sum, so small leaves need no
        call of their own.
      scale, mesh: as for `collectives.auto`.
      further: how the compiler splits each leaf, along other dims than `dims`.
      all_reduce: `collectives.quantized` quantizes shards, too, but no leaf that `further` splits.
    """
    names = axis.names(axis_name)
    _require_dims(buckets, dims, lax.axis_size(names))
    floats = [list(map(parts, bucket)) for bucket in buckets]
    in_front = [any(leaf.dtype.kind == "c" for leaf in bucket) for bucket in buckets]
    places = [
        [None if dim is None else dim + further for dim in own]
        for own, further in zip(dims, in_front, strict=True)
    ]
    if further is not None:
        further = [
            [((),) * is_complex + spec if spec else () for spec in own]
            for own, is_complex in zip(further, in_front, strict=True)
        ]
    options = options_of(all_reduce)
    if options is None and is_native(names, mesh):
        sums = native_shards.reduce_scatter(floats, places, names, scale=scale, mesh=mesh)
    else:
        reduce = xla_shards.reduce_scatter
        if options is not None:
            reduce = functools.partial(summed_shards, **options)
        sums = reduce(floats, places, names, scale=scale, mesh=mesh, further=further)
    return [list(map(joined, *each)) for each in zip(sums, buckets, strict=True)]


def all_gather(
    buckets: Sequence[Sequence[jax.Array]],
    dims: Sequence[Sequence[int]],
    axis_name: AxisName,
    *,
    mesh: Mesh | None = None,
    overwrite: Sequence[Sequence[jax.Array | None]] | None = None,
    further: Further = None,
) -> list[list[jax.Array]]:
    """Concatenate the shards of all ranks of `axis_name`, leaf by leaf.

    It is linear; `reduce_scatter` is its transpose.

    Args:
      overwrite: for each leaf None or an array like its result, whose memory a native call reuses.
        XLA writes this rank's shard into a dead array, and copies a live one first.
      further: how the compiler splits each leaf, along other dims than `dims`.
    """
    names = axis.names(axis_name)
    _require_dims(buckets, dims, 1)
    if not is_native(names, mesh):
        return xla_shards.all_gather(buckets, dims, names, mesh=mesh, further=further)
    return native_shards.all_gather(buckets, dims, names, mesh=mesh, overwrite=overwrite)


def all_to_all(
    buckets: Sequence[Sequence[jax.Array]],
    dims: Sequence[Sequence[tuple[int, int]]],
    axis_name: AxisName,
    *,
    mesh: Mesh | None = None,
) -> list[list[jax.Array]]:
    """Send every rank of `axis_name` its slice of each leaf, and concatenate the received slices.

    As `lax.all_to_all(leaf, axis_name, split, joined, tiled=True)`. It is linear; its transpose
    swaps each pair of dims.
    """
    names = axis.names(axis_name)
    _require_dims(buckets, [[split for split, _ in own] for own in dims], lax.axis_size(names))
    _require_dims(buckets, [[joined for _, joined in own] for own in dims], 1)
    return _chosen(names, mesh).all_to_all(buckets, dims, names, mesh=mesh)


def is_native(names: tuple[str, ...], mesh: Mesh | None) -> bool:
    """Whether these calls are native here, as `auto` chooses."""
    return not (call_order.why_not() or why_not(names, mesh))


def _chosen(names: tuple[str, ...], mesh: Mesh | None) -> Any:
    return native_shards if is_native(names, mesh) else xla_shards


def _require_dims(
    buckets: Sequence[Sequence[jax.Array]], dims: Sequence[Sequence[int | None]], num_ranks: int
) -> None:
    if [len(bucket) for bucket in buckets] != [len(own) for own in dims]:
        raise ValueError(
            f"dims must have one number per leaf, got {[len(own) for own in dims]} for buckets "
            f"of {[len(bucket) for bucket in buckets]} leaves."
        )
    for bucket, own_dims in zip(buckets, dims, strict=True):
        for leaf, dim in zip(bucket, own_dims, strict=True):
            if dim is None:
                continue
            if not 0 <= dim < leaf.ndim or leaf.shape[dim] % num_ranks:
                raise ValueError(
                    f"a leaf of shape {leaf.shape} does not divide into {num_ranks} equal slices "
                    f"along dim {dim}. Use a dim whose size is a multiple of the number of "
                    "ranks, or all-reduce that leaf."
                )
