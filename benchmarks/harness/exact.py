"""The check of every result: inputs whose sums are exact, and the comparison on each rank.

Every contestant of every benchmark has `prepare()`, which writes the inputs of the next round,
`__call__()`, which alone is timed, and `check()`, which compares all elements of this process's
ranks. Needs NumPy alone, so that peers without JAX use it, too.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from jdp.tools.known_values import WrongResultError as WrongResultError
from jdp.tools.known_values import require_equal as require

CHECKED = "Results checked on every rank in each round."

PERIOD = 251  # a prime: elements that change places by a power of two do not match
NUM_ROUNDS = 1000  # until inputs repeat; whole numbers below 2**24 are exact in float32


class Contestant(Protocol):
    """A contestant that `checked` times."""

    def prepare(self) -> None:
        """Write the inputs of the next round."""

    def __call__(self) -> Any:
        """Compute."""

    def check(self) -> None:
        """Compare the result of this round on every rank of this process."""


def checked(contestant: Contestant, time: Callable[[Contestant], float]) -> Callable[[], float]:
    """Return a clock that times the contestant alone, and checks what it computed.

    Args:
      contestant: prepared before the clock starts, checked after it has stopped.
      time: calls the contestant once and returns the seconds.
    """

    def clock() -> float:
        contestant.prepare()
        seconds = time(contestant)
        contestant.check()
        return seconds

    return clock


def pattern(size: int, start: int = 0) -> np.ndarray:
    """Return whole numbers, `[size]` float32 in 1 to 251, from element `start` of a long vector."""
    first = start % PERIOD
    return _long_pattern(size + PERIOD)[first : first + size].copy()


@functools.lru_cache(maxsize=2)
def _long_pattern(size: int) -> np.ndarray:
    return (np.arange(size, dtype=np.int32) % PERIOD + 1).astype(np.float32)


def values(rank: int, round_number: int, size: int, start: int = 0) -> np.ndarray:
    """Return the input of a rank, `[size]` float32: different in each rank, round and place."""
    found = pattern(size, start)
    found *= rank + 1
    found += round_number % NUM_ROUNDS
    return found


def reduced(
    num_ranks: int,
    round_number: int,
    num_calls: int,
    size: int,
    *,
    scale: float = 1.0,
    start: int = 0,
) -> np.ndarray:
    """Return the exact result of consecutive all-reduces, each of the result of the one before.

    Args:
      num_ranks: ranks, of which rank r put in `values(r, ...)`.
      round_number: the round whose values to compute.
      num_calls: number of consecutive all-reduces.
      size: number of elements.
      scale: factor of each sum. With 2 / num_ranks each call doubles the values, so that the result
        of a missing call differs. start: index of the first element in the long vector.

    Raises:
      ValueError: if float32 does not hold the result exactly.
    """
    factor = scale * (num_ranks * scale) ** (num_calls - 1)
    most = (PERIOD * num_ranks * (num_ranks + 1) // 2 + num_ranks * NUM_ROUNDS) * factor
    if math.frexp(factor)[0] != 0.5 or most >= 2.0**127:
        raise ValueError(
            f"{num_calls} sums over {num_ranks} ranks, each scaled by {scale}, multiply by "
            f"{factor:g}: float32 would not hold the result exactly. Choose num_ranks * scale to "
            "be a power of two, or fewer calls."
        )
    found = pattern(size, start)
    found *= num_ranks * (num_ranks + 1) // 2
    found += num_ranks * (round_number % NUM_ROUNDS)
    found *= np.float32(factor)
    return found


class InPlace:
    """One rank's vector that is summed in place."""

    def __init__(self, contestant: str, rank: int, num_ranks: int, vector: np.ndarray):
        """Take a vector, `[size]` float32, in the memory that the contestant sums."""
        self._contestant, self._rank, self._num_ranks = contestant, rank, num_ranks
        self._vector, self._round = vector, 0

    def prepare(self) -> None:
        self._round += 1
        self._vector[:] = values(self._rank, self._round, self._vector.size)

    def check(self, num_calls: int) -> None:
        require(
            self._vector,
            reduced(self._num_ranks, self._round, num_calls, self._vector.size),
            contestant=self._contestant,
            rank=self._rank,
            round_number=self._round,
            what=f"sum {num_calls} in a row",
        )
