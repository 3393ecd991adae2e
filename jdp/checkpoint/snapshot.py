"""Snapshots of a state: on its devices for a checkpoint, in host memory for a commit."""

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from jdp import jax_compat
from jdp.checkpoint import shards
from jdp.checkpoint.commit_memory import Draft
from jdp.checkpoint.host_commits import HostCommits
from jdp.checkpoint.saved_leaves import SavedLeaf, padded_bytes
from jdp.checkpoint.shards import Box
from jdp.checkpoint.write_plan import Finder, Rows, StatePiece, WrittenPieces, on_devices
from jdp.collectives.cpu import runtime


@contextlib.contextmanager
def single_device_programs() -> Iterator[None]:
    """Allow one device's programs under `jax.set_mesh` and `jax.transfer_guard`."""
    with jax.set_mesh(Mesh(np.empty((), object), ())), jax.transfer_guard("allow"):
        yield


# Calls of one program run concurrently. MLIR compares a call's arrays pairwise.
_CALL_BYTES, _CALL_ARRAYS = 64 << 20, 512


class TargetBox(NamedTuple):
    """Where bytes of an array go: equal runs inside of loops, outermost first."""

    offset: int
    run_bytes: int
    loops: tuple[tuple[int, int], ...] = ()  # count, stride in bytes
    first: int = 0  # byte of the array

    @property
    def num_bytes(self) -> int:
        """The number of copied bytes."""
        return self.run_bytes * math.prod(count for count, _ in self.loops)

    @classmethod
    def of_box(cls, offset: int, shape: Sequence[int], box: Box, itemsize: int) -> "TargetBox":
        """Return the place of a box of an array, `offset` bytes into the memory.

        >>> TargetBox.of_box(100, (4, 6), ((0, 4), (2, 4)), 4)
        TargetBox(offset=108, run_bytes=8, loops=((4, 24),), first=0)
        >>> TargetBox.of_box(0, (4, 6), ((2, 4), (0, 6)), 4)
        TargetBox(offset=48, run_bytes=48, loops=(), first=0)
        """
        strides = [itemsize * int(np.prod(shape[d + 1 :], dtype=np.int64)) for d in range(len(box))]
        sizes = [stop - start for start, stop in box]
        offset += sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
        cut = [d for d, size in enumerate(sizes) if size != shape[d]]
        if not cut:
            return cls(offset, itemsize * int(np.prod(sizes, dtype=np.int64)))
        last = cut[-1]
        loops = zip(sizes[:last], strides[:last], strict=True)
        return cls(offset, sizes[last] * strides[last], tuple(loops))


def takes(x: Any) -> bool:
    """Whether the library can copy it: whole-byte elements on a CPU."""
    return (
        isinstance(x, jax.Array)
        and next(iter(x.devices())).platform == "cpu"
        and _has_whole_bytes(x.dtype)
        and runtime.why_missing() is None
    )


class CopyOut:
    """The places of one device's arrays, for repeated copies."""

    def __init__(self, places: Sequence[TargetBox]) -> None:
        self._calls: list[tuple[slice, np.ndarray, np.ndarray]] = []
        first, num_bytes = 0, 0
        for i, place in enumerate(places):
            size = place.num_bytes
            if i > first and (i - first == _CALL_ARRAYS or num_bytes + size > _CALL_BYTES):
                self._add_call(slice(first, i), places)
                first, num_bytes = i, 0
            num_bytes += size
        self._add_call(slice(first, len(places)), places)

    def begin_copy(self, arrays: Sequence[jax.Array], target: np.ndarray) -> list[jax.Array]:
        """Start copying into `target`, `[bytes]` uint8, which must live until the copy ends."""
        words, groups = [], []
        for chosen, relative, is_offset in self._calls:
            words.append(np.where(is_offset, relative + target.ctypes.data, relative))
            groups.append([*arrays[chosen]])
        with single_device_programs():
            return _copy_out([each.view(np.uint32) for each in words], groups)

    def _add_call(self, chosen: slice, places: Sequence[TargetBox]) -> None:
        words: list[int] = []
        is_offset: list[bool] = []
        for place in places[chosen]:
            loops = sum(place.loops, ())
            flat = [place.offset, place.first, place.run_bytes, len(place.loops), *loops]
            words += flat
            is_offset += [True, *[False] * (len(flat) - 1)]
        self._calls.append((chosen, np.array(words, np.int64), np.array(is_offset)))


