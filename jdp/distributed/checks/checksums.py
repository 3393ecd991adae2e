"""Checksums of the arguments, by which a step compares them between processes while it runs."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp.distributed.checks import hashes

# The step itself hashes a further argument of up to this size, in each call. A program of its own
# hashes a larger one, when it is another object than in the call before.
_SMALL_SIZE, _SMALL_LEAVES = 1 << 14, 16

_PIECE_BITS = 8  # float32 sums of such numbers are exact on up to 65,536 ranks


def is_small(arg: Any) -> bool:
    """Whether the step itself hashes an argument."""
    # By the number of elements, which a tracer has, too.
    leaves = jax.tree.leaves(arg)
    return len(leaves) <= _SMALL_LEAVES and sum(map(np.size, leaves)) <= _SMALL_SIZE


def pieces(rest: Sequence[Any], checksums: Sequence[jax.Array]) -> jax.Array:
    """Hash the arguments of a rank, inside of the step: `[4]` float32, small whole numbers.

    Args:
      rest: the further arguments.
      checksums: from `Arguments.of`, this rank's.
    """
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
    """Whether `pieces` differ between ranks, given their sums over ranks: `[1]` bool.

    If there are two kinds of ranks, the result is True on both.
    """
    return jnp.any(sums != mine.astype(sums.dtype) * num_ranks).reshape(1)
