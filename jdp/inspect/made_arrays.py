"""Which arrays the names in a compiled program stand for, and which operations make them."""

import re
from typing import NamedTuple

from jdp.inspect import hlo
from jdp.inspect.computation import Computation, Instruction

# These make no array, or name one that another operation has made.
_ALIASES = frozenset(
    "constant tuple get-tuple-element bitcast while after-all partition-id replica-id "
    "opt-barrier".split()
)
# These read nothing; an operation that takes them does.
_NAMES = frozenset(("tuple", "get-tuple-element", "bitcast", "opt-barrier"))
_IN_PLACE = re.compile(r"\{(\d*)[^{}]*\}: \((\d+), \{(\d*)[^{}]*\}")  # {output}: (operand, {part})


class MadeArray(NamedTuple):
    """An array: the name of the operation that makes it, and the number among its results."""

    name: str
    index: int


# What lies in each element of a tuple. An array is one element.
Parts = list[tuple[MadeArray, ...]]


def parts_of(computation: Computation) -> dict[str, Parts]:
    """Return the arrays that each name of a computation stands for."""
    found: dict[str, Parts] = {}
    for one in computation:
        found[one.name] = _parts(one, [found.get(x, []) for x in one.operands()])
    return found


def joined(parts: Parts) -> tuple[MadeArray, ...]:
    """Return all arrays of a tuple."""
    return tuple(dict.fromkeys(made for part in parts for made in part))


def makes(one: Instruction, parts: dict[str, Parts]) -> list[MadeArray]:
    """Return the arrays that an operation makes."""
    return [made for made in joined(parts[one.name]) if made.name == one.name]


def reads(one: Instruction, parts: dict[str, Parts]) -> list[MadeArray]:
    """Return the arrays that an operation takes."""
    return [made for x in one.operands() for made in joined(parts.get(x, []))]


def is_name(one: Instruction) -> bool:
    """Whether an operation only names arrays, so that it takes them no time and no memory."""
    return one.op in _NAMES


def _parts(one: Instruction, operands: list[Parts]) -> Parts:
    if one.op == "tuple":
        return [joined(x) for x in operands]
    if one.op == "get-tuple-element":
        return [_part(operands[0], one.element())]
    if one.op.endswith("-done"):  # the operands of the start come first, but of this one
        return operands[0] if one.op == "all-reduce-done" else operands[0][1:]
    if one.op in _ALIASES:
        return operands[0] if operands else []
    results: Parts = [(MadeArray(one.name, i),) for i in range(len(hlo.elements(one.shape)))]
    if one.op.endswith("-start") and one.op != "all-reduce-start":
        # A copy's type begins with its result, that of the others with their operands.
        result = MadeArray(one.name, 0 if one.op == "copy-start" else 1)
        return [joined([joined(x) for x in operands]), (result,)]
    for output, operand, part in _IN_PLACE.findall(one.attributes()):
        results[int(output or 0)] = _part(operands[int(operand)], int(part or 0))
    return results


def _part(parts: Parts, i: int) -> tuple[MadeArray, ...]:
    return parts[i] if i < len(parts) else joined(parts)  # a tuple in a tuple
