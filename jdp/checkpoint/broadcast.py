"""Bytes that one process sends to all."""

import numpy as np
from jax.experimental import multihost_utils

# They are sent in chunks of at most this many, which bounds the temporary memory, and of few sizes:
# each size is compiled.
_CHUNK_BYTES, _LEAST_CHUNK_BYTES = 64 << 20, 1 << 12


def broadcast(data: np.ndarray | None, num_bytes: int) -> np.ndarray:
    """Return the bytes of the one process that has them; all processes call it together.

    Args:
      data: `[num_bytes]` uint8 on that process, which gets it back; None on the others.
      num_bytes: their number, the same on all processes.
    """
    received = np.empty(num_bytes, np.uint8) if data is None else data
    for start in range(0, num_bytes, _CHUNK_BYTES):
        chunk = received[start : start + _CHUNK_BYTES]
        size = max(_LEAST_CHUNK_BYTES, 1 << (chunk.size - 1).bit_length())
        sent = np.zeros(size, np.uint8)
        if data is not None:
            sent[: chunk.size] = chunk
        # As integers, because a float sum over the processes would turn -0.0 into 0.0.
        words = multihost_utils.broadcast_one_to_all(sent.view(np.uint32), data is not None)
        if data is None:
            chunk[:] = words.view(np.uint8)[: chunk.size]
    return received
