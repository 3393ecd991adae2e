"""The batches of a run: the number of rows of each, and where the last one ends."""

from typing import NamedTuple

from jdp.validation import int_at_least


class EpochPlan(NamedTuple):
    """The batches of one run over a stream of rows."""

    batch_size: int
    end: int  # position in the stream, in rows
    num_steps: int | None  # None for a run of epochs
    tail: str  # "pad" or "drop", for a run that ends with an epoch
    # All batches of a run have a mask, or none has. If only some had one, the step would be traced
    # again, and if it depended on the number of rows, users would be surprised.
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
    ) -> "EpochPlan":
        """Plan a run of `num_steps` full batches, or of `epochs` passes over all rows.

        Args:
          num_rows: rows of the dataset, >= 1.
          batch_size: rows of a global batch, >= 1.
          num_steps: number of batches, >= 1, or None.
          epochs: number of passes, >= 1, or None.
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
        run = cls(batch_size, end, num_steps, tail, may_be_short or bool(mask))
        if run.num_batches == 0:
            raise ValueError(
                f'tail="drop" leaves no batch at all: the run has {end} rows, a batch '
                f'{batch_size}. Use a smaller batch_size, more epochs, or tail="pad".'
            )
        return run

    @property
    def num_batches(self) -> int:
        """Return the number of batches of the whole run."""
        if self.num_steps is not None:
            return self.num_steps
        return self.num_left(0)

    def continued(self, position: int, num_done: int) -> "EpochPlan":
        """Return the run that goes on at a position, after batches that may have had another size.

        A run of `num_steps` ends after so many batches in all, one of epochs at the same row.

        >>> run = EpochPlan.planned(100, 32, num_steps=60, epochs=None, tail="pad")
        >>> run.continued(40 * 64, num_done=40).num_left(40 * 64)
        20
        """
        if self.num_steps is None:
            return self
        return self._replace(end=position + max(0, self.num_steps - num_done) * self.batch_size)

    def num_left(self, position: int) -> int:
        """Return the number of batches from a position to the end."""
        full, rest = divmod(max(self.end - position, 0), self.batch_size)
        return full + (rest > 0 and self.tail != "drop")

    def next_rows(self, position: int) -> int:
        """Return the number of rows without padding in the batch at `position`; 0 after the end."""
        left = max(self.end - position, 0)
        if self.num_steps is not None and left:
            return self.batch_size
        if self.tail == "drop" and left < self.batch_size:
            return 0
        return min(left, self.batch_size)

    def padded_size(self, num_ranks: int) -> int:
        """Return the number of rows of a batch with padding, a multiple of the number of ranks."""
        rows = -(-self.batch_size // num_ranks) * num_ranks
        if rows > self.batch_size and not self.has_mask:
            raise ValueError(
                f"batch_size {self.batch_size} is not divisible by the {num_ranks} ranks, but all "
                f"ranks need equally many rows. Write mask=True to pad each batch to {rows} rows: "
                "its mask says which rows count, so that the result is the same on any number of "
                f"ranks. Or use a multiple of {num_ranks}, such as {rows}."
            )
        return rows
