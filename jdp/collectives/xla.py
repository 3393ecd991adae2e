"""The all-reduce that XLA chooses: NCCL between GPUs, gloo between CPU processes."""

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
# GPUs of a host send about that many bytes in the time that one all-reduce takes to begin.
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

    The reference that the other algorithms are tested against. XLA may merge the calls.

    Args:
      buckets: lists of leaves, one dtype each; any shapes.
      axis_name: a name, or a tuple of names, bound by `shard_map` or `pmap`.
      scale: multiplies the sum; a number, or `[]` float, the same on every rank.
      mesh: of the ranks, since CPUs need another program; None: JAX's default devices.

    Returns:
      The same lists, summed and scaled, in the dtype of each leaf.
    """
    results = []
    for bucket in buckets:
        before, after = split_scale(scale, bucket[0].dtype)
        parts = [scaled(leaf, before) for leaf in bucket]
        sums = axis.psum(parts, axis_name, axis.platform(mesh))
        results.append([scaled(leaf, after) for leaf in sums])
    return results


def combine_options(num_bytes: int) -> dict[str, int]:
    """Return XLA's options for merging the psums of a step on GPUs, given its bytes of gradients.

    A merged psum starts when its last gradient is ready, and no backward pass hides the last one:
    a step with few gradients is faster with several small ones. At least eight, unless beginning
    them would take most of their time; no option if XLA's own choice is better.

    >>> combine_options(32 * MiB)
    {'xla_gpu_all_reduce_combine_threshold_bytes': 8388608}
    >>> combine_options(288 * MiB)
    {}
    """
    threshold = max(num_bytes // 8, _LEAST_COMBINED)
    if threshold >= _MOST_COMBINED or num_bytes <= _LEAST_COMBINED:
        return {}
    return {"xla_gpu_all_reduce_combine_threshold_bytes": threshold}


def split_scale(scale: Scale, dtype: np.dtype) -> tuple[Scale, Scale]:
    """Return the factors before and after the sum.

    One after it rounds once; but a sum of float16 may exceed 65504 although its mean does not.
    """
    return (scale, 1.0) if dtype == jnp.float16 else (1.0, scale)


def scaled(x: jax.Array, scale: Scale) -> jax.Array:
    """Multiply by `scale`, and keep the dtype."""
    if isinstance(scale, (int, float)) and scale == 1:
        return x
    # In at least float32: 1 / 3 in bfloat16 is 0.2 % too large. lax takes a quarter less time to
    # trace than jnp, which counts for 10,000 leaves.
    wide = jnp.promote_types(x.dtype, jnp.float32)
    product = lax.mul(lax.convert_element_type(x, wide), lax.convert_element_type(scale, wide))
    return lax.convert_element_type(product, x.dtype)