# Addresses as operands make the program cacheable.
@jax.jit
def _copy_out(words: list[jax.Array], groups: list[list[jax.Array]]) -> list[jax.Array]:
    call = jax.ffi.ffi_call(runtime.COPY_OUT, jax.ShapeDtypeStruct((1,), np.uint8))
    return [call(places, *arrays) for places, arrays in zip(words, groups, strict=True)]


# XLA may pack several elements of other dtypes into a byte.
def _has_whole_bytes(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits == 8 * dtype.itemsize
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits == 8 * dtype.itemsize
    return dtype == np.bool_ or jnp.issubdtype(dtype, jnp.complexfloating)


# Smaller arrays stay on the first device: each further one would run a program.
LARGE_BYTES = 1 << 20


class DeviceCopies:
    """Takes successive copies of pieces.

    A large array or shard that several local devices hold is copied on one, so the copies balance
    in memory. `reuse` keeps the memory for the next copy.
    """

    def __init__(self, *, reuse: bool) -> None:
        self._reuse = reuse
        self._spare: dict[jax.Device, list[jax.Array]] = {}

    def take(self, pieces: Sequence[StatePiece]) -> list[StatePiece]:
        """Start copying pieces without waiting, so the next step may donate them.

        Earlier copies must no longer be in use.
        """
        found = _spread(pieces)
        before, self._spare = self._spare, {}
        for i, piece in enumerate(found):
            if not isinstance(piece.values, jax.Array):
                found[i] = piece._replace(values=np.array(piece.values))
        for device, positions in on_devices(found).items():
            chosen = [found[i] for i in positions]
            spare = before.pop(device, [])
            if [(x.shape, x.dtype) for x in spare] != [*map(_form, chosen)]:
                spare = []
            arrays, rows = [x.values for x in chosen], tuple(x.rows for x in chosen)
            with single_device_programs():
                copies = _copy(spare, arrays, rows)
            if self._reuse:
                self._spare[device] = copies
            for i, values in zip(positions, copies, strict=True):
                found[i] = found[i]._replace(values=values, rows=None)
        return found

    def reservation(self, pieces: Sequence[StatePiece]) -> Callable[[], None]:
        """Return a function that allocates the first copies, for a thread."""
        found = _spread(pieces)
        kinds = {
            device: [_form(found[i]) for i in positions]
            for device, positions in on_devices(found).items()
        }

        def reserve() -> None:
            for device, forms in kinds.items():
                zeros = jax.jit(
                    lambda forms=forms: [jnp.zeros(*form) for form in forms],
                    out_shardings=SingleDeviceSharding(device),
                )
                with single_device_programs():
                    self._spare[device] = jax.block_until_ready(zeros())

        return reserve


# Large arrays go to the least loaded device, largest first, after all others, as in R. L. Graham,
# Bounds on multiprocessing timing anomalies (1969, https://doi.org/10.1137/0117039).
def _spread(pieces: Sequence[StatePiece]) -> list[StatePiece]:
    found, loads = [*pieces], defaultdict[jax.Device, int](int)
    on_device = [i for positions in on_devices(pieces).values() for i in positions]
    shards = {i: _equal_shards(pieces[i]) for i in on_device}
    for i in sorted(on_device, key=lambda i: (len(shards[i]) > 1, -_num_bytes(pieces[i]))):
        values = pieces[i].values
        if len(shards[i]) > 1:
            values = min(shards[i], key=lambda shard: loads[shard.device]).data
        loads[_device(values)] += _num_bytes(pieces[i])
        found[i] = pieces[i]._replace(values=values, array=None)
    return found


def _equal_shards(piece: StatePiece) -> list[Any]:
    if piece.array is None or _num_bytes(piece) < LARGE_BYTES:
        return []
    shards, device = piece.array.addressable_shards, _device(piece.values)
    [index] = [shard.index for shard in shards if shard.device == device]
    return [shard for shard in shards if shard.index == index]


def _device(x: jax.Array) -> jax.Device:
    return next(iter(x.devices()))


def _num_bytes(piece: StatePiece) -> int:
    shape, dtype = _form(piece)
    return math.prod(shape) * dtype.itemsize


def _form(piece: StatePiece) -> Any:
    shape = piece.values.shape
    if piece.rows is not None:
        shape = (piece.rows[1] - piece.rows[0], *shape[1:])
    return shape, piece.values.dtype


def _copies(
    spare: list[jax.Array], arrays: list[jax.Array], rows: tuple[Rows | None, ...]
) -> list[jax.Array]:
    return [
        jnp.copy(x) if r is None else jax.lax.slice_in_dim(x, *r)
        for x, r in zip(arrays, rows, strict=True)
    ]


# keep_unused: the spare arrays are donated for their memory.
_copy = jax.jit(_copies, donate_argnums=0, static_argnums=2, keep_unused=True)


class Snapshot(NamedTuple):
    """A copy of a state on the devices, never donated while in use."""

    leaves: list[SavedLeaf]
    pieces: list[StatePiece]
    split: dict[str, Any]

    def fetch(self) -> list[np.ndarray]:
        """Copy the values to the host, whole leaves first; a CPU's are read in place."""
        for piece in self.pieces:
            if isinstance(piece.values, jax.Array):
                piece.values.copy_to_host_async()
        arrays: dict[int, np.ndarray] = {}
        for piece in self.pieces:
            i, values = piece.leaf, piece.values
            if piece.part is not None:
                continue
            if piece.index is ...:
                arrays[i] = np.asarray(values)
                continue
            if i not in arrays:
                arrays[i] = np.empty(self.leaves[i].shape, jnp.dtype(self.leaves[i].dtype))
            arrays[i][piece.index] = np.asarray(values)
        parts = [np.asarray(piece.values) for piece in self.pieces if piece.part is not None]
        return [*arrays.values(), *parts]


class Snapshots:
    """Takes snapshots of a run's states."""

    def __init__(self) -> None:
        self._finder, self._copies = Finder(gathers=True), DeviceCopies(reuse=False)

    def take_snapshot(self, state: Any, *, here: bool = True) -> Snapshot | None:
        """Start copying a state, so the next step may donate it."""
        found = self._finder.find(state, here=here)
        if found is None:
            return None
        return Snapshot(found.leaves, self._copies.take(found.pieces), found.split)


class CommitSnapshot(NamedTuple):
    """A snapshot being copied into the memory of commits."""

    leaves: list[SavedLeaf]
    split: dict[str, Any]
    draft: Draft
    copying: list[jax.Array]  # ready when copied
    others: list[tuple[StatePiece, SavedLeaf, int]]  # copy on a device, its leaf, its offset

    def fetch(self) -> Draft:
        """Copy the other pieces, and wait for the devices."""
        for piece, _, _ in self.others:
            if isinstance(piece.values, jax.Array):
                jax_compat.start_copy_to_host(piece.values)
        for piece, leaf, offset in self.others:
            room = self.draft.values[offset : offset + leaf.num_bytes].view(jnp.dtype(leaf.dtype))
            index = ... if piece.index is None else piece.index
            room.reshape(leaf.shape)[index] = np.asarray(piece.values)
        _wait(self.copying)
        return self.draft


class _CommitLayout(NamedTuple):
    leaves: list[SavedLeaf]
    targets: list[tuple[SavedLeaf, int]]  # leaf of each piece, and its offset
    num_bytes: int
    routes: dict[jax.Device, tuple[list[int], CopyOut]]  # indices of the device's pieces
    others: list[int]


class CommitSnapshots:
    """Takes snapshots of a run's states, in the form of `saved_leaves.pack`.

    CPU devices write into the memory directly. Other pieces are first copied on their devices, with
    as much memory.
    """

    def __init__(self, commits: HostCommits) -> None:
        self._commits, self._finder = commits, Finder(commits.share)
        self._shares = commits.is_together
        self._copies = DeviceCopies(reuse=True)
        self._layout: _CommitLayout | None = None
        self._copying: list[jax.Array] = []

    def take_snapshot(self, state: Any, *, here: bool = True) -> CommitSnapshot | None:
        """Start copying a state without waiting, so the next step may donate it.

        The previous snapshot must no longer be in use.
        """
        if self._shares and not self._commits.is_together:
            self._write_alone()
        found = self._finder.find(state, here=here)
        if found is None:
            return None
        if self._layout is None or self._layout.leaves is not found.leaves:
            self._layout = _layout(found)
        layout = self._layout
        self.wait_for_copies()
        draft = self._commits.begin(layout.num_bytes, form=found.form)
        if draft is None:
            return None
        for positions, route in layout.routes.values():
            arrays = [found.pieces[i].values for i in positions]
            self._copying += route.begin_copy(arrays, draft.values)
        others = [found.pieces[i] for i in layout.others]
        if others:
            others = self._copies.take(others)
        targets = [layout.targets[i] for i in layout.others]
        placed = [(piece, *target) for piece, target in zip(others, targets, strict=True)]
        return CommitSnapshot(found.leaves, found.split, draft, [*self._copying], placed)

    def reservation(
        self, state: Any, hosts: tuple[int, ...], memories: tuple[str, ...] = (), *, here: bool
    ) -> Callable[[], None]:
        """Return a function that allocates the commits' memory, for a thread.

        `hosts`: of each process; the next host also keeps a process's shards. `memories`: of each
        process's commits.
        """
        self._finder.hosts, self._finder.memories = hosts, memories
        num_bytes = self._finder.num_bytes(state, here=here)
        pieces = self._finder.local_pieces(state, here=here)
        others = [piece for piece in pieces if not takes(piece.values)]
        reserve_copies, form = self._copies.reservation(others), self._finder.form
        memory = self._commits.memory(form)
        written = self._commits.share.of_bytes(num_bytes) if form is not None else slice(num_bytes)

        def reserve() -> None:
            memory.reserve(num_bytes, written)
            reserve_copies()

        return reserve

    def stop_waiting(self) -> None:
        """From now on wait only briefly, since this process ends."""
        self._commits.stop_waiting()

    def hurry(self) -> None:
        """From now on limit waits: the training thread waits."""
        self._commits.hurry()

    def break_up(self, error: Exception | None = None) -> None:
        """Write no more shares in this life, once devices no longer write."""
        self.wait_for_copies()
        why = ""
        if error is not None:
            number = self._commits.share.number
            why = f"that with local rank {number} failed: {type(error).__name__}: {error}"
        self._commits.break_up(why)

    def wait_for_copies(self) -> None:
        """Wait until devices no longer write, even after a failure."""
        copying, self._copying = self._copying, []
        with contextlib.suppress(RuntimeError):
            _wait(copying)

    def _write_alone(self) -> None:
        before, self._finder = self._finder, Finder()
        self._finder.hosts, self._finder.memories = before.hosts, before.memories
        self._shares, self._layout, self._copies = False, None, DeviceCopies(reuse=True)


def _wait(arrays: Sequence[jax.Array]) -> None:
    failed = None
    for x in arrays:
        try:
            x.block_until_ready()
        except RuntimeError as error:
            failed = failed or error
    if failed is not None:
        raise failed


def _layout(found: WrittenPieces) -> _CommitLayout:
    targets: list[tuple[SavedLeaf, int]] = []
    places: list[TargetBox | None] = []
    offsets, size = _whole_leaves(found)
    for piece in found.pieces:
        leaf, offset = _written_leaf(found, piece), size
        if piece.part is None:
            offset = offsets[piece.leaf]
        else:
            size += padded_bytes(leaf)
        targets.append((leaf, offset))
        places.append(_place(piece, leaf, offset))
    routes = {}
    for device, positions in on_devices(found.pieces).items():
        chosen = [i for i in positions if places[i] is not None]
        if chosen:
            routes[device] = chosen, CopyOut([p for i in chosen if (p := places[i])])
    others = [i for i, place in enumerate(places) if place is None]
    return _CommitLayout(found.leaves, targets, size, routes, others)


# Offset of each whole leaf, and the shards' start.
def _whole_leaves(found: WrittenPieces) -> tuple[dict[int, int], int]:
    here = dict.fromkeys(piece.leaf for piece in found.pieces if piece.part is None)
    offsets, size = {}, 0
    for i in range(len(found.leaves)) if found.form is not None else here:
        offsets[i] = size
        size += padded_bytes(found.leaves[i])
    return offsets, size


def _written_leaf(found: WrittenPieces, piece: StatePiece) -> SavedLeaf:
    if piece.part is None:
        return found.leaves[piece.leaf]
    return SavedLeaf("", piece.values.shape, str(piece.values.dtype), None)


def _place(piece: StatePiece, leaf: SavedLeaf, offset: int) -> TargetBox | None:
    if not takes(piece.values) or not piece.values.size:
        return None
    index = () if piece.index is None or piece.index is ... else piece.index
    index = (*index, *(slice(None),) * (len(leaf.shape) - len(index)))
    itemsize = piece.values.dtype.itemsize
    place = TargetBox.of_box(offset, leaf.shape, shards.box_of(index, leaf.shape), itemsize)
    if piece.rows is None:
        return place
    row_bytes = piece.values.nbytes // piece.values.shape[0]
    return place._replace(first=piece.rows[0] * row_bytes)
