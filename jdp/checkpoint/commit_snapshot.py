"""Snapshots of states in the memory of commits."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdp import jax_compat
from jdp.checkpoint import native_copy, shards
from jdp.checkpoint.commit_memory import CommitMemory, Draft
from jdp.checkpoint.device_copies import DeviceCopies
from jdp.checkpoint.native_copy import CopyOut, TargetBox
from jdp.checkpoint.pieces import Finder, StatePiece, WrittenPieces, on_devices
from jdp.checkpoint.saved_leaves import SavedLeaf, padded_bytes


class CommitSnapshot(NamedTuple):
    """A snapshot of a state that is being copied into the memory of commits."""

    leaves: list[SavedLeaf]
    split: dict[str, Any]  # facts about its parts; empty if every leaf is whole
    draft: Draft
    copying: list[jax.Array]  # ready when the devices have copied their pieces
    others: list[tuple[StatePiece, SavedLeaf, int]]  # copy on a device, its leaf, its offset

    def fetch(self) -> Draft:
        """Copy the other pieces, and wait until the devices have copied theirs."""
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
    leaves: list[SavedLeaf]  # the list of the state that it belongs to
    targets: list[tuple[SavedLeaf, int]]  # of each piece: its leaf, and the offset of that
    num_bytes: int
    routes: dict[jax.Device, tuple[list[int], CopyOut]]  # positions of the pieces that devices copy
    others: list[int]  # positions of the other pieces


class CommitSnapshots:
    """Takes snapshots of the states of one run, in the form of `saved_leaves.pack`.

    CPU devices write into the memory themselves. Other pieces are copied on their devices first,
    which takes as much memory once more.
    """

    def __init__(self, memory: CommitMemory) -> None:
        self._memory, self._finder, self._copies = memory, Finder(), DeviceCopies(reuse=True)
        self._layout: _CommitLayout | None = None
        self._copying: list[jax.Array] = []

    def take_snapshot(self, state: Any, *, here: bool = True) -> CommitSnapshot | None:
        """Start copying a state, so that the next step may donate it, without waiting for the copy.

        The previous snapshot must no longer be in use.

        Args:
          state: the state.
          here: as for `Finder.find`.

        Raises:
          ValueError: if the state was donated.
          OSError: if the host is out of memory.
        """
        found = self._finder.find(state, here=here)
        if found is None:
            return None
        if self._layout is None or self._layout.leaves is not found.leaves:
            self._layout = _layout(found)
        layout = self._layout
        self.wait_for_copies()
        draft = self._memory.begin(layout.num_bytes)
        for positions, route in layout.routes.values():
            arrays = [found.pieces[i].values for i in positions]
            self._copying += route.begin_copy(arrays, draft.values)
        others = [found.pieces[i] for i in layout.others]
        if others:
            others = self._copies.take(others)
        targets = [layout.targets[i] for i in layout.others]
        placed = [(piece, *target) for piece, target in zip(others, targets, strict=True)]
        return CommitSnapshot(found.leaves, found.split, draft, [*self._copying], placed)

    def reservation(self, state: Any, hosts: tuple[int, ...], *, here: bool) -> Callable[[], None]:
        """Return a function that allocates the memory of commits, and may run in a thread.

        `hosts`: of each process; the parts of a split state are kept by the next host, too.
        """
        self._finder.hosts = hosts
        num_bytes = self._finder.num_bytes(state, here=here)
        pieces = self._finder.local_pieces(state, here=here)
        others = [piece for piece in pieces if not native_copy.takes(piece.values)]
        reserve_copies = self._copies.reservation(others)

        def reserve() -> None:
            self._memory.reserve(num_bytes)
            reserve_copies()

        return reserve

    def wait_for_copies(self) -> None:
        """Wait until devices write into the memory no more, also where that failed."""
        copying, self._copying = self._copying, []
        with contextlib.suppress(RuntimeError):
            _wait(copying)


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
    size, last, offset = 0, -1, 0
    for piece in found.pieces:
        leaf = _written_leaf(found, piece)
        if piece.part is not None or piece.leaf != last:
            offset, last = size, piece.leaf
            size += padded_bytes(leaf)
        targets.append((leaf, offset))
        places.append(_place(piece, leaf, offset))
    routes = {}
    for device, positions in on_devices(found.pieces).items():
        chosen = [i for i in positions if places[i] is not None]
        if chosen:
            arrays = [found.pieces[i].values for i in chosen]
            routes[device] = chosen, CopyOut(arrays, [p for i in chosen if (p := places[i])])
    others = [i for i, place in enumerate(places) if place is None]
    return _CommitLayout(found.leaves, targets, size, routes, others)


def _written_leaf(found: WrittenPieces, piece: StatePiece) -> SavedLeaf:
    if piece.part is None:
        return found.leaves[piece.leaf]
    return SavedLeaf("", piece.values.shape, str(piece.values.dtype), None)


def _place(piece: StatePiece, leaf: SavedLeaf, offset: int) -> TargetBox | None:
    if not native_copy.takes(piece.values) or not piece.values.size:
        return None
    whole = (slice(None),) * len(leaf.shape)
    index = whole if piece.index is None or piece.index is ... else piece.index
    box = shards.box_of(index, leaf.shape)
    return TargetBox.of_box(offset, leaf.shape, box, piece.values.dtype.itemsize)
