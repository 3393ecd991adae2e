"""A copy of a state on its devices, for a checkpoint, which fetches the values to the host."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdp.checkpoint.device_copies import DeviceCopies
from jdp.checkpoint.pieces import Finder, StatePiece
from jdp.checkpoint.saved_leaves import SavedLeaf


class Snapshot(NamedTuple):
    """A copy of a state on the devices that is never donated while in use."""

    leaves: list[SavedLeaf]
    pieces: list[StatePiece]
    split: dict[str, Any]  # facts about its parts; empty if every leaf is whole

    def fetch(self) -> list[np.ndarray]:
        """Copy the values to the host, whole leaves first; on a CPU they are read in place."""
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
    """Takes snapshots of the states of one run."""

    def __init__(self) -> None:
        self._finder, self._copies = Finder(), DeviceCopies(reuse=False)

    def take_snapshot(self, state: Any, *, here: bool = True) -> Snapshot | None:
        """Start copying a state, so that the next step may donate it."""
        found = self._finder.find(state, here=here)
        if found is None:
            return None
        return Snapshot(found.leaves, self._copies.take(found.pieces), found.split)
