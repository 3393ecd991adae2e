"""A number that a prediction assumes, with its interval and its source. Needs no JAX."""

from dataclasses import dataclass

PUBLISHED, ASSUMED, GIVEN = "published", "assumed", "given"
UNUSED = f"{GIVEN}, but no operation of this step takes it"
# A number of the user is far within these, and sums and quotients of such numbers are finite.
LEAST_GIVEN, MOST_GIVEN = 1e-30, 1e30
LEAST_ERROR, MOST_ERROR = 0.25, 0.75


@dataclass(frozen=True)
class Rate:
    """One rate of a device or link, or another number that a prediction assumes.

    Attributes:
      value: the likely one.
      low: the lowest that is to be expected.
      high: the highest.
      unit: such as `FLOP/s`.
      source: where it is known from.
    """

    value: float
    low: float
    high: float
    unit: str
    source: str

    def times(self, factor: float, why: str) -> "Rate":
        """Return the rate multiplied by a factor, with the reason added to its source."""
        value, low, high = (factor * x for x in (self.value, self.low, self.high))
        return Rate(value, low, high, self.unit, f"{self.source}{why}")

    def __str__(self) -> str:
        interval = "" if self.low == self.high else f" ({self.low:.3g} to {self.high:.3g})"
        return f"{self.value:.3g}{interval} {self.unit}: {self.source}"


def time_interval(error: float) -> tuple[float, float]:
    """Return the shortest and the longest time that a predicted time of 1 may stand for.

    Args:
      error: the largest |predicted / measured - 1| that was seen, >= 0. At least `LEAST_ERROR` is
        taken, for a busy machine, and at most `MOST_ERROR` for the longest time.

    >>> [round(x, 3) for x in time_interval(0.5)]  # predicted / measured was 1.5 at most
    [0.667, 2.0]
    """
    error = max(error, LEAST_ERROR)
    return 1 / (1 + error), 1 / (1 - min(error, MOST_ERROR))


def part_of(peak: float, parts: tuple[float, float, float], unit: str, source: str) -> Rate:
    """Return the parts of a peak that are reached: the lowest, the likely and the highest."""
    low, likely, high = (peak * part for part in parts)
    return Rate(likely, low, high, unit, source)


def given(value: float, unit: str) -> Rate:
    """Return a number that the user gave, which has no interval."""
    return Rate(value, value, value, unit, GIVEN)
