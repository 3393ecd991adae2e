"""Rules for `jax.Ref`: one cell for each, shared by everything that may reach it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jdp.analysis.interpreter import Walk


class Cell:
    """What a Ref may hold: the join of all that was ever written, where ranks could skip it too."""

    __slots__ = ("value",)

    def __init__(self, value: int):
        self.value = value


def held(value: int | Cell) -> int:
    """Give the class of a value, or of what a Ref holds."""
    return value.value if isinstance(value, Cell) else value


def _cell(walk: Walk, ref: int | Cell) -> Cell:
    # A Ref that a primitive without a rule has made has no cell. It may hold anything.
    return ref if isinstance(ref, Cell) else Cell(walk.anything())


def _varying(walk: Walk, indices: list[Any]) -> int:
    bits = 0
    for index in indices:
        bits |= held(index)
    return bits & walk.lattice.varying


def _new(walk: Walk, eqn: Any, ins: list[Any]) -> Cell:
    return Cell(held(ins[0]))


def _empty(walk: Walk, eqn: Any, ins: list[Any]) -> Cell:
    return Cell(walk.anything())


def _read(walk: Walk, eqn: Any, ins: list[Any]) -> int:
    ref, *indices = ins
    return _cell(walk, ref).value | _varying(walk, indices)


def _swap(walk: Walk, eqn: Any, ins: list[Any]) -> int:
    ref, value, *indices = ins
    cell, indexed = _cell(walk, ref), _varying(walk, indices)
    before = cell.value
    cell.value |= value | indexed | walk.where
    return before | indexed


def _add(walk: Walk, eqn: Any, ins: list[Any]) -> list[int]:
    ref, value, *indices = ins
    cell = _cell(walk, ref)
    cell.value = walk.lattice.total(cell.value, value) | _varying(walk, indices) | walk.where
    return []


RULES = {
    "new_ref": _new,
    "empty_ref": _empty,
    "get": _read,
    "freeze": _read,
    "swap": _swap,
    "addupdate": _add,
    "free_ref": lambda walk, eqn, ins: [],
}
