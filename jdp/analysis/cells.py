"""Cells: the possible contents of a `jax.Ref`."""

from __future__ import annotations


class Cell:
    """The contents of a Ref: the join of all values ever written, also where ranks may skip it."""

    __slots__ = ("value",)

    def __init__(self, value: int):
        self.value = value


def value_of(value: int | Cell) -> int:
    """Return the class of a value, or of the contents of a Ref."""
    return value.value if isinstance(value, Cell) else value
