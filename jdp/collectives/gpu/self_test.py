"""A reduction of known numbers between GPUs, compared with lax.psum before the first use.

A matmul runs at the same time, as in a step: XLA must be able to load it while the reduction
waits. It ran between two processes on one GPU.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdp.collectives.gpu.start_done import pairs
from jdp.collectives.xla import xla

# The buckets, as (dtype, size), with at least one for each algorithm of jdp/csrc/cuda/plan.cc that
# these GPUs use. Values count up to the modulus, so that all sums are exact.
TRIED = (("bfloat16", 1001), ("float32", 3), ("float32", 300_001), ("float32", 4_300_001))
_MODULUS = {"bfloat16": 7, "float32": 251}
_WIDTH = 512  # rows and columns of the matmul


def difference(mesh: Mesh, axes: tuple[str, ...], key: int) -> str:
    """Reduce some numbers, and return how the results differ from lax.psum's, "" if they do not."""
    try:
        compared = jax.block_until_ready(comparison(mesh, axes, key)())
    except (RuntimeError, ValueError) as error:  # JAX raises either for a failed run
        return f"the first reduction failed ({error})"
    *of_buckets, of_matmul = compared
    for (dtype, size), of_bucket in zip(TRIED, of_buckets, strict=True):
        what = f"of {size} sums of {dtype} on {{}} are not those of lax.psum"
        if reason := _reason(what, of_bucket):
            return reason
    what = f"of {_WIDTH**2} elements of a matmul beside them on {{}} are wrong"
    return _reason(what, of_matmul)


def comparison(mesh: Mesh, axes: tuple[str, ...], key: int) -> Any:
    """Return the program of `difference`: a jitted function without arguments.

    It returns an array `[ranks, 2]` float32 for each bucket and for the matmul: the number of
    values that differ, where NaN always differs, and the largest difference. The arguments are
    those of `difference`.
    """

    def on_rank() -> list[jax.Array]:
        place = lax.axis_index(mesh.axis_names)
        buckets = [[_values(place, dtype, size)] for dtype, size in TRIED]
        numbers = range(len(buckets))
        products = []

        def between(tokens: list[jax.Array]) -> list[jax.Array]:
            # Integers below 8 with sums below 2^24 are exact on every unit that multiplies.
            a = jnp.tile(jnp.arange(8, dtype=jnp.float32), (_WIDTH, _WIDTH // 8))
            a, tokens = lax.optimization_barrier((a, tokens))
            product, tokens = lax.optimization_barrier((a.T @ a, tokens))
            products.append(product)
            return tokens

        ours = pairs(buckets, axes, scale=0.5, numbers=numbers, communicator=key, between=between)
        theirs = xla(buckets, axes, scale=0.5)
        row = jnp.arange(_WIDTH) % 8
        expected = _WIDTH * row[:, None] * row[None, :]
        compared = [_compared(a, b) for [a], [b] in zip(ours, theirs, strict=True)]
        return [*compared, _compared(products[0], expected)]

    return jax.jit(
        jax.shard_map(
            on_rank, mesh=mesh, in_specs=(), out_specs=P(mesh.axis_names), check_vma=False
        )
    )


def _reason(what: str, differences: jax.Array) -> str:
    for shard in differences.addressable_shards:
        num_wrong, largest = np.asarray(shard.data)[0]
        if num_wrong:
            return f"{num_wrong:.0f} {what.format(shard.device)}, by up to {largest:g}"
    return ""


def _values(place: jax.Array, dtype: str, size: int) -> jax.Array:
    return ((jnp.arange(size) * 3 + place * 5) % _MODULUS[dtype]).astype(dtype)


def _compared(ours: jax.Array, theirs: jax.Array) -> jax.Array:
    apart = jnp.abs(ours.astype(jnp.float32) - theirs.astype(jnp.float32))
    return jnp.stack([jnp.sum(apart != 0, dtype=jnp.float32), jnp.max(apart)])[None]
