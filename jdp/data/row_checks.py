"""Check that a row of a number is the same row on all processes, each of which reads its own."""

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jdp.data import host_arrays
from jdp.data.dataset import Read
from jdp.distributed import agree
from jdp.error_codes import with_code

# A process that has other rows at all has nearly all of them; reading some again takes time.
_NUM_ROWS = 4
# A row that is flipped at random, half of the times, is the same in 8 readings once in 128.
_NUM_ROWS_OF_OBJECTS, _NUM_READINGS = 2, 8
# Of a loop, between two checks, so that one costs less than 0.1 % of steps of 20 ms.
MIN_BATCHES = 1000
_NOTE = (
    "jdp: it was read to be compared with that row of the other processes. If rows of one number "
    'differ by design, or a process has its own rows alone, write rows="of this process".'
)


def drawn(num_rows: int, seed: int, epoch: int, *, may_be_random: bool) -> np.ndarray:
    """Return the numbers of the rows that are compared in an epoch, [n] int, ascending.

    >>> drawn(1000, seed=0, epoch=0, may_be_random=False).tolist()
    [269, 511, 636, 850]
    """
    order = np.random.default_rng([seed, epoch])
    return np.unique(
        order.integers(0, num_rows, _NUM_ROWS_OF_OBJECTS if may_be_random else _NUM_ROWS)
    )


def checksums(read: Read, rows: np.ndarray, *, may_be_random: bool) -> dict[str, int]:
    """Return the checksums of rows by their numbers; none if some are not read alike each time.

    Such rows are transformed at random when they are read, so no other process has the same.

    Args:
      read: reads rows of the dataset.
      rows: their numbers, [n] int, ascending.
      may_be_random: whether a row may be another one each time.
    """
    try:
        readings = [_checksums(read(rows)) for _ in range(_NUM_READINGS if may_be_random else 1)]
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
    if not all(gathered.values()):
        return
    for row in sums:
        pair = agree.odd_one({process: found[row] for process, found in gathered.items()})
        if pair is not None:
            odd, usual = pair
            text = (
                f"row {row} of the dataset of process {odd} is not that of process {usual}: each "
                "process reads its rows of a batch by their numbers, so rows would come twice or "
                "never. Give jdp.batches the whole dataset on every process, in the same order; a "
                "process that has rows of its own hands them to jdp.shard_batches. If rows differ "
                'by design, such as by augmentation, write rows="of this process".'
            )
            raise ValueError(with_code("JDP209", text))
