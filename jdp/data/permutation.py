"""A shuffled order of any number of rows, computed on demand in constant memory."""

import math

import numpy as np

# Six rounds pass the randomness tests of `tests/data/test_permutation.py` for 1,000 rows, four
# fail.
NUM_ROUNDS = 8

_ODD, _OTHER_ODD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


def permuted(positions: np.ndarray, num_rows: int, keys: np.ndarray) -> np.ndarray:
    """Return the rows at these positions of the order determined by the keys.

    A Feistel network permutes the cells of a grid, which has the first `num_rows` cells and fewer
    than sqrt(num_rows) more. If the result is one of the extra cells, the network is applied again
    until it reaches one of the first `num_rows` (cycle walking), so the result is a permutation.

    Args:
      positions: [n] int, each at least 0 and less than `num_rows`.

    Returns:
      [n] uint64, each less than `num_rows`.

    >>> keys = np.arange(NUM_ROUNDS, dtype=np.uint64)
    >>> sorted(permuted(np.arange(7), 7, keys).tolist())
    [0, 1, 2, 3, 4, 5, 6]
    """
    width = math.isqrt(num_rows - 1) + 1
    height = -(-num_rows // width)
    rows = _shuffled_cells(positions.astype(np.uint64), height, width, keys)
    while (outside := rows >= num_rows).any():
        rows[outside] = _shuffled_cells(rows[outside], height, width, keys)
    return rows


def _shuffled_cells(cells: np.ndarray, height: int, width: int, keys: np.ndarray) -> np.ndarray:
    sizes = np.uint64(height), np.uint64(width)
    moved, other = np.divmod(cells, sizes[1])
    for i, key in enumerate(keys):
        moved, other = other, _moved(moved, other, key, sizes[i % 2])
    return moved * sizes[1] + other


# Return moved + hash(other), modulo a size of at most 2**32. Products wrap around at 64 bits.
def _moved(moved: np.ndarray, other: np.ndarray, key: np.uint64, size: np.uint64) -> np.ndarray:
    values = other ^ key
    values *= _ODD
    values ^= values >> _HALF
    values *= _OTHER_ODD
    values >>= _HALF
    values *= size
    values >>= _HALF
    values += moved
    values %= size
    return values
