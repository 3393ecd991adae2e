"""The all-reduce that XLA chooses: NCCL between GPUs, gloo between CPU processes."""

from collections.abc import Sequence

import jax
from jax import lax

from jdp import axis
from jdp.axis import AxisName


def xla(
    buckets: Sequence[Sequence[jax.Array]],
    axis_name: AxisName,
    *,
    scale: float | jax.Array = 1.0,
) -> list[list[jax.Array]]:
    """Sum every leaf over `axis_name` with `lax.psum`, one call for each bucket.

    The reference that the other algorithms are tested against. XLA may merge the calls.

    Args:
      buckets: lists of leaves, one dtype each; any shapes.
      axis_name: a name, or a tuple of names, bound by `shard_map` or `pmap`.
      scale: multiplies the sum; a number, or `[]` float, the same on every rank.

    Returns:
      The same lists, summed and scaled, in the dtype of each leaf.
    """
    sums = [lax.psum(list(bucket), axis.names(axis_name)) for bucket in buckets]
    return [[scaled(leaf, scale) for leaf in bucket] for bucket in sums]


def scaled(leaf: jax.Array, scale: float | jax.Array) -> jax.Array:
    """Multiply by `scale` without changing the dtype."""
    if isinstance(scale, (int, float)) and scale == 1:
        return leaf
    return (leaf * scale).astype(leaf.dtype)
