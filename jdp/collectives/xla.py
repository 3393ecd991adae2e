"""XLA's all-reduce: NCCL between GPUs, gloo between CPU processes."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jdp import axis
from jdp.axis import AxisName

Scale = float | jax.Array

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

    The other algorithms are tested against it. XLA may merge the calls.

    Args:
      buckets: lists of leaves, one dtype each; any shapes.
      axis_name: a name, or a tuple of names, bound by `shard_map` or `pmap`.
      scale: multiplies the sum; a number, or `[]` float, equal on all ranks.
      mesh: the ranks' mesh, since CPUs need another program; None: JAX's default devices.

    Returns:
      The same lists, summed and scaled, in each leaf's dtype.
    """
    results = []
    for bucket in buckets:
        before, after = split_scale(scale, bucket[0].dtype)
        parts = [scaled(leaf, before) for leaf in bucket]
        sums = axis.psum(parts, axis_name, axis.platform(mesh))
        results.append([scaled(leaf, after) for leaf in sums])
    return results


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
