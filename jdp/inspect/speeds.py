"""How long the operations of a simulated program take."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol


class Work(NamedTuple):
    """The work of one operation.

    Attributes:
      flops: operations of its matmuls, by dtype.
      num_bytes: that it reads and writes.
      transcendentals: number of its exponentials and the like.
      is_strided: whether it computes while it reads or writes an array across its rows.
    """

    flops: Mapping[str, float]
    num_bytes: float
    transcendentals: float = 0
    is_strided: bool = False


Groups = Sequence[Sequence[int]]


class Speeds(Protocol):
    """How long operations take."""

    def compute_s(self, work: Work) -> float:
        """Return the seconds of an operation."""
        ...

    def transfer_s(self, kind: str, algorithm: str, num_bytes: float, groups: Groups = ()) -> float:
        """Return the seconds of a collective."""
        ...
