"""Ring all-reduce in plain JAX."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jdp import axis
from jdp.analysis.marks import ALL_REDUCED, mark
from jdp.axis import AxisName
from jdp.collectives.buckets import pack, unpack
from jdp.collectives.xla import Scale, scaled, split_scale


def ring(
    buckets: Sequence[Sequence[jax.Array]],
    axis_name: AxisName,
    *,
    scale: Scale = 1.0,
    mesh: Mesh | None = None,
) -> list[list[jax.Array]]:
    """Sum every leaf over `axis_name` by passing chunks of each bucket around a ring.

    It takes 2(n - 1) steps. A rank sends 2(n - 1)/n of the bucket's bytes, the minimum (Patarasuk &
    Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002).

    Args:
      buckets: lists of leaves, one dtype each; any shapes. Sums are taken in that dtype.
      axis_name: a name, or a tuple of names, bound by `shard_map` or `pmap`.
      scale: multiplies the sum; a number, or `[]` float, equal on all ranks.
      mesh: unused.

    Returns:
      The same lists, summed and scaled, in each leaf's dtype.

    Raises:
      ValueError: inside `shard_map(check_vma=True)`, which types results of `ppermute` as varying.
    """
    require_untyped(axis_name, "ring", "ppermute")
    axes = axis.in_mesh_order(axis_name)
    results = []
    for bucket in buckets:
        before, after = split_scale(scale, bucket[0].dtype)
        total = _ring(scaled(pack(bucket), before), axes)
        # The analysis cannot prove results of `ppermute` uniform.
        total = mark(total, kind=ALL_REDUCED, path="", axes=axes)
        results.append([scaled(leaf, after) for leaf in unpack(total, like=bucket)])
    return results


def require_untyped(axis_name: AxisName, algorithm: str, last: str) -> None:
    """Refuse an algorithm whose `last` operation has a varying result for JAX."""
    if axis.is_typed(axis_name):
        raise ValueError(
            f"collectives.{algorithm} cannot run in a shard_map with check_vma=True: JAX types the "
            f"result of {last} as varying, so out_specs P() would refuse the mean. Write "
            "check_vma=False there, or all_reduce=jdp.collectives.xla."
        )


def _ring(x: jax.Array, axis_name: tuple[str, ...]) -> jax.Array:
    # A chunk is an n-th of one rank's vector, zero-padded to a multiple of n.
    n, rank = lax.axis_size(axis_name), lax.axis_index(axis_name)
    to_next = [(i, (i + 1) % n) for i in range(n)]
    chunks = jnp.pad(x, (0, -x.size % n)).reshape(n, -(-x.size // n))

    # Reduce-scatter: afterwards rank r holds the sum of chunk r + 1.
    for step in range(n - 1):
        received = lax.ppermute(chunks[(rank - step) % n], axis_name, to_next)
        chunks = chunks.at[(rank - step - 1) % n].add(received)

    # All-gather: chunks are only copied, so all ranks end with equal bits.
    for step in range(n - 1):
        received = lax.ppermute(chunks[(rank - step + 1) % n], axis_name, to_next)
        chunks = chunks.at[(rank - step) % n].set(received)

    return chunks.reshape(-1)[: x.size]
