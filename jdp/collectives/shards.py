"""Reduce-scatter, all-gather and all-to-all, natively or with XLA."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jdp import axis, jax_compat
from jdp.axis import AxisName
from jdp.collectives import call_order
from jdp.collectives.buckets import joined, parts
from jdp.collectives.cpu.primitives import (
    SUMMED_DTYPES,
    Calls,
    all_gather_p,
    all_to_all_p,
    reduce_scatter_p,
)
from jdp.collectives.native import require_cpu, why_not
from jdp.collectives.xla import Scale, scaled, split_scale


def xla_reduce_scatter(
    buckets: Sequence[Sequence[jax.Array]],
    dims: Sequence[Sequence[int | None]],
    axis_name: AxisName,
    *,
    scale: Scale = 1.0,
    mesh: Mesh | None = None,
) -> list[list[jax.Array]]:
    """Sum every leaf over `axis_name`, and keep this rank's slice, as `reduce_scatter` does.

    XLA determines the order of additions and where they are rounded.
    """
    names = axis.names(axis_name)
    scatter = _exchanged if _does_not_wait(mesh) else _scattered
    platform = axis.platform(mesh)
    if platform == "tpu":
        scatter = _scattered_rows
    aborts = axis.aborts_in_bfloat16(platform)
    results = []
    for bucket, own_dims in zip(buckets, dims, strict=True):
        before, after = split_scale(scale, bucket[0].dtype)
        parts = [
            axis.psum(scaled(leaf, before), names, platform)
            if dim is None
            else scatter(scaled(leaf, before), dim, names, aborts)
            for leaf, dim in zip(axis.as_varying(list(bucket), names), own_dims, strict=True)
        ]
        results.append([scaled(part, after) for part in parts])
    return results


def xla_all_gather(
    buckets: Sequence[Sequence[jax.Array]],
    dims: Sequence[Sequence[int]],
    axis_name: AxisName,
    *,
    mesh: Mesh | None = None,
) -> list[list[jax.Array]]:
    """Join the slices of all ranks of `axis_name`, as `all_gather` does."""
    names = axis.names(axis_name)
    is_cpu = axis.platform(mesh) == "cpu"
    return [
        [
            (_gathered_bits if is_cpu and _is_short(part) else _gathered)(part, dim, names)
            for part, dim in zip(axis.as_varying(list(bucket), names), own_dims, strict=True)
        ]
        for bucket, own_dims in zip(buckets, dims, strict=True)
    ]


def xla_all_to_all(
    buckets: Sequence[Sequence[jax.Array]],
    dims: Sequence[Sequence[tuple[int, int]]],
    axis_name: AxisName,
    *,
    mesh: Mesh | None = None,
) -> list[list[jax.Array]]:
    """Send every rank of `axis_name` its slice of each leaf, as `all_to_all` does."""
    names = axis.names(axis_name)
    return [
        [
            _sent(leaf, split, joined, names)
            for leaf, (split, joined) in zip(
                axis.as_varying(list(bucket), names), own_dims, strict=True
            )
        ]
        for bucket, own_dims in zip(buckets, dims, strict=True)
    ]


# StableHLO refuses to split or to join arrays without elements.
def _scattered(leaf: jax.Array, dim: int, names: tuple[str, ...], aborts: bool) -> jax.Array:
    if leaf.size == 0:
        return lax.slice_in_dim(leaf, 0, leaf.shape[dim] // lax.axis_size(names), axis=dim)
    dtype = leaf.dtype
    if aborts and dtype == jnp.bfloat16:
        leaf = lax.convert_element_type(leaf, jnp.float32)
    part = lax.psum_scatter(leaf, names, scatter_dimension=dim, tiled=True)
    return lax.convert_element_type(part, dtype)


def _scattered_rows(leaf: jax.Array, dim: int, names: tuple[str, ...], aborts: bool) -> jax.Array:
    """Scatter a vector as rows: XLA for TPUs sums all of a vector on each device (v5e:2x4)."""
    # A tile of a TPU has 8 rows of 128.
    if leaf.ndim != 1 or not leaf.size or leaf.size % (8 * 128 * lax.axis_size(names)):
        return _scattered(leaf, dim, names, aborts)
    return _scattered(leaf.reshape(-1, 128), 0, names, aborts).ravel()


def _does_not_wait(mesh: Mesh | None) -> bool:
    """Whether XLA's reduce-scatter would end a run in which one process is slow."""
    if not jax_compat.CPU_SCATTER_DOES_NOT_WAIT or axis.platform(mesh) != "cpu":
        return False
    if mesh is None:
        return jax.process_count() > 1
    return len({device.process_index for device in mesh.devices.flat}) > 1


def _exchanged(leaf: jax.Array, dim: int, names: tuple[str, ...], aborts: bool) -> jax.Array:
    """Send every rank its slice, and add up those that arrive: as many bytes as a scatter."""
    if leaf.size == 0:
        return _scattered(leaf, dim, names, aborts)
    num_ranks = lax.axis_size(names)
    size = leaf.shape[dim] // num_ranks
    slices = leaf.reshape(*leaf.shape[:dim], num_ranks, size, *leaf.shape[dim + 1 :])
    arrived = lax.all_to_all(slices, names, dim, dim, tiled=True)
    wide = jnp.promote_types(leaf.dtype, jnp.float32) if _is_narrow(leaf.dtype) else leaf.dtype
    return arrived.sum(axis=dim, dtype=wide).astype(leaf.dtype)


