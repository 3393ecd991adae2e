"""A number that a prediction assumes, with its interval and its source. Needs no JAX."""

from dataclasses import dataclass

PUBLISHED, ASSUMED, GIVEN = "published", "assumed", "given"


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

    def __str__(self) -> str:
        interval = "" if self.low == self.high else f" ({self.low:.3g} to {self.high:.3g})"
        return f"{self.value:.3g}{interval} {self.unit}: {self.source}"


def given(value: float, unit: str) -> Rate:
    """Return a number that the user gave, which has no interval."""
    return Rate(value, value, value, unit, GIVEN)
