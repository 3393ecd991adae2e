"""What one process writes of a state: pieces on its devices, and its share of the rows."""

import functools
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp import jax_compat, pytrees, rank_state
from jdp.checkpoint import shards
from jdp.checkpoint.saved_leaves import SavedLeaf, describe, padded_bytes
from jdp.pytrees import is_array, without_key

Rows = tuple[int, int]  # in the first dim; a scalar is one row


class Share(NamedTuple):
    """A process's share of commits that a host writes together."""

    number: int
    num_shares: int

    def of_bytes(self, num_bytes: int) -> slice:
        """Return the share of so many bytes, about where its rows are.

        >>> Share(1, 3).of_bytes(8)
        slice(2, 5, None)
        """
        return slice(*(i * num_bytes // self.num_shares for i in (self.number, self.number + 1)))


def shared_rows(leaves: Sequence[SavedLeaf], is_shared: Sequence[bool], share: Share) -> list[Rows]:
    """Return each leaf's rows in a share; share 0 has unshared leaves.

    >>> leaves = [SavedLeaf("a", (6,), "float32", None), SavedLeaf("b", (), "float64", None)]
    >>> [shared_rows(leaves, [True, True], Share(number, 2)) for number in (0, 1)]
    [[(0, 4), (0, 0)], [(4, 6), (0, 1)]]
    """
    total = sum(leaf.num_bytes for leaf, shared in zip(leaves, is_shared, strict=True) if shared)
    begin, found = 0, []
    for leaf, shared in zip(leaves, is_shared, strict=True):
        num = _num_rows(leaf)
        if shared:
            cuts = (share.number + i for i in (0, 1))
            start, stop = (
                _row_at(leaf, num, cut * total // share.num_shares - begin) for cut in cuts
            )
            found.append((start, stop if leaf.num_bytes else start))
            begin += leaf.num_bytes
        else:
            found.append((0, num if share.number == 0 else 0))
    return found


def holds_everywhere(x: Any) -> bool:
    """Whether every process holds all of an array, with the same bits."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or not x.is_fully_replicated:
        return False
    return len({device.process_index for device in x.sharding.device_set}) == jax.process_count()


def _not_held(name: str, x: jax.Array) -> ValueError:
    owners = sorted({device.process_index for device in x.sharding.device_set})
    return ValueError(
        f"`{name}` is only on devices of process {', '.join(map(str, owners))}, but process "
        f"{jax.process_index()} writes it and holds no part of it. Place it on devices of all "
        "processes, for instance with jax.device_put(x, jax.NamedSharding(jdp.init(), jax.P())), "
        "or keep it outside the state."
    )


def _num_rows(leaf: SavedLeaf) -> int:
    return leaf.shape[0] if leaf.shape else 1


# Return the first row that begins at or after this byte.
def _row_at(leaf: SavedLeaf, num_rows: int, byte: int) -> int:
    if not leaf.num_bytes:
        return 0
    return min(max(-(-byte * num_rows // leaf.num_bytes), 0), num_rows)


Rounds = tuple[tuple[tuple[int, int], ...], ...]  # positions in a mesh


def buddy_copies(
    arrays: Sequence[jax.Array], parts: Mapping[int, shards.LeafPart], hosts: tuple[int, ...]
) -> dict[int, jax.Array]:
    """Return the previous host's shards kept by this process; a collective call."""
    found: dict[int, jax.Array] = {}
    for mesh, pairs, leaves in _exchanges(arrays, parts, hosts):
        specs = tuple(_spec(arrays[leaf]) for leaf in leaves)
        moved = _mover(mesh, specs, pairs)(*(arrays[leaf] for leaf in leaves))
        for (leaf, numbers), x in zip(leaves.items(), moved, strict=True):
            here = {shard.device: shard.data for shard in x.addressable_shards}
            targets = _targets(arrays[leaf], mesh, pairs)
            for n in numbers:
                if (target := targets.get(parts[n][1:])) in here:
                    found[n] = here[target]
    return found


def kept(
    arrays: Sequence[jax.Array], parts: Mapping[int, shards.LeafPart], hosts: tuple[int, ...]
) -> list[int]:
    """Return the indices from `buddy_copies`, without communication."""
    found = set()
    for mesh, pairs, leaves in _exchanges(arrays, parts, hosts):
        for leaf, numbers in leaves.items():
            targets = _targets(arrays[leaf], mesh, pairs)
            for n in numbers:
                target = targets.get(parts[n][1:])
                if target is not None and target.process_index == jax.process_index():
                    found.add(n)
    return sorted(found)


# Yields a mesh, a round, its leaves and the indices of their shards.
def _exchanges(
    arrays: Sequence[jax.Array], parts: Mapping[int, shards.LeafPart], hosts: tuple[int, ...]
) -> Iterator[tuple[Mesh, tuple[tuple[int, int], ...], dict[int, list[int]]]]:
    meshes: dict[Mesh, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for n, part in parts.items():
        sharding = arrays[part.leaf].sharding
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            meshes[sharding.mesh][part.leaf].append(n)
    for mesh, leaves in meshes.items():
        for pairs in rounds([hosts[device.process_index] for device in mesh.devices.flat]):
            yield mesh, pairs, leaves


def rounds(hosts: Sequence[int]) -> Rounds:
    """Return (source, target) devices, in rounds in which each sends and receives once.

    >>> rounds([0, 0, 1, 1, 2, 2])
    (((0, 2), (1, 3), (2, 4), (3, 5), (4, 0), (5, 1)),)
    >>> rounds([0, 0, 1])
    (((0, 2), (2, 0)), ((1, 2),))
    >>> rounds([0, 0])
    ()
    """
    devices: dict[int, list[int]] = defaultdict(list)
    for position, host in enumerate(hosts):
        devices[host].append(position)
    if len(devices) == 1:
        return ()
    order = sorted(devices)
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for host, following in zip(order, [*order[1:], order[0]], strict=True):
        targets = devices[following]
        for i, source in enumerate(devices[host]):
            found[i // len(targets)].append((source, targets[i % len(targets)]))
    return tuple(tuple(found[number]) for number in sorted(found))


def _spec(x: jax.Array) -> PartitionSpec:
    assert isinstance(x.sharding, NamedSharding)
    return x.sharding.spec


@functools.lru_cache(maxsize=16)
def _mover(mesh: Mesh, specs: tuple[PartitionSpec, ...], pairs: tuple[tuple[int, int], ...]) -> Any:
    def move(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.lax.ppermute(x, mesh.axis_names, pairs) for x in arrays)

    moved = jax_compat.shard_map(move, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    return jax.jit(moved)


# The device that receives a shard, by box and writer.
def _targets(
    x: jax.Array, mesh: Mesh, pairs: tuple[tuple[int, int], ...]
) -> dict[tuple[shards.Box, int], jax.Device]:
    devices, index_of = mesh.devices.flat, x.sharding.devices_indices_map(x.shape)
    first: dict[tuple[shards.Box, int], jax.Device] = {}
    for device, index in index_of.items():
        first.setdefault((shards.box_of(index, x.shape), device.process_index), device)
    target = {devices[source]: devices[to] for source, to in pairs}
    return {part: target[device] for part, device in first.items() if device in target}


class StatePiece(NamedTuple):
    """Values of a part of a leaf."""

    leaf: int  # of its leaf; -1 if kept for another host
    index: Any  # slice of the leaf; ... is all of it, None a shard written by itself
    values: Any
    part: int | None = None  # of its shard, of a split leaf
    rows: Rows | None = None  # to write; None: all
    array: jax.Array | None = None  # the entire leaf, of which other shards may equal the values


class WrittenPieces(NamedTuple):
    """A state's pieces, whole leaves first."""

    leaves: list[SavedLeaf]  # of all leaves; the same list for states of one kind
    pieces: list[StatePiece]
    split: dict[str, Any]
    form: int | None = None  # see `Finder.form`


class Finder:
    """Finds the pieces of a run's successive states.

    Each process writes shards of a leaf incomplete on all processes. Other leaves are read once,
    from one device. Without shards, a host's processes may each write a share of leaves that all
    hold.
    """

    def __init__(self, share: Share | None = None, *, gathers: bool = False) -> None:
        self.hosts: tuple[int, ...] = ()  # of each process, if the next host also keeps shards
        self.memories: tuple[str, ...] = ()  # of each process's commits
        self._gathers = gathers  # `per_rank` leaves
        self._share = share
        self._rows: list[Rows] = []  # of each leaf, in the share
        # Checksum of the last state's layout, equal on processes that write together.
        self.form: int | None = None
        self._kind: Any = None  # of the state that the following describe
        self._leaves: list[SavedLeaf] = []
        self._apart: list[int] = []  # of gathered leaves
        self._elsewhere: list[int] = []  # of leaves without a local shard
        self._parts: list[shards.LeafPart] = []  # of the split leaves
        self._replaceable: list[int] = []  # indices of parts that a `per_rank` rule replaces

    def find(self, state: Any, *, here: bool) -> WrittenPieces | None:
        """Return the pieces; None with `here=False`, unless leaves are split or shared.

        All processes must call this; those with `here=False` only gather, and write their shards.
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
            if copied := self._copied():
                copies = buddy_copies(arrays, copied, self.hosts)
                pieces += [StatePiece(-1, None, x, n) for n, x in copies.items()]
            held = [piece.part for piece in pieces if piece.part is not None]
            split = shards.split_facts(
                self._parts, held, has_whole=here, replaceable=self._lost_with()
            )
        return WrittenPieces(self._leaves, pieces, split, self.form)

    def local_pieces(self, state: Any, *, here: bool) -> list[StatePiece]:
        """Return the pieces known without communication."""
        arrays = [*map(without_key, self._described(state))]
        here = here or self.form is not None
        return self._of_share(arrays, here=here, without=self._apart)

    def num_bytes(self, state: Any, *, here: bool) -> int:
        """Return the size of all of a commit's pieces."""
        arrays = self._described(state)
        split = {part.leaf for part in self._parts}
        here = here or self.form is not None
        whole = [leaf for i, leaf in enumerate(self._leaves) if i not in split] if here else []
        numbers = [n for n, part in enumerate(self._parts) if part.writer == jax.process_index()]
        if copied := self._copied():
            numbers += kept(arrays, copied, self.hosts)
        mine = [shards.described_part(self._leaves, self._parts[n]) for n in numbers]
        return sum(map(padded_bytes, [*whole, *mine]))

    def _described(self, state: Any) -> list[Any]:
        leaves, treedef = jax.tree.flatten(state)
        arrays = [x for x in leaves if is_array(x)]
        kind = treedef, [_kind(x) for x in arrays]
        if kind != self._kind:
            self._leaves = describe(state)
            self._apart, self._parts, leaves = _placement(state, arrays, gathers=self._gathers)
            self._replaceable = [n for n, part in enumerate(self._parts) if part.leaf in leaves]
            self._elsewhere = [
                i
                for i, x in enumerate(arrays)
                if isinstance(x, jax.Array) and not x.sharding.addressable_devices
            ]
            self.form = None
            if self._share and not self._parts:
                is_shared = [*map(holds_everywhere, arrays)]
                self._rows = shared_rows(self._leaves, is_shared, self._share)
                self.form = zlib.crc32(repr((self._leaves, is_shared)).encode())
            self._kind = kind
        return arrays

    # This process may lack shards of a leaf that it does not write.
    def _of_share(
        self, arrays: list[Any], *, here: bool, without: Sequence[int] = ()
    ) -> list[StatePiece]:
        rows = self._rows if self.form is not None else []
        without = [*without, *(i for i, (start, stop) in enumerate(rows) if start == stop)]
        missing = {*self._elsewhere} - {*without, *(part.leaf for part in self._parts)}
        if here and missing:
            raise _not_held(self._leaves[min(missing)].name, arrays[min(missing)])
        pieces = _all_pieces(arrays, self._parts, here=here, without=without)
        return [_cut(piece, rows[piece.leaf]) for piece in pieces] if rows else pieces

    def _lost_with(self) -> list[shards.Replaceable]:
        of: dict[str, list[int]] = defaultdict(list)
        for n in self._replaceable:
            writer = self._parts[n].writer
            of[self.memories[writer] if self.memories else ""].append(n)
        return [(*bounds, name) for name, own in of.items() for bounds in shards.ranges(own)]

    # The shards that the next host also keeps.
    def _copied(self) -> dict[int, shards.LeafPart]:
        if len({*self.hosts}) <= 1:
            return {}
        replaceable = {*self._replaceable}
        return {n: part for n, part in enumerate(self._parts) if n not in replaceable}


def require_alive(state: Any) -> None:
    """Raise a ValueError that names the first donated leaf."""
    pytrees.require_alive(
        "state",
        state,
        "Write state, ... = step(state, ...) and then ckpt.step(state, batches), after each step.",
    )


def is_split(state: Any) -> bool:
    """Whether several processes write leaves of a checkpoint in shards."""
    arrays = [x for x in jax.tree.leaves(state) if is_array(x)]
    return bool(_placement(state, arrays, gathers=True)[1])


def on_devices(pieces: Sequence[StatePiece]) -> Mapping[jax.Device, list[int]]:
    """Return the pieces' indices on each device."""
    found: dict[jax.Device, list[int]] = defaultdict(list)
    for i, piece in enumerate(pieces):
        if isinstance(piece.values, jax.Array):
            found[next(iter(piece.values.devices()))].append(i)
    return found


def _kind(x: Any) -> Any:
    if isinstance(x, jax.Array):
        return x.shape, x.dtype, x.sharding
    return type(x), getattr(x, "shape", ()), getattr(x, "dtype", None)


# Indices of gathered leaves, the shards of split leaves, and the leaves that may lose shards.
def _placement(
    state: Any, arrays: list[Any], *, gathers: bool
) -> tuple[list[int], list[shards.LeafPart], set[int]]:
    apart = [i for i, x in enumerate(arrays) if not _is_on_each_process(x)]
    if not apart:
        return [], [], set()
    pairs = zip(jax.tree.leaves(state), rank_state.owners(state), strict=True)
    owners = [owner for x, owner in pairs if is_array(x)]
    gathered = [i for i in apart if gathers and owners[i] is not None]
    split = [i for i in apart if i not in gathered]
    of = {i: shards.parts_of(i, without_key(arrays[i])) for i in split}
    parts = [part for found in of.values() for part in found]
    # Adjacent by process, so they form few ranges.
    parts.sort(key=lambda part: (part.writer, part.leaf, part.box))
    replaceable = {
        i
        for i, found in of.items()
        if (owner := owners[i]) is not None
        and owner.resize is not None
        and len(found) == len(arrays[i].sharding.device_set)
        and all(shards.has_whole_rows(part.box, without_key(arrays[i]).shape) for part in found)
    }
    return gathered, parts, replaceable


# Whether each process can assemble it from its own devices; equal on all processes, because a
# sharding lists all devices' shards.
def _is_on_each_process(x: Any) -> bool:
    sharding = getattr(x, "sharding", None)
    if sharding is None or sharding.is_fully_addressable or sharding.is_fully_replicated:
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


# Shards of split leaves and, if `here`, all other leaves but `without`.
def _all_pieces(
    arrays: list[Any], parts: list[shards.LeafPart], *, here: bool, without: Sequence[int] = ()
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


def _cut(piece: StatePiece, rows: Rows) -> StatePiece:
    shape = np.shape(piece.values)
    if piece.index is not ... or not shape or rows == (0, shape[0]):
        return piece
    return piece._replace(index=(slice(*rows),), rows=rows)


# The local shards that make up array `i`.
def _pieces(i: int, x: Any) -> list[StatePiece]:
    if not isinstance(x, jax.Array):
        return [StatePiece(i, ..., x)]
    if x.is_fully_replicated:
        return [StatePiece(i, ..., x.addressable_data(0), array=x)]
    found = {str(shard.index): shard for shard in x.addressable_shards}
    return [StatePiece(i, shard.index, shard.data, array=x) for shard in found.values()]