def _is_narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def _gathered(part: jax.Array, dim: int, names: tuple[str, ...]) -> jax.Array:
    if part.size == 0:
        return lax.concatenate([part] * lax.axis_size(names), dim)
    return lax.all_gather(part, names, axis=dim, tiled=True)


def _sent(leaf: jax.Array, split: int, joined: int, names: tuple[str, ...]) -> jax.Array:
    if leaf.size == 0:
        part = lax.slice_in_dim(leaf, 0, leaf.shape[split] // lax.axis_size(names), axis=split)
        return lax.concatenate([part] * lax.axis_size(names), joined)
    return lax.all_to_all(leaf, names, split, joined, tiled=True)


def _is_short(part: jax.Array) -> bool:
    return part.dtype in (jnp.bfloat16, jnp.float16)


# XLA's CPU backend widens a gather of 16-bit floats, and would send twice their bytes.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _gathered_bits(part: jax.Array, dim: int, names: tuple[str, ...]) -> jax.Array:
    bits = _gathered(lax.bitcast_convert_type(part, jnp.uint16), dim, names)
    return lax.bitcast_convert_type(bits, part.dtype)


@_gathered_bits.defjvp
def _jvp(dim: int, names: tuple[str, ...], primals: Any, tangents: Any) -> tuple[Any, Any]:
    (part,), (slope,) = primals, tangents
    return _gathered_bits(part, dim, names), _gathered(slope, dim, names)


# Dtypes of whole bytes. XLA may pack several elements of other dtypes into one byte.
COPIED_DTYPES = SUMMED_DTYPES | {"bool", "complex64", "complex128"}


def native_reduce_scatter(
    buckets: Sequence[Sequence[jax.Array]],
    dims: Sequence[Sequence[int | None]],
    axis_name: AxisName,
    *,
    scale: Scale = 1.0,
    mesh: Mesh | None = None,
) -> list[list[jax.Array]]:
    """Sum every leaf over `axis_name`, and keep this rank's slice, as `reduce_scatter` does.

    Each element is summed as in `collectives.native`: in the order of the ranks, in at least
    float32, scaled and rounded once. So a slice has the same bits as that slice of the all-reduce.
    """
    axes = axis.names(axis_name)
    require_cpu(axes, mesh)
    calls = Calls(axes, mesh)
    results = []
    for bucket, own_dims in zip(buckets, dims, strict=True):
        leaves = axis.as_varying(list(bucket), axes)
        if bucket[0].dtype.name not in SUMMED_DTYPES:
            results += xla_reduce_scatter([leaves], [own_dims], axes, scale=scale)
        else:
            results.append(calls.summed(reduce_scatter_p, leaves, scale, dims=tuple(own_dims)))
    calls.end()
    return results


def native_all_gather(
    buckets: Sequence[Sequence[jax.Array]],
    dims: Sequence[Sequence[int]],
    axis_name: AxisName,
    *,
    mesh: Mesh | None = None,
    overwrite: Sequence[Sequence[jax.Array | None]] | None = None,
) -> list[list[jax.Array]]:
    """Join the slices of all ranks of `axis_name`, as `all_gather` does."""
    overwrite = [[None] * len(bucket) for bucket in buckets] if overwrite is None else overwrite
    more = [
        {"overwritten": own, "overwrites": tuple(x is not None for x in own)} for own in overwrite
    ]
    return _copied(all_gather_p, xla_all_gather, buckets, dims, axis_name, mesh, more)


def native_all_to_all(
    buckets: Sequence[Sequence[jax.Array]],
    dims: Sequence[Sequence[tuple[int, int]]],
    axis_name: AxisName,
    *,
    mesh: Mesh | None = None,
) -> list[list[jax.Array]]:
    """Send every rank of `axis_name` its slice of each leaf, as `all_to_all` does."""
    return _copied(all_to_all_p, xla_all_to_all, buckets, dims, axis_name, mesh)


def _copied(
    primitive: Any,
    by_xla: Callable[..., list],
    buckets: Sequence[Sequence[jax.Array]],
    dims: Sequence[Sequence[Any]],
    axis_name: AxisName,
    mesh: Mesh | None,
    more: Sequence[dict[str, Any]] | None = None,
) -> list[list[jax.Array]]:
    axes = axis.names(axis_name)
    require_cpu(axes, mesh)
    calls = Calls(axes, mesh)
    results = []
    for bucket, own_dims, own in zip(buckets, dims, more or [{}] * len(buckets), strict=True):
        leaves = axis.as_varying(list(bucket), axes)
        if any(leaf.dtype.name not in COPIED_DTYPES for leaf in bucket):
            results += by_xla([leaves], [own_dims], axes)
        else:
            one = np.float32(1)
            results.append(calls.results(primitive, leaves, one, dims=tuple(own_dims), **own))
    calls.end()
    return results


def reduce_scatter(
    buckets: Sequence[Sequence[jax.Array]],
    dims: Sequence[Sequence[int | None]],
    axis_name: AxisName,
    *,
    scale: Scale = 1.0,
    mesh: Mesh | None = None,
) -> list[list[jax.Array]]:
    """Sum every leaf over `axis_name`, and keep this rank's slice, of some leaves all of it.

    In steps on CPUs of one host a slice has the same bits as that slice of `collectives.auto`,
    which is native in the same cases. It is linear; `all_gather` is its transpose.

    Args:
      dims: for each leaf the dim that is split. The number of ranks divides its size. Ranks keep
        the slices in the order of `lax.axis_index(axis_name)`. None for a leaf that stays whole:
        every rank keeps its sum. So a few small leaves need no call of their own.
      scale: multiplies the sum; a number, or `[]` float, the same on every rank.
      mesh: the mesh of the ranks; None if it is not known, as inside a `shard_map` of your own.
    """
    names = axis.names(axis_name)
    _require_dims(buckets, dims, lax.axis_size(names))
    floats = [list(map(parts, bucket)) for bucket in buckets]
    in_front = [any(leaf.dtype.kind == "c" for leaf in bucket) for bucket in buckets]
    places = [
        [None if dim is None else dim + further for dim in own]
        for own, further in zip(dims, in_front, strict=True)
    ]
    sums = _chosen(native_reduce_scatter, xla_reduce_scatter, names, mesh)(
        floats, places, names, scale=scale, mesh=mesh
    )
    return [list(map(joined, *each)) for each in zip(sums, buckets, strict=True)]


def all_gather(
    buckets: Sequence[Sequence[jax.Array]],
    dims: Sequence[Sequence[int]],
    axis_name: AxisName,
    *,
    mesh: Mesh | None = None,
    overwrite: Sequence[Sequence[jax.Array | None]] | None = None,
) -> list[list[jax.Array]]:
    """Join the slices of all ranks of `axis_name`, leaf by leaf.

    It is linear; `reduce_scatter` is its transpose.

    Args:
      mesh: the mesh of the ranks; None if it is not known, as inside a `shard_map` of your own.
      overwrite: for each leaf an array like its result, whose memory the result takes where the
        call is native; None for no array. If that array is not needed any more, XLA writes this
        rank's slice into it, and only the other slices are copied; if it is, XLA copies it first.
    """
    names = axis.names(axis_name)
    _require_dims(buckets, dims, 1)
    if not is_native(names, mesh):
        return xla_all_gather(buckets, dims, names, mesh=mesh)
    return native_all_gather(buckets, dims, names, mesh=mesh, overwrite=overwrite)


def all_to_all(
    buckets: Sequence[Sequence[jax.Array]],
    dims: Sequence[Sequence[tuple[int, int]]],
    axis_name: AxisName,
    *,
    mesh: Mesh | None = None,
) -> list[list[jax.Array]]:
    """Send every rank of `axis_name` its slice of each leaf, and join the slices that arrive.

    A leaf gets the value of `lax.all_to_all(leaf, axis_name, split, joined, tiled=True)`. It is
    linear; the same with each pair of dims swapped is its transpose.

    Args:
      mesh: the mesh of the ranks; None if it is not known, as inside a `shard_map` of your own.
    """
    names = axis.names(axis_name)
    _require_dims(buckets, [[split for split, _ in own] for own in dims], lax.axis_size(names))
    _require_dims(buckets, [[joined for _, joined in own] for own in dims], 1)
    return _chosen(native_all_to_all, xla_all_to_all, names, mesh)(buckets, dims, names, mesh=mesh)


def is_native(names: tuple[str, ...], mesh: Mesh | None) -> bool:
    """Whether the calls of this module are native where they are traced.

    The choice is that of `auto`, so that both return the same bits.
    """
    return not (call_order.why_not() or why_not(names, mesh))


def _chosen(
    native: Callable, other: Callable, names: tuple[str, ...], mesh: Mesh | None
) -> Callable:
    return native if is_native(names, mesh) else other


def _require_dims(
    buckets: Sequence[Sequence[jax.Array]], dims: Sequence[Sequence[int | None]], num_ranks: int
) -> None:
    """Raise a ValueError unless every leaf that is cut has a dim of a size that can be."""
    if [len(bucket) for bucket in buckets] != [len(own) for own in dims]:
        raise ValueError(
            f"dims must have one number for each leaf, but {[len(own) for own in dims]} were given "
            f"for buckets of {[len(bucket) for bucket in buckets]} leaves."
        )
    for bucket, own_dims in zip(buckets, dims, strict=True):
        for leaf, dim in zip(bucket, own_dims, strict=True):
            if dim is None:
                continue
            if not 0 <= dim < leaf.ndim or leaf.shape[dim] % num_ranks:
                raise ValueError(
                    f"a leaf of shape {leaf.shape} cannot be cut along dim {dim} into {num_ranks} "
                    "equal slices. Choose a dim whose size divides by the number of ranks, or "
                    "all-reduce that leaf."
                )
