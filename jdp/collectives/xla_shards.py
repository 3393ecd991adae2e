"""Reduce-scatter, all-gather and all-to-all by XLA's collectives."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jdp import axis, jax_compat
from jdp.axis import AxisName, FurtherSpec
from jdp.collectives.xla import Scale, scaled, split_scale

# Of each leaf of each bucket; None: none is split by the compiler.
Further = Sequence[Sequence[FurtherSpec]] | None


def reduce_scatter(
    buckets: Sequence[Sequence[jax.Array]],
    dims: Sequence[Sequence[int | None]],
    axis_name: AxisName,
    *,
    scale: Scale = 1.0,
    mesh: Mesh | None = None,
    further: Further = None,
) -> list[list[jax.Array]]:
    """Reduce-scatter as `shards.reduce_scatter` does; XLA chooses order and rounding."""
    names = axis.names(axis_name)
    scatter = _exchanged if _does_not_wait(mesh) else _scattered
    platform = axis.platform(mesh)
    if platform == "tpu":
        scatter = _scattered_rows
    aborts = axis.aborts_in_bfloat16(platform)
    results = []
    for bucket, own_dims, specs in zip(buckets, dims, specs_of(further, dims), strict=True):
        before, after = split_scale(scale, bucket[0].dtype)
        leaves = axis.as_varying(list(bucket), names)
        parts = [
            axis.psum(scaled(leaf, before), names, platform)
            if dim is None
            else axis.on_local_shards(
                functools.partial(scatter, dim=dim, names=names, aborts=aborts),
                scaled(leaf, before),
                spec,
            )
            for leaf, dim, spec in zip(leaves, own_dims, specs, strict=True)
        ]
        results.append([scaled(part, after) for part in parts])
    return results


def all_gather(
    buckets: Sequence[Sequence[jax.Array]],
    dims: Sequence[Sequence[int]],
    axis_name: AxisName,
    *,
    mesh: Mesh | None = None,
    further: Further = None,
) -> list[list[jax.Array]]:
    """All-gather as `shards.all_gather` does."""
    names = axis.names(axis_name)
    is_cpu = axis.platform(mesh) == "cpu"

    def gather(part: jax.Array, dim: int, spec: FurtherSpec) -> jax.Array:
        is_short = part.dtype in (jnp.bfloat16, jnp.float16)
        gathered = _gathered_bits if is_cpu and is_short else _gathered
        return axis.on_local_shards(lambda x: gathered(x, dim, names), part, spec)

    return [
        [*map(gather, axis.as_varying(list(bucket), names), own_dims, specs)]
        for bucket, own_dims, specs in zip(buckets, dims, specs_of(further, dims), strict=True)
    ]


def specs_of(further: Further, dims: Sequence[Sequence[Any]]) -> Sequence[Sequence[FurtherSpec]]:
    """Return `further`, one spec for each leaf."""
    return further if further is not None else [[()] * len(own) for own in dims]


def all_to_all(
    buckets: Sequence[Sequence[jax.Array]],
    dims: Sequence[Sequence[tuple[int, int]]],
    axis_name: AxisName,
    *,
    mesh: Mesh | None = None,
) -> list[list[jax.Array]]:
    """All-to-all as `shards.all_to_all` does."""
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


# StableHLO refuses to split or concatenate empty arrays.
def _scattered(leaf: jax.Array, dim: int, names: tuple[str, ...], aborts: bool) -> jax.Array:
    if leaf.size == 0:
        return lax.slice_in_dim(leaf, 0, leaf.shape[dim] // lax.axis_size(names), axis=dim)
    dtype = leaf.dtype
    if aborts and dtype == jnp.bfloat16:
        leaf = lax.convert_element_type(leaf, jnp.float32)
    part = lax.psum_scatter(leaf, names, scatter_dimension=dim, tiled=True)
    return lax.convert_element_type(part, dtype)


def _scattered_rows(leaf: jax.Array, dim: int, names: tuple[str, ...], aborts: bool) -> jax.Array:
    """Scatter a vector as rows, since XLA:TPU sums all of a vector on each device (v5e:2x4)."""
    # A TPU tile has 8 rows of 128.
    if leaf.ndim != 1 or not leaf.size or leaf.size % (8 * 128 * lax.axis_size(names)):
        return _scattered(leaf, dim, names, aborts)
    return _scattered(leaf.reshape(-1, 128), 0, names, aborts).ravel()


def _does_not_wait(mesh: Mesh | None) -> bool:
    """Whether XLA's reduce-scatter would end a run with one slow process."""
    if not jax_compat.CPU_SCATTER_DOES_NOT_WAIT or axis.platform(mesh) != "cpu":
        return False
    if mesh is None:
        return jax.process_count() > 1
    return len({device.process_index for device in mesh.devices.flat}) > 1


def _exchanged(leaf: jax.Array, dim: int, names: tuple[str, ...], aborts: bool) -> jax.Array:
    """Reduce-scatter by an all-to-all, and a local sum."""
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


# XLA:CPU would widen a gather of 16-bit floats.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _gathered_bits(part: jax.Array, dim: int, names: tuple[str, ...]) -> jax.Array:
    bits = _gathered(lax.bitcast_convert_type(part, jnp.uint16), dim, names)
    return lax.bitcast_convert_type(bits, part.dtype)


@_gathered_bits.defjvp
def _jvp(dim: int, names: tuple[str, ...], primals: Any, tangents: Any) -> tuple[Any, Any]:
    (part,), (slope,) = primals, tangents
    return _gathered_bits(part, dim, names), _gathered(slope, dim, names)
