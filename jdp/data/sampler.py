"""The order of the rows, one endless stream of row numbers, and a run over it."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jdp.validation import int_at_least


class Sampler(Iterator[np.ndarray]):
    """Shuffled row numbers, every row once per epoch, from any position at once.

    All epochs, one after the other, are one endless stream of row numbers. Epoch e is a permutation
    that depends on (seed, e) alone; `position`, the number of rows of the stream that were handed
    out, is all there is to save. Batch size and number of ranks do not enter the order, so that a
    run goes on at the same row with another batch size or on another number of ranks. Batches run
    across the end of an epoch, and each of them is full.

    A shuffled epoch is held in memory, 4 bytes per row (8 above 2**31 rows), and made once, when
    the epoch begins or a run resumes inside it: 10**8 rows take 0.4 GB and some seconds, without
    the GIL.

    Args:
      num_rows: rows of the dataset, at least 1.
      batch_size: rows of one global batch, over all ranks, at least 1. May exceed `num_rows`.
      seed: non-negative integer of any size.
      shuffle: False hands the rows out in their own order in each epoch.
      position: rows of the stream that were handed out before.
      share: `(i, k)` for the i-th of k equal blocks of each batch. The blocks 0 to k - 1 in order
        are the global batch, which is the same for every k.

    Raises:
      ValueError: if a number is out of its range, or `batch_size` does not divide into k blocks.

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
    ) -> None:
        self.num_rows = int_at_least("num_rows", num_rows, least=1)
        self.batch_size = int_at_least("batch_size", batch_size, least=1)
        self.seed = int_at_least("seed", seed, least=0)
        self.shuffle = shuffle
        self.position = int_at_least("position", position, least=0)
        block, num_blocks = share
        if not 0 <= block < num_blocks:
            raise ValueError(
                f"share={share} must be (i, k) with 0 <= i < k: the i-th of k equal blocks."
            )
        if batch_size % num_blocks:
            raise ValueError(
                f"batch_size {batch_size} does not divide into {num_blocks} equal blocks, and "
                f"with unequal ones a mean over ranks is wrong. Use a multiple of {num_blocks}."
            )
        rows = batch_size // num_blocks
        self._share = slice(block * rows, (block + 1) * rows)
        self._dtype = np.dtype(np.int32 if num_rows <= 2**31 else np.int64)
        self._shuffled: tuple[int | None, np.ndarray] = (None, np.empty(0, self._dtype))

    def __repr__(self) -> str:
        return (
            f"Sampler(num_rows={self.num_rows}, batch_size={self.batch_size}, seed={self.seed}, "
            f"shuffle={self.shuffle}, position={self.position})"
        )

    @property
    def epoch(self) -> int:
        """The epoch of the next row, from 0 on."""
        return self.position // self.num_rows

    def __next__(self) -> np.ndarray:
        """This share of the next batch's rows; moves `position` past the whole batch."""
        rows = self.indices(self.position, self.batch_size)[self._share]
        self.position += self.batch_size
        return rows

    def indices(self, position: int, count: int) -> np.ndarray:
        """The rows at [position, position + count) of the stream; changes nothing.

        Args:
          position: where to begin, at least 0.
          count: how many rows, at least 0; may span epochs.

        Returns:
          Row numbers, [count] int32, or int64 above 2**31 rows.
        """
        rows = np.empty(int_at_least("count", count, least=0), self._dtype)
        done = 0
        while done < count:
            epoch, offset = divmod(position + done, self.num_rows)
            take = min(count - done, self.num_rows - offset)
            rows[done : done + take] = self._slice(epoch, offset, offset + take)
            done += take
        return rows

    def _slice(self, epoch: int, start: int, stop: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(start, stop, dtype=self._dtype)
        known, order = self._shuffled
        if epoch != known:
            # The old order goes first: two of them at once would double the peak.
            order = np.empty(0, self._dtype)
            self._shuffled = (None, order)
            order = np.arange(self.num_rows, dtype=self._dtype)
            # A spawn key, not the list [seed, epoch]: with seeds above 32 bits two such lists can
            # be the same words, and two runs the same order.
            entropy = np.random.SeedSequence(self.seed, spawn_key=(epoch,))
            np.random.Generator(np.random.Philox(entropy)).shuffle(order)
            self._shuffled = (epoch, order)
        return order[start:stop]


class Run(NamedTuple):
    """The batches of one run over a stream: where it ends, and how."""

    batch_size: int
    end: int  # in rows of the stream
    tail: str  # of a run that ends with an epoch: "pad" or "drop"
    endless: bool  # rows after `end` fill the last batch
    # All batches of a run have a mask, or none: one in some only would be a second trace of the
    # step, and one that comes and goes with the number of rows would surprise its author.
    has_mask: bool

    @classmethod
    def planned(
        cls,
        num_rows: int,
        batch_size: int,
        num_steps: int | None,
        epochs: int | None,
        tail: str,
        mask: bool | None = None,
    ) -> "Run":
        """Plan a run of `num_steps` full batches, or of all rows `epochs` times.

        Raises:
          ValueError: if not exactly one of the two is given, no batch is left, or `mask` is False
            where a batch may be short.
        """
        if tail not in ("pad", "drop"):
            raise ValueError(f'tail={tail!r}: write "pad" or "drop".')
        if num_steps is not None and epochs is None:
            end = int_at_least("num_steps", num_steps, least=1) * batch_size
        elif epochs is not None and num_steps is None:
            end = int_at_least("epochs", epochs, least=1) * num_rows
        else:
            raise ValueError(
                f"num_steps={num_steps} and epochs={epochs}: give exactly one of the two, which "
                "says where the run ends. Write num_steps=1000, or epochs=3."
            )
        may_be_short = tail == "pad" and num_steps is None
        if mask is False and may_be_short:
            raise ValueError(
                'mask=False with tail="pad": the rows that pad a short last batch would count. '
                'Leave mask out, or that batch: tail="drop".'
            )
        run = cls(batch_size, end, tail, num_steps is not None, may_be_short or bool(mask))
        if run.num_batches == 0:
            raise ValueError(
                f'tail="drop" leaves no batch at all: the run has {end} rows, a batch '
                f'{batch_size}. Use a smaller batch_size, more epochs, or tail="pad".'
            )
        return run

    @property
    def num_batches(self) -> int:
        """Batches from position 0 to the end."""
        full, rest = divmod(self.end, self.batch_size)
        return full + (rest > 0 and self.tail != "drop")

    def next_rows(self, position: int) -> int:
        """Count the rows that are not padding in the batch at `position`; 0 after the end."""
        left = max(self.end - position, 0)
        if self.endless and left:
            return self.batch_size
        if self.tail == "drop" and left < self.batch_size:
            return 0
        return min(left, self.batch_size)

    def padded_size(self, num_ranks: int) -> int:
        """Count the rows of a batch with those that pad it: all ranks hold equally many.

        Raises:
          ValueError: if there are some that pad, and no mask.
        """
        rows = -(-self.batch_size // num_ranks) * num_ranks
        if rows > self.batch_size and not self.has_mask:
            raise ValueError(
                f"batch_size {self.batch_size} is not divisible by the {num_ranks} ranks, but all "
                f"ranks need equally many rows. Write mask=True to pad each batch to {rows} rows: "
                "its mask says which rows count, so that the result is the same on any number of "
                f"ranks. Or use a multiple of {num_ranks}, such as {rows}."
            )
        return rows

    def batch(self, sampler: Sampler, position: int, size: int) -> tuple[np.ndarray, int]:
        """Return the row numbers of the batch at `position`, and how many of them count.

        Those that count stand first, in the order of the stream; the last of them is repeated.

        Args:
          sampler: gives the stream.
          position: where to begin, before the end of the run.
          size: `padded_size`.

        Returns:
          Row numbers, [size] int, equal blocks of them for the ranks in order; and the number of
          those that are not padding, so that the last ranks may hold nothing else.
        """
        count = self.next_rows(position)
        return np.pad(sampler.indices(position, count), (0, size - count), mode="edge"), count
