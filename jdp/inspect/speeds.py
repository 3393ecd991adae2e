"""How long the operations of a simulated program take."""

from collections.abc import Mapping
from typing import Protocol


class Speeds(Protocol):
    """How long operations take."""

    def compute_s(
        self,
        flops: Mapping[str, float],
        num_bytes: float,
        transcendentals: float = 0,
        *,
        is_strided: bool = False,
    ) -> float:
        """Return the seconds of an operation, given the operations of its matmuls by dtype."""
        ...

    def transfer_s(self, kind: str, algorithm: str, num_bytes: float) -> float:
        """Return the seconds of a collective, given the bytes of its whole arrays on one rank."""
        ...
