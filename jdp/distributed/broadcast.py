"""Bytes that one process sends to others."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# They are sent in chunks of at most this many, which bounds the temporary memory, and of few sizes:
# each size is compiled.
_CHUNK_BYTES, _LEAST_CHUNK_BYTES = 64 << 20, 1 << 12


def broadcast(data: np.ndarray | None, num_bytes: int, group: Sequence[int]) -> np.ndarray:
    """Return the bytes of the one process that has them; all processes of a group call it together.

    Args:
      data: `[num_bytes]` uint8 on that process, which gets it back; None on the others.
    """
    received = np.empty(num_bytes, np.uint8) if data is None else data
    if len(group) == 1:
        return received
    mesh = _mesh(group)
    for start in range(0, num_bytes, _CHUNK_BYTES):
        chunk = received[start : start + _CHUNK_BYTES]
        size = max(_LEAST_CHUNK_BYTES, 1 << (chunk.size - 1).bit_length())
        sent = np.zeros(size, np.uint8)
        if data is not None:
            sent[: chunk.size] = chunk
        words = _sum(sent.view(np.uint32), mesh)
        if data is None:
            chunk[:] = words.view(np.uint8)[: chunk.size]
    return received


def _mesh(group: Sequence[int]) -> Mesh:
    """Return a mesh of one device of each process."""
    first: dict[int, jax.Device] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    devices = np.array([first[process] for process in group])
    return Mesh(devices, ("processes",), axis_types=(AxisType.Auto,))


def _sum(words: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Return the sum over the processes of a mesh, of integers: of floats, -0.0 would become 0."""
    rows = NamedSharding(mesh, PartitionSpec("processes"))
    shape = (mesh.size, *words.shape)
    placed = jax.make_array_from_callback(shape, rows, lambda index: words[None])
    whole = NamedSharding(mesh, PartitionSpec())
    total = jax.jit(_total, out_shardings=whole)(placed)
    return np.asarray(total.addressable_data(0))


def _total(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=0, dtype=x.dtype)
