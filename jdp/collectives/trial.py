"""A reduction of known numbers between GPUs, compared with lax.psum before the first use.

It was compiled and never run.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdp.collectives.split import pairs
from jdp.collectives.xla import xla

# What is reduced, as (dtype, size): on NVLink at least one for each algorithm of
# jdp/csrc/cuda/plan.cc. Values count up to the modulus, so that all sums are exact.
TRIED = (("bfloat16", 1001), ("float32", 3), ("float32", 300_001), ("float32", 4_300_001))
_MODULUS = {"bfloat16": 7, "float32": 251}


def difference(mesh: Mesh, axes: tuple[str, ...], key: int) -> str:
    """Reduce some numbers, and say where lax.psum gives others; "" if nowhere.

    Args:
      mesh: of GPUs.
      axes: names of the mesh axes that are reduced over.
      key: of the communicator.
    """
    try:
        compared = jax.block_until_ready(comparison(mesh, axes, key)())
    except (RuntimeError, ValueError) as error:  # Which of them a failed run is depends on JAX.
        return f"the first reduction failed ({error})"
    for (dtype, size), of_bucket in zip(TRIED, compared, strict=True):
        for shard in of_bucket.addressable_shards:
            num_wrong, largest = np.asarray(shard.data)[0]
            if num_wrong:
                return (
                    f"{num_wrong:.0f} of {size} sums of {dtype} on {shard.device} are not those of "
                    f"lax.psum, by up to {largest:g}"
                )
    return ""


def comparison(mesh: Mesh, axes: tuple[str, ...], key: int) -> Any:
    """Give what `difference` runs: a jitted function of nothing.

    Args:
      mesh: of GPUs.
      axes: names of the mesh axes that are reduced over.
      key: of the communicator.

    Returns:
      A function that gives, for each bucket, `[ranks, 2]` float32: how many sums differ, NaN among
      them, and by how much.
    """

    def on_rank() -> list[jax.Array]:
        place = lax.axis_index(mesh.axis_names)
        buckets = [[_values(place, dtype, size)] for dtype, size in TRIED]
        numbers = range(len(buckets))
        ours = pairs(buckets, axes, scale=0.5, numbers=numbers, communicator=key)
        theirs = xla(buckets, axes, scale=0.5)
        return [_compared(a, b) for [a], [b] in zip(ours, theirs, strict=True)]

    return jax.jit(
        jax.shard_map(
            on_rank, mesh=mesh, in_specs=(), out_specs=P(mesh.axis_names), check_vma=False
        )
    )


def _values(place: jax.Array, dtype: str, size: int) -> jax.Array:
    return ((jnp.arange(size) * 3 + place * 5) % _MODULUS[dtype]).astype(dtype)


def _compared(ours: jax.Array, theirs: jax.Array) -> jax.Array:
    apart = jnp.abs(ours.astype(jnp.float32) - theirs.astype(jnp.float32))
    return jnp.stack([jnp.sum(apart != 0, dtype=jnp.float32), jnp.max(apart)])[None]
