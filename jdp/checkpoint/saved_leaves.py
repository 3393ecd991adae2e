"""A state's serialized arrays: names, shapes, dtypes and bytes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jdp.pytrees import is_array, is_key, key_impl

# JAX on CPUs needs no copy of leaves with this alignment.
_ALIGNMENT = 64

ArrayForm = tuple[tuple[int, ...], np.dtype]  # shape and dtype


class SavedLeaf(NamedTuple):
    """One array of a state as written, unsharded."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    key: str | None  # PRNG implementation of random keys; shape and dtype are of their data

    def __str__(self) -> str:
        kind = self.dtype if self.key is None else f"key<{self.key}>"
        return f"{kind}{list(self.shape)}"

    @property
    def num_bytes(self) -> int:
        """The values' size."""
        return int(np.prod(self.shape, dtype=np.int64)) * jnp.dtype(self.dtype).itemsize


def describe(state: Any) -> list[SavedLeaf]:
    """Describe a state's arrays, in order.

    >>> [leaf.name + " " + str(leaf) for leaf in describe({"w": jnp.ones((2, 3)), "f": jnp.tanh})]
    ["['w'] float32[2, 3]"]
    """
    named = jax.tree_util.tree_leaves_with_path(state)
    return [_leaf(jax.tree_util.keystr(path), x) for path, x in named if is_array(x)]


def leaves_of(facts: Mapping[str, Any]) -> list[SavedLeaf]:
    """Return the leaves written beside these facts."""
    return [SavedLeaf(name, tuple(shape), *rest) for name, shape, *rest in facts["leaves"]]


def is_split(facts: Mapping[str, Any]) -> bool:
    """Whether leaves were written in shards (`shards.py`)."""
    return "parts" in facts


def disk_names(leaves: Sequence[SavedLeaf]) -> dict[str, SavedLeaf]:
    """Return the nonempty leaves by their names on disk."""
    return {f"{i}{leaf.name}": leaf for i, leaf in enumerate(leaves)}


def to_disk(leaves: Sequence[SavedLeaf], values: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Return nonempty values by their names on disk."""
    return to_disk_named(disk_names(leaves), values)


def to_disk_named(names: Iterable[str], values: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Return nonempty values by these names."""
    named = zip(names, values, strict=True)
    return {name: x.view(dtype_on_disk(x.dtype)) for name, x in named if x.size}


def from_disk(
    leaves: Mapping[str, SavedLeaf], read: Callable[[list[str]], Mapping[str, np.ndarray]]
) -> list[np.ndarray]:
    """Invert `to_disk`: return all values."""
    arrays = read([name for name, leaf in leaves.items() if leaf.num_bytes])
    return [
        arrays[name].view(leaf.dtype) if leaf.num_bytes else np.zeros(leaf.shape, leaf.dtype)
        for name, leaf in leaves.items()
    ]


def pack(values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the bytes of values, with padding between."""
    parts = []
    for value in values:
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        parts += [data, np.zeros(-data.size % _ALIGNMENT, np.uint8)]
    return [part for part in parts if part.size]


def unpack(data: np.ndarray, leaves: Sequence[SavedLeaf]) -> list[np.ndarray]:
    """Invert `pack`; values share the memory of `data`, `[bytes]`."""
    values, start = [], 0
    for leaf in leaves:
        part = data[start : start + leaf.num_bytes]
        values.append(part.view(jnp.dtype(leaf.dtype)).reshape(leaf.shape))
        start += padded_bytes(leaf)
    return values


def packed_bytes(leaves: Sequence[SavedLeaf]) -> int:
    """Return the size of `pack`."""
    return sum(map(padded_bytes, leaves))


def padded_bytes(leaf: SavedLeaf) -> int:
    """Return a leaf's size in `pack`."""
    return leaf.num_bytes + -leaf.num_bytes % _ALIGNMENT


def _leaf(name: str, x: Any) -> SavedLeaf:
    _require_equal_copies(name, x)
    if is_key(x):
        data = jax.eval_shape(jax.random.key_data, x)
        return SavedLeaf(name, data.shape, str(data.dtype), key_impl(x))
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct) and not is_known(dtype):
        text = f"`{name}` is {x}" if dtype.hasobject else f"`{name}` is an array of {dtype}"
        raise TypeError(f"{text}, which JAX cannot hold. Keep it outside the state.")
    return SavedLeaf(name, tuple(np.shape(x)), str(dtype), None)


# A value returned straight from a callback has a sharding without a mesh.
def _require_equal_copies(name: str, x: Any) -> None:
    if not isinstance(x, jax.Array) or isinstance(x.sharding, NamedSharding):
        return
    if x.is_fully_replicated and len(x.sharding.device_set) > 1:
        raise ValueError(
            f"`{name}` is on {len(x.sharding.device_set)} devices, but only one has its values, "
            "because jax.pure_callback or io_callback returned it. A commit could store the "
            "zeros of the others. Write the function that calls back as jax.jit(function, "
            "out_shardings=jax.NamedSharding(mesh, jax.P()))."
        )


def is_known(dtype: np.dtype) -> bool:
    """Whether JAX arrays may have a dtype."""
    try:
        jax.typeof(np.empty(0, dtype))
    except TypeError:
        return False
    return dtype != jax.dtypes.float0


def dtype_on_disk(dtype: Any) -> np.dtype:
    """Return the dtype for Orbax: uint8 for an unsupported one."""
    name = jnp.dtype(dtype).name
    is_narrow = name in ("int1", "uint1", "uint2", "uint4", "float8_e4m3")
    is_narrow |= name.startswith("float6_")
    return np.dtype(np.uint8) if is_narrow else jnp.dtype(dtype)
