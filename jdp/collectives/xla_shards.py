"""Reduce-scatter, all-gather and all-to-all by XLA's collectives."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jdp import axis
from jdp.axis import AxisName, FurtherSpec
from jdp.collectives.buckets import pack
from jdp.collectives.xla import Scale, exchanged, packs, scaled, split_scale, xla

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
    platform = axis.platform(mesh)
    aborts, results = axis.aborts_in_bfloat16(platform), []
    scatter = functools.partial(_scattered_rows if platform == "tpu" else _scattered, aborts=aborts)
    if axis.is_between_processes(mesh):
        scatter = _exchanged
    is_packed = packs(names, mesh)
    for bucket, own_dims, specs in zip(buckets, dims, specs_of(further, dims), strict=True):
        if is_packed and all(dim is None for dim in own_dims):
            results += xla([bucket], names, scale=scale, mesh=mesh)
            continue
        if is_packed:
            leaves = [*zip(bucket, own_dims, strict=True)]
            results.append(exchanged(leaves, names, scale=scale))
            continue
        before, after = split_scale(scale, bucket[0].dtype)
        leaves = axis.as_varying(list(bucket), names)
        parts = [
            axis.psum(scaled(leaf, before), names, platform)
            if dim is None
            else axis.on_local_shards(
                functools.partial(scatter, dim=dim, names=names), scaled(leaf, before), spec
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
    is_cpu, is_packed = axis.platform(mesh) == "cpu", packs(names, mesh)

    def gathered(part: jax.Array, dim: int) -> jax.Array:
        is_short = part.dtype in (jnp.bfloat16, jnp.float16)
        return (_gathered_bits if is_cpu and is_short else _gathered)(part, dim, names)

    results = []
    for bucket, own_dims, specs in zip(buckets, dims, specs_of(further, dims), strict=True):
        parts = axis.as_varying(list(bucket), names)
        if is_packed and len(parts) > 1:
            whole = gathered(pack(lax.optimization_barrier(parts)), 0)
            rows = whole.reshape(lax.axis_size(names), -1)
            columns = jnp.split(rows, np.cumsum([part.size for part in parts])[:-1], 1)
            results.append([*map(_concatenated, columns, parts, own_dims)])
        else:
            calls = [functools.partial(gathered, dim=dim) for dim in own_dims]
            results.append([*map(axis.on_local_shards, calls, parts, specs)])
    return results


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


def _exchanged(leaf: jax.Array, dim: int, names: tuple[str, ...]) -> jax.Array:
    return exchanged([(leaf, dim)], names)[0]


def _concatenated(parts: jax.Array, like: jax.Array, dim: int) -> jax.Array:
    """Concatenate all ranks' parts `[ranks, size]` of a leaf along a dim."""
    shape = list(like.shape)
    shape[dim] *= len(parts)
    return jnp.moveaxis(parts.reshape(len(parts), *like.shape), 0, dim).reshape(shape)


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
