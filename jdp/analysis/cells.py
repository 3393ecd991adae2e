"""Cells: the possible contents of a `jax.Ref`."""

from __future__ import annotations


class Cell:
    """The contents of a Ref: the join of all ever written, where ranks could skip it, too."""

    __slots__ = ("value",)

    def __init__(self, value: int):
        self.value = value


def value_of(value: int | Cell) -> int:
    """Return the class of a value, or of what a Ref holds."""
    return value.value if isinstance(value, Cell) else value
