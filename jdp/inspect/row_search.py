"""A search for the most rows whose step fits into memory, which compiles few steps."""

import math
from collections.abc import Callable, Sequence

from jdp.inspect.report import of_bytes


class Search:
    """The search for the most rows that fit, by their positions among those that are tried.

    Args:
      bytes_of: returns the bytes of memory that a step takes for a number of rows, inf if XLA does
        not compile it.
      limit: bytes that fit.
      candidates: numbers of rows, ascending.

    Attributes:
      known: bytes of memory of the steps that were compiled, by position.
    """

    def __init__(self, bytes_of: Callable[[int], float], limit: int, candidates: Sequence[int]):
        self._bytes_of, self._limit, self._candidates = bytes_of, limit, candidates
        self.known: dict[int, float] = {}

    def last_that_fits(self) -> int:
        """Return the last position that fits, where the next one does not."""
        if not self.fits(0):
            took = self.known[0]
            took = of_bytes(took) if math.isfinite(took) else "more than a device has"
            raise ValueError(
                f"the fewest rows, {self._candidates[0]}, take {took} on each rank, "
                f"and the limit is {of_bytes(self._limit)}. Shard the state (jdp.sharded), or take "
                "a smaller model."
            )
        fits = max(i for i in self.known if self.fits(i))
        beyond = min((i for i in self.known if i > fits), default=None)
        while fits < len(self._candidates) - 1 and beyond != fits + 1:
            i = self._next(fits, beyond)
            if self.fits(i):
                fits = i
            else:
                beyond = i
        return fits

    def fits(self, i: int) -> bool:
        """Whether the step fits for the number of rows at a position, which is compiled once."""
        if i not in self.known:
            self.known[i] = self._bytes_of(self._candidates[i])
        return self.known[i] <= self._limit

    def bytes_at(self, i: int) -> int | None:
        """Return the bytes of memory at a position; None if no step was compiled there."""
        found = self.known.get(i, math.inf)
        return int(found) if math.isfinite(found) else None

    def _next(self, fits: int, beyond: int | None) -> int:
        """Return a position to try: where a line meets the limit, or the middle."""
        guess = 2 * fits + 1 if beyond is None else (fits + beyond) // 2
        others = [i for i in self.known if i != fits]
        # Every third one is the middle, for memory that does not grow along a line.
        if others and len(self.known) % 3:
            other = beyond or max(others)
            slope = (self.known[fits] - self.known[other]) / (fits - other)
            if 0 < slope < math.inf:
                guess = fits + int((self._limit - self.known[fits]) / slope)
        largest = len(self._candidates) - 1 if beyond is None else beyond - 1
        return min(max(guess, fits + 1), largest)
