"""A state apart from its devices: a copy of it there, its values on the host, and back."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jdp import pytrees
from jdp.checkpoint.saved_leaves import SavedLeaf, describe
from jdp.pytrees import is_array, is_key, without_key


class Snapshot(NamedTuple):
    """A copy of a state on the devices, which nothing will donate."""

    leaves: list[SavedLeaf]
    pieces: list[list[tuple[Any, Any]]]  # of each leaf: (which part, values)

    def fetch(self) -> list[np.ndarray]:
        """Copy the values to the host; on a CPU they are read where they lie."""
        for pieces in self.pieces:
            for _, piece in pieces:
                if isinstance(piece, jax.Array):
                    piece.copy_to_host_async()
        return [
            _joined(leaf, pieces) for leaf, pieces in zip(self.leaves, self.pieces, strict=True)
        ]


class Snapshots:
    """Takes snapshots of the states of one run, one after the other.

    A leaf that no process holds as a whole is gathered; of those that a process holds, replicated
    or in parts, only what makes one whole is copied, on the device where it lies.

    Args:
      reuse: keep the memory of a snapshot for the next. Mapping new memory takes a CPU four times
        as long as the copy itself.
    """

    def __init__(self, *, reuse: bool) -> None:
        self._reuse = reuse
        self._spare: dict[jax.Device, list[jax.Array]] = {}
        self._kind: Any = None  # of the state that what follows is about
        self._leaves: list[SavedLeaf] = []
        self._apart: list[int] = []

    def take_snapshot(self, state: Any, *, here: bool = True) -> Snapshot | None:
        """Copy a state, so that the next step may donate it. Starts the copy, does not wait for it.

        The snapshot before must not be read any more. All processes must take the same ones.

        Args:
          state: the state, a tree with arrays.
          here: whether this process wants it; the others only help to gather.

        Raises:
          ValueError: if the state was donated.
        """
        leaves, treedef = jax.tree.flatten(state)
        arrays = [x for x in leaves if is_array(x)]
        require_alive(state)
        kind = treedef, [_kind(x) for x in arrays]
        if kind != self._kind:
            self._leaves, self._apart = describe(state), _apart(arrays)
            self._kind, self._spare = kind, {}
        arrays = [*map(without_key, arrays)]
        for i, x in zip(self._apart, _gathered([arrays[i] for i in self._apart]), strict=True):
            arrays[i] = x
        return Snapshot(self._leaves, self._copied([_pieces(x) for x in arrays])) if here else None

    def _copied(self, parts: list[list[tuple[Any, Any]]]) -> list[list[tuple[Any, Any]]]:
        places: dict[jax.Device, list[tuple[int, int]]] = defaultdict(list)
        for i, pieces in enumerate(parts):
            for j, (index, piece) in enumerate(pieces):
                if isinstance(piece, jax.Array):
                    places[next(iter(piece.devices()))].append((i, j))
                else:
                    pieces[j] = index, np.array(piece)
        for device, spots in places.items():
            new = _copy(self._spare.pop(device, None), [parts[i][j][1] for i, j in spots])
            if self._reuse:
                self._spare[device] = new
            for (i, j), piece in zip(spots, new, strict=True):
                parts[i][j] = parts[i][j][0], piece
        return parts


def place(state: Any, values: Sequence[np.ndarray]) -> Any:
    """Return a state with other values, whose types, shardings and leaves that are not arrays stay.

    Args:
      state: the state, with the leaves that `values` were taken from.
      values: of its arrays, in order. Not to be written to afterwards.
    """
    leaves, treedef = jax.tree.flatten(state)
    given = iter(values)
    return treedef.unflatten([_placed(x, next(given)) if is_array(x) else x for x in leaves])


def _kind(x: Any) -> Any:
    if isinstance(x, jax.Array):
        return x.shape, x.dtype, x.sharding
    return type(x), np.shape(x), getattr(x, "dtype", None)


def require_alive(state: Any) -> None:
    """Refuse a state of which a leaf was donated.

    Raises:
      ValueError: naming the first one.
    """
    pytrees.require_alive(
        "state",
        state,
        "Write state, ... = step(state, ...) and then ckpt.step(state, batches), after each step.",
    )


# The positions of the leaves that no process can put together from its own devices. All processes
# find the same ones: a sharding knows the parts of all devices.
def _apart(arrays: list[Any]) -> list[int]:
    return [i for i, x in enumerate(arrays) if isinstance(x, jax.Array) and not _is_covered(x)]


def _is_covered(x: jax.Array) -> bool:
    if x.is_fully_addressable or x.is_fully_replicated:
        return True
    parts: dict[int, set[Any]] = defaultdict(set)
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, x.shape, strict=True))
        parts[device.process_index].add(bounds)
    sizes = [sum(_volume(bounds) for bounds in mine) for mine in parts.values()]
    return min(sizes) == x.size


def _volume(bounds: tuple[tuple[int, int], ...]) -> int:
    return int(np.prod([stop - start for start, stop in bounds], dtype=np.int64))


def _gathered(arrays: list[Any]) -> list[Any]:
    if not arrays:
        return []
    shardings = [NamedSharding(x.sharding.mesh, PartitionSpec()) for x in arrays]
    return jax.jit(_same, out_shardings=shardings)(arrays)


def _same(arrays: list[jax.Array]) -> list[jax.Array]:
    return arrays


# The parts on this process's devices that make up the array.
def _pieces(x: Any) -> list[tuple[Any, Any]]:
    if not isinstance(x, jax.Array):
        return [(..., x)]
    if x.is_fully_replicated:
        return [(..., x.addressable_data(0))]
    shards = {str(shard.index): (shard.index, shard.data) for shard in x.addressable_shards}
    return list(shards.values())


def _joined(leaf: SavedLeaf, pieces: list[tuple[Any, Any]]) -> np.ndarray:
    if pieces[0][0] is ...:
        return np.asarray(pieces[0][1])
    whole = np.empty(leaf.shape, jnp.dtype(leaf.dtype))
    for index, piece in pieces:
        whole[index] = np.asarray(piece)
    return whole


def _copy(spare: list[jax.Array] | None, arrays: list[jax.Array]) -> list[jax.Array]:
    return _copy_new(arrays) if spare is None else _copy_into(spare, arrays)


@jax.jit
def _copy_new(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(x) for x in arrays]


def _copy_over(spare: list[jax.Array], arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(x) for x in arrays]


# keep_unused: the spare memory is donated, its values are not read.
_copy_into = jax.jit(_copy_over, donate_argnums=0, keep_unused=True)


def _placed(x: Any, value: np.ndarray) -> Any:
    if not isinstance(x, jax.Array):
        if isinstance(x, np.ndarray):
            return np.array(value)
        return type(x)(value[()]) if isinstance(x, np.generic) else type(x)(value.item())
    if is_key(x):
        data = _placed(jax.random.key_data(x), value)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if x.weak_type and not x.shape and x.is_fully_addressable:
        # Only a Python number gives the type that jnp.asarray(1.0) has.
        number = jnp.asarray(value.item())
        return jax.device_put(number, x.sharding) if x.committed else number
    if not x.committed:
        return jnp.asarray(value)
    return jax.make_array_from_callback(x.shape, x.sharding, lambda index: value[index])
