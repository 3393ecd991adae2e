"""The pieces of a state that one process writes: arrays on its devices, and NumPy arrays."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jdp import pytrees, rank_state
from jdp.checkpoint import buddy_copy, shards, shares
from jdp.checkpoint.saved_leaves import SavedLeaf, describe, padded_bytes
from jdp.pytrees import is_array, without_key


class StatePiece(NamedTuple):
    """Values of a part of a leaf."""

    leaf: int  # index of its leaf; -1 if the next host keeps it for another process
    index: Any  # the part of the leaf; ... is the entire leaf, None a part that is written alone
    values: Any
    part: int | None = None  # its number, of a leaf that is written in parts
    rows: shares.Rows | None = None  # of the values that are written; None: all of them
    array: jax.Array | None = None  # the entire leaf, of which other shards may equal the values


class WrittenPieces(NamedTuple):
    """The pieces of a state: first the pieces of whole leaves, in the order of the leaves."""

    leaves: list[SavedLeaf]  # of all leaves; the same list for states of the same kind
    pieces: list[StatePiece]
    split: dict[str, Any]  # facts about its parts; empty if every leaf is whole
    form: int | None = None  # see `Finder.form`


class Finder:
    """Finds the pieces of the successive states of one run.

    Of a leaf that no single process holds completely, each process writes parts; a leaf of
    `per_rank` is gathered. Of other leaves each part is read once, from one device. If there are
    no parts, the processes of a host may each write a share of the leaves that all of them hold.

    Args:
      share: of this process; None: one process writes all leaves that are not split.
    """

    def __init__(self, share: shares.Share | None = None) -> None:
        self.hosts: tuple[int, ...] = ()  # of each process, if parts are kept by the next host too
        self._share = share
        self._rows: list[shares.Rows] = []  # of each leaf, that belong to the share
        self.form: int | None = None  # of the last state, see `shares.form`; None: not shared
        self._kind: Any = None  # of the state that the following describe
        self._leaves: list[SavedLeaf] = []
        self._apart: list[int] = []  # positions of gathered leaves
        self._elsewhere: list[int] = []  # positions of leaves of which this process holds nothing
        self._parts: list[shards.LeafPart] = []  # of the leaves that are written in parts

    def find(self, state: Any, *, here: bool) -> WrittenPieces | None:
        """Return the pieces; None with `here=False`, unless leaves are split or shared.

        All processes must find the pieces of the same states; those with `here=False` only take
        part in gathering, and write their parts.
        """
        require_alive(state)
        arrays = [*map(without_key, self._described(state))]
        for i, x in zip(self._apart, _gathered([arrays[i] for i in self._apart]), strict=True):
            arrays[i] = x
        here = here or self.form is not None
        if not here and not self._parts:
            return None
        pieces = self._of_share(arrays, here=here)
        split = {}
        if self._parts:
            if self._keeps_for_others():
                copies = buddy_copy.copies(arrays, self._parts, self.hosts)
                pieces += [StatePiece(-1, None, x, n) for n, x in copies.items()]
            held = [piece.part for piece in pieces if piece.part is not None]
            split = shards.split_facts(self._parts, held, has_whole=here)
        return WrittenPieces(self._leaves, pieces, split, self.form)

    def local_pieces(self, state: Any, *, here: bool) -> list[StatePiece]:
        """Return the pieces that are known without communication; gathered leaves are left out."""
        arrays = [*map(without_key, self._described(state))]
        here = here or self.form is not None
        return self._of_share(arrays, here=here, without=self._apart)

    def num_bytes(self, state: Any, *, here: bool) -> int:
        """Return the size of all pieces in the form of a commit, without communication."""
        arrays = self._described(state)
        split = {part.leaf for part in self._parts}
        here = here or self.form is not None
        whole = [leaf for i, leaf in enumerate(self._leaves) if i not in split] if here else []
        numbers = [n for n, part in enumerate(self._parts) if part.writer == jax.process_index()]
        if self._parts and self._keeps_for_others():
            numbers += buddy_copy.kept(arrays, self._parts, self.hosts)
        mine = [shards.described_part(self._leaves, self._parts[n]) for n in numbers]
        return sum(map(padded_bytes, [*whole, *mine]))

    def _described(self, state: Any) -> list[Any]:
        leaves, treedef = jax.tree.flatten(state)
        arrays = [x for x in leaves if is_array(x)]
        kind = treedef, [_kind(x) for x in arrays]
        if kind != self._kind:
            self._leaves = describe(state)
            self._apart, self._parts = _placement(state, arrays)
            self._elsewhere = [i for i, x in enumerate(arrays) if shares.is_elsewhere(x)]
            self.form = None
            if self._share and not self._parts:
                is_shared = [*map(shares.holds_everywhere, arrays)]
                self._rows = shares.rows(self._leaves, is_shared, self._share)
                self.form = shares.form(self._leaves, is_shared)
            self._kind = kind
        return arrays

    # The pieces that this process writes, without leaves at these positions. Of a leaf of which it
    # writes nothing it may hold nothing.
    def _of_share(
        self, arrays: list[Any], *, here: bool, without: Sequence[int] = ()
    ) -> list[StatePiece]:
        rows = self._rows if self.form is not None else []
        without = [*without, *(i for i, (start, stop) in enumerate(rows) if start == stop)]
        missing = {*self._elsewhere} - {*without, *(part.leaf for part in self._parts)}
        if here and missing:
            raise shares.not_held(self._leaves[min(missing)].name, arrays[min(missing)])
        pieces = _all_pieces(arrays, self._parts, here=here, without=without)
        return [_cut(piece, rows[piece.leaf]) for piece in pieces] if rows else pieces

    def _keeps_for_others(self) -> bool:
        return len({*self.hosts}) > 1


def require_alive(state: Any) -> None:
    """Raise a ValueError that names the first donated leaf of a state, if there is one."""
    pytrees.require_alive(
        "state",
        state,
        "Write state, ... = step(state, ...) and then ckpt.step(state, batches), after each step.",
    )


def is_split(state: Any) -> bool:
    """Whether a state has leaves that are written in parts, by several processes."""
    return bool(_placement(state, [x for x in jax.tree.leaves(state) if is_array(x)])[1])


def on_devices(pieces: Sequence[StatePiece]) -> Mapping[jax.Device, list[int]]:
    """Return the positions of the pieces that are on devices, by their device."""
    found: dict[jax.Device, list[int]] = defaultdict(list)
    for i, piece in enumerate(pieces):
        if isinstance(piece.values, jax.Array):
            found[next(iter(piece.values.devices()))].append(i)
    return found


def _kind(x: Any) -> Any:
    if isinstance(x, jax.Array):
        return x.shape, x.dtype, x.sharding
    return type(x), getattr(x, "shape", ()), getattr(x, "dtype", None)


# The positions of gathered leaves, and the parts of leaves written in parts.
def _placement(state: Any, arrays: list[Any]) -> tuple[list[int], list[shards.LeafPart]]:
    apart = [i for i, x in enumerate(arrays) if not _is_on_each_process(x)]
    if not apart:
        return [], []
    pairs = zip(jax.tree.leaves(state), rank_state.owners(state), strict=True)
    is_own = [owner is not None for x, owner in pairs if is_array(x)]
    split = [i for i in apart if not is_own[i]]
    parts = [part for i in split for part in shards.parts_of(i, without_key(arrays[i]))]
    # The parts of one process lie beside each other, so that they are few ranges.
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


# What this process writes: its parts of the split leaves and, if `here`, all other leaves but
# those at the positions `without`.
def _all_pieces(
    arrays: list[Any],
    parts: list[shards.LeafPart],
    *,
    here: bool,
    without: Sequence[int] = (),
) -> list[StatePiece]:
    split = {part.leaf for part in parts}
    left_out = split.union(without)
    whole = [(i, x) for i, x in enumerate(arrays) if i not in left_out] if here else []
    data = {
        (i, shards.box_of(shard.index, arrays[i].shape)): shard.data
        for i in split
        for shard in arrays[i].addressable_shards
    }
    me = jax.process_index()
    mine = [(n, part) for n, part in enumerate(parts) if part.writer == me]
    found = [StatePiece(part.leaf, None, data[part.leaf, part.box], n) for n, part in mine]
    return [*(piece for i, x in whole for piece in _pieces(i, x)), *found]


def _cut(piece: StatePiece, rows: shares.Rows) -> StatePiece:
    shape = np.shape(piece.values)
    if piece.index is not ... or not shape or rows == (0, shape[0]):
        return piece
    return piece._replace(index=(slice(*rows),), rows=rows)


# The parts on this process's devices that make up array `i`.
def _pieces(i: int, x: Any) -> list[StatePiece]:
    if not isinstance(x, jax.Array):
        return [StatePiece(i, ..., x)]
    if x.is_fully_replicated:
        return [StatePiece(i, ..., x.addressable_data(0), array=x)]
    found = {str(shard.index): shard for shard in x.addressable_shards}
    return [StatePiece(i, shard.index, shard.data, array=x) for shard in found.values()]
