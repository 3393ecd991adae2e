"""The rows' order: one endless stream of row numbers."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jdp.validation import int_at_least

# Six rounds pass `tests/data/test_permutation.py` for 1,000 rows; four fail.
NUM_ROUNDS = 8

_ODD, _OTHER_ODD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


def permuted(positions: np.ndarray, num_rows: int, keys: np.ndarray) -> np.ndarray:
    """Return rows, `[n]` uint64, at positions, `[n]` int, of the keys' order; all < `num_rows`.

    A Feistel network permutes a grid's cells: the `num_rows` rows and fewer than sqrt(num_rows)
    extra cells. From an extra cell the network is applied again (cycle walking), so the result is a
    permutation.
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


# moved + hash(other), modulo a size of at most 2**32; products wrap at 64 bits.
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


# Version of the shuffled order. 1, of jdp 0.1, holds each epoch; 2 computes rows on demand. Equal
# up to this many rows.
LATEST_ORDER, _NUM_HELD_ROWS = 2, 2**16


class Sampler(Iterator[np.ndarray]):
    """Shuffled row numbers, every row once per epoch, from any position at once.

    All epochs are one endless stream of row numbers. Epoch e is a permutation that depends only on
    (seed, e). The only state to save is `position`, the number of rows returned so far. The order
    depends on neither the batch size nor the number of ranks, so a run can resume at the same row
    with others. Batches continue across an epoch's end, and all are full.

    The cost of shuffling does not grow with the rows: above 2**16, a keyed permutation computes row
    numbers on demand.

    Args:
      num_rows: rows of the dataset, >= 1.
      batch_size: rows of a global batch, over all ranks, >= 1. May exceed `num_rows`.
      seed: integer of any size, >= 0.
      shuffle: False keeps the rows in their own order in each epoch.
      position: number of rows of the stream returned before, >= 0.
      share: `(i, k)` for the i-th of k equal blocks of each batch, i from 0. The k blocks together
        are the global batch, the same for every k.
      order: version of the shuffled order. 1 is that of jdp 0.1, for a run that began with it; it
        holds an epoch in memory, 4 bytes per row. Both are the same up to 2**16 rows.

    Raises:
      ValueError: a number is out of its range, or k does not divide `batch_size`.

    >>> sampler = Sampler(num_rows=5, batch_size=4, shuffle=False)
    >>> next(sampler).tolist(), next(sampler).tolist()
    ([0, 1, 2, 3], [4, 0, 1, 2])
    >>> sampler.position, sampler.epoch
    (8, 1)
    >>> next(Sampler(5, 4, shuffle=False, position=8, share=(1, 2))).tolist()
    [0, 1]
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        position: int = 0,
        share: tuple[int, int] = (0, 1),
        order: int = LATEST_ORDER,
    ) -> None:
        self.num_rows = int_at_least("num_rows", num_rows, least=1)
        self.batch_size = int_at_least("batch_size", batch_size, least=1)
        self.seed = int_at_least("seed", seed, least=0)
        self.shuffle = bool(shuffle)
        if order not in (1, LATEST_ORDER):
            raise ValueError(f"order must be 1 or {LATEST_ORDER}, got {order}.")
        self.order = order
        self.position = int_at_least("position", position, least=0)
        block, num_blocks = share
        if not 0 <= block < num_blocks:
            raise ValueError(
                f"share must be (i, k) with 0 <= i < k, the i-th of k equal blocks, got {share}."
            )
        if batch_size % num_blocks:
            raise ValueError(
                f"batch_size {batch_size} does not divide into {num_blocks} equal blocks; with "
                f"unequal blocks a mean over ranks is wrong. Use a multiple of {num_blocks}."
            )
        rows = batch_size // num_blocks
        self._share = slice(block * rows, (block + 1) * rows)
        self._dtype = np.dtype(np.int32 if num_rows <= 2**31 else np.int64)
        # An epoch and its order or, for many rows, the order's keys.
        self._held: tuple[int | None, np.ndarray] = (None, np.empty(0, self._dtype))

    def __repr__(self) -> str:
        return (
            f"Sampler(num_rows={self.num_rows}, batch_size={self.batch_size}, seed={self.seed}, "
            f"shuffle={self.shuffle}, position={self.position}, order={self.order})"
        )

    @property
    def epoch(self) -> int:
        """The epoch of the next row, from 0."""
        return self.position // self.num_rows

    def __next__(self) -> np.ndarray:
        """Return this share of the next batch's rows, and advance `position` by the whole batch."""
        rows = self.indices(self.position, self.batch_size)[self._share]
        self.position += self.batch_size
        return rows

    def indices(self, position: int, count: int) -> np.ndarray:
        """Return the rows at [position, position + count) of the stream, without a change of state.

        Args:
          position: where to begin, >= 0.
          count: how many rows, >= 0; may span epochs.

        Returns:
          Row numbers, [count] int32, or int64 above 2**31 rows.
        """
        return self.rows_at(position + np.arange(int_at_least("count", count, least=0)))

    def rows_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the stream's rows at these positions, [n] int, ascending."""
        epochs, offsets = np.divmod(positions, self.num_rows)
        if not self.shuffle or not len(positions):
            return offsets.astype(self._dtype)
        parts, done = [], 0
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            end = int(np.searchsorted(epochs, epoch, side="right"))
            parts.append(self._shuffled(epoch, offsets[done:end]))
            done = end
        return np.concatenate(parts).astype(self._dtype, copy=False)

    def _shuffled(self, epoch: int, offsets: np.ndarray) -> np.ndarray:
        known, held = self._held
        is_held = self.order == 1 or self.num_rows <= _NUM_HELD_ROWS
        if epoch != known:
            # First: two orders at once would double the peak memory.
            self._held = known, held = None, np.empty(0, self._dtype)
            # Since lists [seed, epoch] with seeds above 32 bits can consist of the same words.
            entropy = np.random.SeedSequence(self.seed, spawn_key=(epoch,))
            if is_held:
                held = np.arange(self.num_rows, dtype=self._dtype)
                np.random.Generator(np.random.Philox(entropy)).shuffle(held)
            else:
                held = entropy.generate_state(NUM_ROUNDS, np.uint64)
            self._held = epoch, held
        return held[offsets] if is_held else permuted(offsets, self.num_rows, held)


def facts_of(sampler: Sampler) -> dict[str, Any]:
    """Return what determines the stream of rows, for JSON."""
    return {name: getattr(sampler, name) for name in ("num_rows", "seed", "shuffle", "order")}


def continued(sampler: Sampler, saved: Mapping[str, Any], *, allows_new_data: bool) -> Sampler:
    """Return a sampler that continues an earlier stream."""
    facts = facts_of(sampler)
    before = {"order": 1} | {name: saved[name] for name in saved if name != "num_batches"}
    position, order = before.pop("position"), before.pop("order")
    other = {name: value for name, value in before.items() if facts.get(name) != value}
    if not other:
        return Sampler(batch_size=sampler.batch_size, **(facts | {"order": order}))
    if not allows_new_data:
        differences = "; ".join(f"{k} was {v}, is {facts.get(k)}" for k, v in other.items())
        raise ValueError(
            f"the batches differ from those at the start of the run: {differences}. From "
            f"position {position} on, rows would be duplicated or skipped. Pass the same "
            'dataset, seed and shuffle to jdp.batches; or, to continue with others, allow="new '
            'data".'
        )
    return sampler
