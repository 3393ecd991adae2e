"""Rules for `jax.Ref`: all variables of one Ref share a cell."""

from __future__ import annotations

from typing import Any

from jdp.analysis.cells import Cell, value_of
from jdp.analysis.interpreter import Interpreter


def _cell(interp: Interpreter, ref: int | Cell) -> Cell:
    # A Ref from a primitive without a rule has no cell and may hold anything.
    return ref if isinstance(ref, Cell) else Cell(interp.anything())


def _varying(interp: Interpreter, indices: list[Any]) -> int:
    bits = 0
    for index in indices:
        bits |= value_of(index)
    return bits & interp.lattice.varying


def _new(interp: Interpreter, eqn: Any, ins: list[Any]) -> Cell:
    return Cell(value_of(ins[0]))


def _empty(interp: Interpreter, eqn: Any, ins: list[Any]) -> Cell:
    return Cell(interp.anything())


def _read(interp: Interpreter, eqn: Any, ins: list[Any]) -> int:
    ref, *indices = ins
    return _cell(interp, ref).value | _varying(interp, indices)


def _swap(interp: Interpreter, eqn: Any, ins: list[Any]) -> int:
    ref, value, *indices = ins
    cell, indexed = _cell(interp, ref), _varying(interp, indices)
    before = cell.value
    cell.value |= value | indexed | interp.where
    return before | indexed


def _add(interp: Interpreter, eqn: Any, ins: list[Any]) -> list[int]:
    ref, value, *indices = ins
    cell = _cell(interp, ref)
    cell.value = interp.lattice.add(cell.value, value) | _varying(interp, indices) | interp.where
    return []


RULES = {
    "new_ref": _new,
    "empty_ref": _empty,
    "get": _read,
    "freeze": _read,
    "swap": _swap,
    "addupdate": _add,
    "free_ref": lambda interp, eqn, ins: [],
}
