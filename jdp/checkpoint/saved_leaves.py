"""The arrays of a state as they are written: their names, shapes, dtypes and bytes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdp.pytrees import is_array, is_key

# Leaves begin at multiples of this many bytes, as JAX wants memory that it takes without a copy.
_ALIGNMENT = 64


class SavedLeaf(NamedTuple):
    """One array of a state, as it is written: whole, and of no device."""

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
    named, _ = jax.tree_util.tree_flatten_with_path(state)
    return [_leaf(jax.tree_util.keystr(path), x) for path, x in named if is_array(x)]


def with_shapes(leaves: Sequence[SavedLeaf], values: Sequence[np.ndarray]) -> list[SavedLeaf]:
    """Return leaves with the shapes of their values."""
    return [leaf._replace(shape=x.shape) for leaf, x in zip(leaves, values, strict=True)]


def require_same(saved: Sequence[SavedLeaf], given: Sequence[SavedLeaf], where: str) -> None:
    """Refuse to restore into the state of another model.

    A number of Python or a NumPy array of 64 bits has become what JAX computes with.

    Args:
      saved: leaves that were written.
      given: leaves of the state to restore into.
      where: name of the source of `saved`, for the error.

    Raises:
      ValueError: naming the first leaf that differs.
    """
    if len(saved) == len(given) and all(map(_fits, saved, given)):
        return
    advice = (
        "That is another model or optimizer, and its values would mean something else. Build the "
        "one that this run began with, or give Checkpointer a new directory to begin anew."
    )
    names = {leaf.name for leaf in given}, {leaf.name for leaf in saved}
    for old, new in zip(saved, given, strict=False):
        if old.name == new.name and not _fits(old, new):
            raise ValueError(
                f"`{old.name}` is {old} in {where}, and {new} in the state given to restore. "
                + advice
            )
    for leaf in saved:
        if leaf.name not in names[0]:
            raise ValueError(f"`{leaf.name}` {leaf} is in {where}, not in the state. {advice}")
    for leaf in given:
        if leaf.name not in names[1]:
            raise ValueError(f"`{leaf.name}` {leaf} is not in {where}. {advice}")
    raise ValueError(f"{where} has the leaves of the state given in another order. {advice}")


def leaves_of(facts: dict[str, Any]) -> list[SavedLeaf]:
    """Return the leaves that facts tell of, which were written beside them."""
    return [SavedLeaf(name, tuple(shape), *rest) for name, shape, *rest in facts["leaves"]]


def disk_names(leaves: Sequence[SavedLeaf]) -> list[str]:
    """Return the names that leaves have on the disk, where those that are empty are left out."""
    return [f"{i}{leaf.name}" for i, leaf in enumerate(leaves) if leaf.num_bytes]


def to_disk(leaves: Sequence[SavedLeaf], values: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Return values by their names on the disk."""
    # Orbax does not know the unsigned integers of 2 and 4 bits, which NumPy keeps in bytes.
    arrays = [x.view(np.uint8) if x.dtype in ("uint2", "uint4") else x for x in values if x.size]
    return dict(zip(disk_names(leaves), arrays, strict=True))


def from_disk(leaves: Sequence[SavedLeaf], arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
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


def _fits(saved: SavedLeaf, given: SavedLeaf) -> bool:
    if saved.dtype != given.dtype:
        given = given._replace(dtype=str(jax.dtypes.canonicalize_dtype(given.dtype)))
    return saved == given
