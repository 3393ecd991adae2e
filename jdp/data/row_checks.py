"""Check that all processes have the same dataset: compare the checksums of a few rows."""

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jdp.data import host_arrays
from jdp.data.dataset import Read
from jdp.distributed import agree
from jdp.error_codes import with_code

# Different datasets differ in nearly all rows.
_NUM_ROWS = 4
# A row that a coin flip changes is equal in 8 readings once in 128.
_NUM_ROWS_OF_OBJECTS, _NUM_READINGS = 2, 8
# Between two checks of a loop.
MIN_BATCHES = 1000
_NOTE = (
    "jdp: the processes compare this row. If each process has its own rows, write "
    'rows="of this process".'
)


class RowCheck(NamedTuple):
    """Reads the rows of a dataset that processes compare.

    Attributes:
      read: reads rows of the dataset.
      num_rows: of the dataset.
      seed: the same on all processes.
      may_be_random: whether the dataset may return another row each time.
    """

    read: Read
    num_rows: int
    seed: int
    may_be_random: bool

    def drawn(self, epoch: int) -> np.ndarray:
        """Return the numbers of the rows to compare in an epoch, [n] int, ascending.

        >>> RowCheck(lambda rows: rows, 1000, seed=0, may_be_random=False).drawn(0).tolist()
        [269, 511, 636, 850]
        """
        size = _NUM_ROWS_OF_OBJECTS if self.may_be_random else _NUM_ROWS
        return np.unique(np.random.default_rng([self.seed, epoch]).integers(0, self.num_rows, size))

    def checksums(self, rows: np.ndarray) -> dict[str, int]:
        """Return checksums by row number; empty if the dataset transforms rows at random."""
        num = _NUM_READINGS if self.may_be_random else 1
        try:
            readings = [_checksums(self.read(rows)) for _ in range(num)]
        except Exception as error:
            error.add_note(_NOTE)
            raise
        first = readings[0]
        if any(each != first for each in readings) or len(first) != len(rows):
            return {}
        return dict(zip(map(str, rows.tolist()), first, strict=True))


def _checksums(batch: Any) -> list[int]:
    leaves = [leaf for leaf in jax.tree.leaves(batch) if isinstance(leaf, np.ndarray)]
    if not leaves or any(leaf.dtype.hasobject for leaf in leaves):
        return []  # which has an error of its own
    found = [0] * len(leaves[0])
    for leaf in map(host_arrays.native, leaves):
        if np.issubdtype(leaf.dtype, np.inexact):
            leaf = leaf + leaf.dtype.type(0)  # -0.0 equals 0.0
        found = [zlib.crc32(row.tobytes(), begun) for row, begun in zip(leaf, found, strict=True)]
    return found


def require_equal(peers: tuple[int, ...], sums: Mapping[str, int]) -> None:
    """Compare rows of the datasets of all processes."""
    gathered = agree.all_gather(peers, dict(sums), what="rows of the dataset")
    if not all(gathered.values()):
        return
    for row in sums:
        pair = agree.odd_one({process: found[row] for process, found in gathered.items()})
        if pair is not None:
            odd, usual = pair
            text = (
                f"row {row} of the dataset differs between processes {odd} and {usual}.\nProcesses "
                "read rows by number, so some rows would count twice and others never.\nGive every "
                "process the same dataset; use jdp.shard_batches for rows of one process; or write "
                'rows="of this process" if they differ by design, such as by augmentation.'
            )
            raise ValueError(with_code("JDP209", text))
