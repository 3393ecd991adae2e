"""Copies a state on its devices, safe from donation, and fetches its values to the host."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jdp import pytrees, rank_state
from jdp.checkpoint import next_host, shards
from jdp.checkpoint.saved_leaves import SavedLeaf, describe
from jdp.pytrees import is_array, without_key


class _DevicePart(NamedTuple):
    leaf: int  # index of its leaf
    index: Any  # the part of the leaf; ... is the entire leaf
    values: Any
    part: int | None = None  # its number, of a leaf that is written in parts


class Snapshot(NamedTuple):
    """A copy of a state on the devices that is never donated while in use."""

    leaves: list[SavedLeaf]
    pieces: list[_DevicePart]
    split: dict[str, Any]  # facts about its parts; empty if every leaf is whole

    def fetch(self) -> list[np.ndarray]:
        """Copy the values to the host, whole leaves first; on a CPU they are read in place."""
        for piece in self.pieces:
            if isinstance(piece.values, jax.Array):
                piece.values.copy_to_host_async()
        arrays: dict[int, np.ndarray] = {}
        for i, index, values, part in self.pieces:
            if part is not None:
                continue
            if index is ...:
                arrays[i] = np.asarray(values)
                continue
            if i not in arrays:
                arrays[i] = np.empty(self.leaves[i].shape, jnp.dtype(self.leaves[i].dtype))
            arrays[i][index] = np.asarray(values)
        parts = [np.asarray(piece.values) for piece in self.pieces if piece.part is not None]
        return [*arrays.values(), *parts]


class Snapshots:
    """Takes successive snapshots of the states of one run.

    If no single process holds a leaf completely, each process copies the parts that it writes; a
    leaf of `per_rank` is gathered. For other leaves each part is copied once, on its device.
    `reuse` keeps the memory of a snapshot for the next one: on a CPU, mapping new memory takes four
    times as long as the copy itself.
    """

    def __init__(self, *, reuse: bool) -> None:
        self.hosts: tuple[int, ...] = ()  # of each process, if parts are kept by the next host too
        self._reuse = reuse
        self._spare: dict[jax.Device, list[jax.Array]] = {}
        self._kind: Any = None  # of the state that the following describe
        self._leaves: list[SavedLeaf] = []
        self._apart: list[int] = []  # positions of gathered leaves
        self._parts: list[shards.LeafPart] = []  # of the leaves that are written in parts

    def take_snapshot(self, state: Any, *, here: bool = True) -> Snapshot | None:
        """Start copying a state, so that the next step may donate it, without waiting for the copy.

        The previous snapshot must no longer be in use. All processes must take the same snapshots;
        processes with `here=False` only take part in gathering, and write their parts.

        Raises:
          ValueError: if the state was donated.
        """
        leaves, treedef = jax.tree.flatten(state)
        arrays = [x for x in leaves if is_array(x)]
        require_alive(state)
        kind = treedef, [_kind(x) for x in arrays]
        if kind != self._kind:
            self._leaves = describe(state)
            self._apart, self._parts = _placement(state, arrays)
            self._kind = kind
        arrays = [*map(without_key, arrays)]
        for i, x in zip(self._apart, _gathered([arrays[i] for i in self._apart]), strict=True):
            arrays[i] = x
        if not here and not self._parts:
            return None
        pieces = self._copied(_all_pieces(arrays, self._parts, here=here))
        split = {}
        if self._parts:
            if len({*self.hosts}) > 1:
                copies = next_host.copies(arrays, self._parts, self.hosts)
                pieces += [_DevicePart(-1, None, x, n) for n, x in copies.items()]
            held = [piece.part for piece in pieces if piece.part is not None]
            split = shards.split_facts(self._parts, held, has_whole=here)
        return Snapshot(self._leaves, pieces, split)

    def reservation(self, state: Any, *, here: bool = True) -> Callable[[], None]:
        """Return a function that allocates the first snapshot and may run in a thread."""
        arrays = [x for x in jax.tree.leaves(state) if is_array(x)]
        apart, parts = _placement(state, arrays)
        arrays = [np.empty(0) if i in apart else without_key(x) for i, x in enumerate(arrays)]
        pieces = _all_pieces(arrays, parts, here=here)
        kinds = {
            device: [_form(pieces[i].values) for i in positions]
            for device, positions in _on_devices(pieces).items()
        }

        def reserve() -> None:
            for device, forms in kinds.items():
                zeros = jax.jit(
                    lambda forms=forms: [jnp.zeros(*form) for form in forms],
                    out_shardings=SingleDeviceSharding(device),
                )
                self._spare[device] = jax.block_until_ready(zeros())

        return reserve

    def _copied(self, pieces: list[_DevicePart]) -> list[_DevicePart]:
        for i, piece in enumerate(pieces):
            if not isinstance(piece.values, jax.Array):
                pieces[i] = piece._replace(values=np.array(piece.values))
        for device, positions in _on_devices(pieces).items():
            arrays = [pieces[i].values for i in positions]
            spare = self._spare.pop(device, [])
            if [*map(_form, spare)] != [*map(_form, arrays)]:
                spare = []
            copies = _copy(spare, arrays)
            if self._reuse:
                self._spare[device] = copies
            for i, values in zip(positions, copies, strict=True):
                pieces[i] = pieces[i]._replace(values=values)
        return pieces


def require_alive(state: Any) -> None:
    """Raise a ValueError that names the first donated leaf of a state, if there is one."""
    pytrees.require_alive(
        "state",
        state,
        "Write state, ... = step(state, ...) and then ckpt.step(state, batches), after each step.",
    )


def _kind(x: Any) -> Any:
    if isinstance(x, jax.Array):
        return x.shape, x.dtype, x.sharding
    return type(x), np.shape(x), getattr(x, "dtype", None)


def is_split(state: Any) -> bool:
    """Whether a state has leaves that are written in parts, by several processes."""
    return bool(_placement(state, [x for x in jax.tree.leaves(state) if is_array(x)])[1])


# The positions of gathered leaves, and the parts of leaves written in parts.
def _placement(state: Any, arrays: list[Any]) -> tuple[list[int], list[shards.LeafPart]]:
    apart = [i for i, x in enumerate(arrays) if not _is_on_each_process(x)]
    if not apart:
        return [], []
    pairs = zip(jax.tree.leaves(state), rank_state.owners(state), strict=True)
    is_own = [owner is not None for x, owner in pairs if is_array(x)]
    split = [i for i in apart if not is_own[i]]
    parts = [part for i in split for part in shards.parts_of(i, without_key(arrays[i]))]
    # The rows of one process lie beside each other, so that they are few ranges.
    parts.sort(key=lambda part: (part.writer, part.leaf, part.box))
    return [i for i in apart if is_own[i]], parts


# Whether each process can assemble an array from its own devices. The result is equal on all
# processes, because a sharding lists the parts of all devices.
def _is_on_each_process(x: Any) -> bool:
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return True
    parts: dict[int, set[str]] = defaultdict(set)
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        parts[device.process_index].add(str(index))
    return len({frozenset(mine) for mine in parts.values()}) == 1


def _gathered(arrays: list[Any]) -> list[Any]:
    if not arrays:
        return []
    shardings = [NamedSharding(x.sharding.mesh, PartitionSpec()) for x in arrays]
    return jax.jit(_same, out_shardings=shardings)(arrays)


def _same(arrays: list[jax.Array]) -> list[jax.Array]:
    return arrays


def _on_devices(pieces: list[_DevicePart]) -> dict[jax.Device, list[int]]:
    found: dict[jax.Device, list[int]] = defaultdict(list)
    for i, piece in enumerate(pieces):
        if isinstance(piece.values, jax.Array):
            found[next(iter(piece.values.devices()))].append(i)
    return found


def _form(x: Any) -> Any:
    return x.shape, x.dtype


# The copies of this process: parts of the split leaves and, if `here`, all other leaves.
def _all_pieces(
    arrays: list[Any], parts: list[shards.LeafPart], *, here: bool
) -> list[_DevicePart]:
    split = {part.leaf for part in parts}
    whole = [(i, x) for i, x in enumerate(arrays) if i not in split] if here else []
    pieces = [piece for i, x in whole for piece in _pieces(i, x)]
    data = {
        (i, shards.box_of(shard.index, arrays[i].shape)): shard.data
        for i in split
        for shard in arrays[i].addressable_shards
    }
    me = jax.process_index()
    mine = [(n, part) for n, part in enumerate(parts) if part.writer == me]
    found = [_DevicePart(part.leaf, None, data[part.leaf, part.box], n) for n, part in mine]
    return [*pieces, *found]


# The parts on this process's devices that make up array `i`.
def _pieces(i: int, x: Any) -> list[_DevicePart]:
    if not isinstance(x, jax.Array):
        return [_DevicePart(i, ..., x)]
    if x.is_fully_replicated:
        return [_DevicePart(i, ..., x.addressable_data(0))]
    shards = {str(shard.index): shard for shard in x.addressable_shards}
    return [_DevicePart(i, shard.index, shard.data) for shard in shards.values()]


def _copies(spare: list[jax.Array], arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(x) for x in arrays]


# keep_unused: the spare arrays are donated for their memory; their values are not read.
_copy = jax.jit(_copies, donate_argnums=0, keep_unused=True)
