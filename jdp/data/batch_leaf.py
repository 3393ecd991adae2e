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
