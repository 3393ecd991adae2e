"""Check that a row of a number is the same row on all processes, each of which reads its own."""

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jdp.data.dataset import Read
from jdp.distributed import agree
from jdp.error_codes import with_code

# A process that has other rows at all has nearly all of them; reading some again takes time.
NUM_ROWS = 4
# Of a loop, between two checks, so that one costs less than 0.1 % of steps of 20 ms.
MIN_BATCHES = 1000


def drawn(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return the numbers of the rows that are compared in an epoch, [n] int, ascending.

    >>> drawn(1000, seed=0, epoch=0).tolist(), drawn(3, seed=0, epoch=1).tolist()
    ([269, 511, 636, 850], [1, 2])
    """
    order = np.random.default_rng([seed, epoch])
    return np.unique(order.integers(0, num_rows, NUM_ROWS))


def checksums(read: Read, rows: np.ndarray) -> dict[str, int]:
    """Return the checksums of rows by their numbers, without those that are not read alike twice.

    Such a row is transformed at random when it is read, so no other process has the same.

    Args:
      read: reads rows of the dataset.
      rows: their numbers, [n] int, ascending.
    """
    first, again = (_checksums(read(rows)) for _ in range(2))
    found = zip(rows.tolist(), first, again, strict=True)
    return {str(row): one for row, one, other in found if one == other}


def _checksums(batch: Any) -> list[int]:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]
    found = [0] * len(leaves[0])
    for leaf in leaves:
        found = [zlib.crc32(row.tobytes(), begun) for row, begun in zip(leaf, found, strict=True)]
    return found


def require_equal(peers: tuple[int, ...], sums: Mapping[str, int]) -> None:
    """Compare rows of the datasets of all processes.

    Args:
      peers: the processes, which all call this with the same numbers.
      sums: the checksums of this process's rows.

    Raises:
      ValueError: on every process, if a row of one number differs between two processes.
    """
    gathered = agree.all_gather(peers, dict(sums), what="rows of the dataset")
    for row in sums:
        known = {process: found[row] for process, found in gathered.items() if row in found}
        if len(known) == len(gathered) and (pair := agree.odd_one(known)):
            odd, usual = pair
            text = (
                f"row {row} of the dataset of process {odd} is not that of process {usual}: each "
                "process reads its rows of a batch by their numbers, so rows would come twice or "
                "never. Give jdp.batches the whole dataset on every process, in the same order; a "
                "process that has rows of its own hands them to jdp.shard_batches. If rows differ "
                'by design, such as by augmentation, write rows="of this process".'
            )
            raise ValueError(with_code("JDP209", text))
