"""Checksums with which a step compares its arguments between processes while it runs."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp.distributed.checks import hashes

# The step itself hashes a further argument of up to this many elements and leaves, in each call. A
# separate program hashes a larger argument if it is not the same object as in the previous call.
_SMALL_SIZE, _SMALL_LEAVES = 1 << 14, 16

_PIECE_BITS = 8  # float32 sums of such numbers are exact on up to 65,536 ranks


def is_small(arg: Any) -> bool:
    """Whether the step itself hashes an argument."""
    # Count elements, because a tracer has no bytes.
    leaves = jax.tree.leaves(arg)
    return len(leaves) <= _SMALL_LEAVES and sum(map(np.size, leaves)) <= _SMALL_SIZE


def pieces(rest: Sequence[Any], checksums: Sequence[jax.Array]) -> jax.Array:
    """Hash the arguments of a rank inside the step: `[4]` float32, small integers."""
    total = jnp.uint32(0)
    for i, checksum in enumerate(checksums):
        each = checksum.reshape(-1, 2).sum(0, dtype=jnp.uint32)
        total += (each[0] ^ (each[1] * np.uint32(0x9E3779B1))) * np.uint32(2 * i + 3)
    leaves = [jnp.asarray(leaf) for arg in rest if is_small(arg) for leaf in jax.tree.leaves(arg)]
    words = [hashes.words_of(leaf).reshape(-1) for leaf in leaves if leaf.size]
    if words:
        together = jnp.concatenate(words)
        total += hashes.of_part(together, [(0, together.size)])[0]
    shifts = np.arange(0, 32, _PIECE_BITS, dtype=np.uint32)
    return ((total >> shifts) & np.uint32(2**_PIECE_BITS - 1)).astype(jnp.float32)


def differ(mine: jax.Array, sums: jax.Array, num_ranks: int) -> jax.Array:
    """Return whether `pieces` differ between ranks, given their sums over ranks: `[1]` bool.

    If only two different values exist, the result is True on the ranks of both.

    Args:
      mine: `pieces` of this rank, `[4]` float32.
      sums: the sums of `pieces` over the ranks, `[4]` float32.
    """
    return jnp.any(sums != mine.astype(sums.dtype) * num_ranks).reshape(1)
