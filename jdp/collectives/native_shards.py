"""Reduce-scatter, all-gather and all-to-all by `jdp/csrc/cpu`, between CPUs of one host."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jdp import axis
from jdp.axis import AxisName
from jdp.collectives import xla_shards
from jdp.collectives.cpu.primitives import (
    SUMMED_DTYPES,
    Calls,
    all_gather_p,
    all_to_all_p,
    reduce_scatter_p,
)
from jdp.collectives.native import require_cpu
from jdp.collectives.xla import Scale

# XLA may pack several elements of others into a byte.
COPIED_DTYPES = SUMMED_DTYPES | {"bool", "complex64", "complex128"}


def reduce_scatter(
    buckets: Sequence[Sequence[jax.Array]],
    dims: Sequence[Sequence[int | None]],
    axis_name: AxisName,
    *,
    scale: Scale = 1.0,
    mesh: Mesh | None = None,
) -> list[list[jax.Array]]:
    """Reduce-scatter as `shards.reduce_scatter` does, with the bits of `collectives.native`."""
    axes = axis.names(axis_name)
    require_cpu(axes, mesh)
    calls = Calls(axes, mesh)
    results = []
    for bucket, own_dims in zip(buckets, dims, strict=True):
        leaves = axis.as_varying(list(bucket), axes)
        if bucket[0].dtype.name not in SUMMED_DTYPES:
            results += xla_shards.reduce_scatter([leaves], [own_dims], axes, scale=scale)
        else:
            results.append(calls.summed(reduce_scatter_p, leaves, scale, dims=tuple(own_dims)))
    calls.end()
    return results


def all_gather(
    buckets: Sequence[Sequence[jax.Array]],
    dims: Sequence[Sequence[int]],
    axis_name: AxisName,
    *,
    mesh: Mesh | None = None,
    overwrite: Sequence[Sequence[jax.Array | None]] | None = None,
) -> list[list[jax.Array]]:
    """All-gather as `shards.all_gather` does."""
    overwrite = [[None] * len(bucket) for bucket in buckets] if overwrite is None else overwrite
    more = [
        {"overwritten": own, "overwrites": tuple(x is not None for x in own)} for own in overwrite
    ]
    return _copied(all_gather_p, xla_shards.all_gather, buckets, dims, axis_name, mesh, more)


def all_to_all(
    buckets: Sequence[Sequence[jax.Array]],
    dims: Sequence[Sequence[tuple[int, int]]],
    axis_name: AxisName,
    *,
    mesh: Mesh | None = None,
) -> list[list[jax.Array]]:
    """All-to-all as `shards.all_to_all` does."""
    return _copied(all_to_all_p, xla_shards.all_to_all, buckets, dims, axis_name, mesh)


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
