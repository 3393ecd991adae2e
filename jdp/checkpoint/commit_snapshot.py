"""Snapshots of states in the memory of commits."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdp import jax_compat
from jdp.checkpoint import native_copy, shards
from jdp.checkpoint.commit_memory import Draft
from jdp.checkpoint.device_copies import DeviceCopies
from jdp.checkpoint.host_commits import HostCommits
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

    Args:
      commits: of this host. A state with split leaves is written to this process's own memory.
    """

    def __init__(self, commits: HostCommits) -> None:
        self._commits, self._finder = commits, Finder(commits.share)
        self._shares = commits.is_together
        self._copies = DeviceCopies(reuse=True)
        self._layout: _CommitLayout | None = None
        self._copying: list[jax.Array] = []

    def take_snapshot(self, state: Any, *, here: bool = True) -> CommitSnapshot | None:
        """Start copying a state, so that the next step may donate it, without waiting for the copy.

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

    def reservation(self, state: Any, hosts: tuple[int, ...], *, here: bool) -> Callable[[], None]:
        """Return a function that allocates the memory of commits, and may run in a thread.

        `hosts`: of each process; the parts of a split state are kept by the next host, too.
        """
        self._finder.hosts = hosts
        num_bytes = self._finder.num_bytes(state, here=here)
        pieces = self._finder.local_pieces(state, here=here)
        others = [piece for piece in pieces if not native_copy.takes(piece.values)]
        reserve_copies, form = self._copies.reservation(others), self._finder.form
        memory = self._commits.memory(form)
        written = self._commits.share.of_bytes(num_bytes) if form is not None else slice(num_bytes)

        def reserve() -> None:
            memory.reserve(num_bytes, written)
            reserve_copies()

        return reserve

    def stop_waiting(self) -> None:
        """Wait for other processes of the host only for a short time: this one ends."""
        self._commits.stop_waiting()

    def hurry(self) -> None:
        """Wait for other processes of the host for a limited time: the training thread waits."""
        self._commits.hurry()

    def break_up(self, error: Exception | None = None) -> None:
        """Write no more shares in this life, when devices write into the memory no more."""
        self.wait_for_copies()
        why = ""
        if error is not None:
            number = self._commits.share.number
            why = f"that with local rank {number} failed: {type(error).__name__}: {error}"
        self._commits.break_up(why)

    def wait_for_copies(self) -> None:
        """Wait until devices write into the memory no more, also where that failed."""
        copying, self._copying = self._copying, []
        with contextlib.suppress(RuntimeError):
            _wait(copying)

    def _write_alone(self) -> None:
        hosts = self._finder.hosts
        self._shares, self._finder, self._layout = False, Finder(), None
        self._finder.hosts, self._copies = hosts, DeviceCopies(reuse=True)


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


# The offset of each leaf that is written whole, and where the parts of the others begin.
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
    if not native_copy.takes(piece.values) or not piece.values.size:
        return None
    index = () if piece.index is None or piece.index is ... else piece.index
    index = (*index, *(slice(None),) * (len(leaf.shape) - len(index)))
    itemsize = piece.values.dtype.itemsize
    place = TargetBox.of_box(offset, leaf.shape, shards.box_of(index, leaf.shape), itemsize)
    if piece.rows is None:
        return place
    row_bytes = piece.values.nbytes // piece.values.shape[0]
    return place._replace(first=piece.rows[0] * row_bytes)
