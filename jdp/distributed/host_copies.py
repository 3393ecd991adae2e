"""Copies arrays of the host to devices, in one pass where that is possible."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

# Smaller arrays are copied on the host first: a second copy of them takes less than a millisecond.
LARGE_BYTES = 1 << 20


def copied(value: np.ndarray, sharding: Sharding) -> jax.Array:
    """Return an array on devices that does not share the memory of `value`, which may then change.

    JAX copies an array of the host to a CPU device only if its memory is not aligned, and uses the
    memory itself otherwise, whatever `may_alias` is. Such memory cannot be donated either: the step
    that does so copies it.
    """
    if value.dtype.kind in "iufc":  # JAX would narrow int64 too, and warn of it
        value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)
    if value.nbytes >= LARGE_BYTES:
        found = _placed(value, sharding)
        found.block_until_ready()  # it may be read until then
        if not _shares_memory(found, value):
            return found
    return _placed(np.array(value), sharding)


def _placed(value: np.ndarray, sharding: Sharding) -> jax.Array:
    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: value[index], dtype=value.dtype
    )


def _shares_memory(array: jax.Array, value: np.ndarray) -> bool:
    if next(iter(array.sharding.device_set)).platform != "cpu":
        return False
    low, high = np.lib.array_utils.byte_bounds(value)
    parts: list[Any] = [shard.data for shard in array.addressable_shards]
    return any(low <= part.unsafe_buffer_pointer() < high for part in parts)
