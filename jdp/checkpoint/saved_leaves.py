"""The arrays of a state as they are written: their names, shapes, dtypes and bytes."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdp.pytrees import is_array, is_key

# Leaves begin at multiples of this many bytes, as JAX wants memory that it takes without a copy.
_ALIGNMENT = 64


class SavedLeaf(NamedTuple):
    """One array of a state as it is written: all of it, on no device."""

    name: str  # its path
    shape: tuple[int, ...]
    dtype: str
    key: str | None  # random keys: how they are made; shape and dtype are those of their data

    def __str__(self) -> str:
        kind = self.dtype if self.key is None else f"key<{self.key}>"
        return f"{kind}{list(self.shape)}"

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return int(np.prod(self.shape, dtype=np.int64)) * jnp.dtype(self.dtype).itemsize


def describe(state: Any) -> list[SavedLeaf]:
    """Describe the arrays of a state, in order; other leaves are left out.

    Raises:
      TypeError: if a number is too large for an array.

    >>> [leaf.name + " " + str(leaf) for leaf in describe({"w": jnp.ones((2, 3)), "f": jnp.tanh})]
    ["['w'] float32[2, 3]"]
    """
    named = jax.tree_util.tree_leaves_with_path(state)
    return [_leaf(jax.tree_util.keystr(path), x) for path, x in named if is_array(x)]


def leaves_of(facts: Mapping[str, Any]) -> list[SavedLeaf]:
    """Return the leaves that were written beside these facts."""
    return [SavedLeaf(name, tuple(shape), *rest) for name, shape, *rest in facts["leaves"]]


def disk_names(leaves: Sequence[SavedLeaf]) -> list[str]:
    """Return the names that leaves have on the disk, where empty leaves are left out."""
    return [f"{i}{leaf.name}" for i, leaf in enumerate(leaves) if leaf.num_bytes]


def to_disk(leaves: Sequence[SavedLeaf], values: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Return values by their names on the disk."""
    # Orbax does not know the unsigned integers of 2 and 4 bits, which NumPy keeps in bytes.
    arrays = [x.view(np.uint8) if x.dtype in ("uint2", "uint4") else x for x in values if x.size]
    return dict(zip(disk_names(leaves), arrays, strict=True))


def from_disk(leaves: Sequence[SavedLeaf], arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Invert `to_disk`."""
    names = iter(disk_names(leaves))
    return [
        arrays[next(names)].view(leaf.dtype) if leaf.num_bytes else np.zeros(leaf.shape, leaf.dtype)
        for leaf in leaves
    ]


def pack(values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the bytes of the values, one after the other, and the padding between them.

    >>> [part.size for part in pack([np.zeros(3, np.float32), np.ones((), np.int64)])]
    [12, 52, 8, 56]
    """
    parts = []
    for value in values:
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        parts += [data, np.zeros(-data.size % _ALIGNMENT, np.uint8)]
    return [part for part in parts if part.size]


def unpack(data: np.ndarray, leaves: Sequence[SavedLeaf]) -> list[np.ndarray]:
    """Invert `pack`: return the values of `leaves`, which share the memory of `data`, `[bytes]`."""
    values, start = [], 0
    for leaf in leaves:
        part = data[start : start + leaf.num_bytes]
        values.append(part.view(jnp.dtype(leaf.dtype)).reshape(leaf.shape))
        start += leaf.num_bytes + -leaf.num_bytes % _ALIGNMENT
    return values


def packed_bytes(leaves: Sequence[SavedLeaf]) -> int:
    """Return the number of bytes of `pack`."""
    return sum(leaf.num_bytes + -leaf.num_bytes % _ALIGNMENT for leaf in leaves)


def _leaf(name: str, x: Any) -> SavedLeaf:
    if is_key(x):
        data = jax.eval_shape(jax.random.key_data, x)
        return SavedLeaf(name, data.shape, str(data.dtype), str(jax.random.key_impl(x)))
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    if dtype.hasobject:
        raise TypeError(f"`{name}` is {x}, which no array can hold. Keep it outside the state.")
    return SavedLeaf(name, tuple(np.shape(x)), str(dtype), None)
