"""One leaf of a host batch: its name, shape and dtype, as errors show them."""

from typing import NamedTuple

import numpy as np


class Leaf(NamedTuple):
    """One leaf of a process's host batch."""

    name: str
    shape: tuple[int, ...]  # of this process's rows
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"

    def mend(self, first: "Leaf") -> str:
        """Return the advice for a leaf that is not like that of the first batch."""
        if self.shape[1:] != first.shape[1:]:
            return (
                "Pad the rows of all batches to one shape, not to the longest of each batch, or "
                "pack several sequences into a row."
            )
        if self.shape == first.shape:
            return f"Cast every batch to {first.dtype}."
        return (
            'Drop a short last batch (drop_remainder, drop_last, tail="drop"), or pad and mask it.'
        )
