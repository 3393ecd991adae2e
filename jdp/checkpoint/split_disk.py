"""Reads a checkpoint piece by piece, also one that several processes wrote."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jdp.checkpoint import part_files, shards
from jdp.checkpoint.directory import Checkpoint, Folder
from jdp.checkpoint.saved_leaves import from_disk, is_split


class CheckpointReader:
    """The pieces (`shards.pieces`) of a checkpoint that a process can read, all or none.

    Args:
      folder: where it is.
      checkpoint: the checkpoint.
      facts: written beside it.
      is_here: whether this process sees the directory.
    """

    def __init__(
        self,
        folder: Folder,
        checkpoint: Checkpoint,
        facts: Mapping[str, Any],
        *,
        is_here: bool = True,
    ) -> None:
        self._folder, self._checkpoint, self._is_here = folder, checkpoint, is_here
        self._is_split = is_split(facts)
        self._pieces, self._names = shards.pieces(facts), shards.names(facts)
        self._described = shards.described(facts)

    def has(self, n: int) -> bool:
        """Whether a piece can be read."""
        return self._is_here

    def read(self, numbers: Sequence[int]) -> dict[int, np.ndarray]:
        """Read pieces from the disk."""
        of: dict[str, list[int]] = defaultdict(list)
        for n in numbers:
            of[shards.folder_name(self._pieces[n].writer)].append(n)
        found: dict[int, np.ndarray] = {}
        for name, inside in of.items():
            wanted = {self._names[n]: self._described[n] for n in inside}
            values = from_disk(wanted, lambda names, name=name: self._read(names, name))
            found |= dict(zip(inside, values, strict=True))
        return found

    def _read(self, names: list[str], name: str) -> Mapping[str, np.ndarray]:
        if self._is_split:
            return part_files.read(self._checkpoint.path / name, names)
        return self._folder.read(self._checkpoint, names)
