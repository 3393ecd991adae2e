"""How often the loops of a compiled program run."""

import re
from typing import NamedTuple

from jdp.inspect import hlo
from jdp.inspect.computation import Computation, Instruction, callers_of

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_INTEGER = re.compile(r"([su]\d+)\[1?\]")
_VALUE = re.compile(r"\{?(-?\d+)\}?\)")
# The result of these is their first operand.
_SAME = frozenset("copy copy-start copy-done bitcast reshape opt-barrier".split())
_FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


class _LoopInteger(NamedTuple):
    """The value of an integer: a constant, or an entry of the state of a loop plus a constant."""

    entry: int | None
    constant: int


class TripCounts:
    """The iterations of the loops of a program.

    XLA writes the number of iterations next to a loop for CPUs and GPUs, not for TPUs. There it
    follows from the first value of the counter, what the body adds to it, and the bound.

    Args:
      computations: of the program, see `hlo.parse`.
    """

    def __init__(self, computations: dict[str, Computation]):
        self._computations = computations
        self._callers = callers_of(computations)

    def times(self, one: Instruction, computation: str) -> int:
        """Return how often the body of a loop runs; 1 for other operations."""
        if one.op != "while":
            return 1
        if found := _KNOWN.search(one.rest):
            return int(found[1])
        count = self._derived(one, computation)
        if count is None:
            raise ValueError(
                f"cannot count the loop {one.name}: its number of iterations is unknown."
            )
        return count

    def _derived(self, one: Instruction, computation: str) -> int | None:
        condition = one.computation("condition")
        root = self._root(condition)
        while root is not None and root.op in ("fusion", "call"):
            condition = root.called()[0]
            root = self._root(condition)
        if root is None or root.op != "compare":
            return None
        order = re.findall(r"\bdirection=(\w\w)", root.rest)[0]
        counter, bound = (self._sum(condition, name) for name in root.operands())
        if counter is None or bound is None or order not in _FLIPPED:
            return None
        if not self._step(one, counter):
            counter, bound, order = bound, counter, _FLIPPED[order]
        step = self._step(one, counter)
        if not step or self._step(one, bound) != 0:
            return None
        first, last = (self._constant(self._before(x, one, computation), computation)
                       for x in (counter, bound))  # fmt: skip
        if first is None or last is None:
            return None
        count = _count(first, last, step, order)
        if count is None:
            return None
        # A counter that leaves its type starts anew at the other end.
        dtype = hlo.arrays(self._computations[condition].shapes[root.operands()[0]])[0].dtype
        return count if _fits(first, dtype) and _fits(first + count * step, dtype) else None

    def _step(self, loop: Instruction, value: _LoopInteger) -> int | None:
        """Return what an iteration of a loop adds to a value in it; None if unknown."""
        if value.entry is None:
            return 0
        body = loop.computation("body")
        root = self._root(body)
        after = None if root is None else self._sum(body, root.name, value.entry)
        return after.constant if after is not None and after.entry == value.entry else None

    def _before(
        self, value: _LoopInteger, loop: Instruction, computation: str
    ) -> _LoopInteger | None:
        """Return what a value in a loop is before its first iteration; None if unknown."""
        if value.entry is None:
            return value
        first = self._sum(computation, loop.operands()[0], value.entry)
        return first and _LoopInteger(first.entry, first.constant + value.constant)

    def _constant(self, value: _LoopInteger | None, computation: str) -> int | None:
        """Return the constant that a value is whenever a computation runs; None if unknown."""
        while value is not None and value.entry is not None:
            callers = self._callers[computation]
            if len(callers) != 1:
                return None
            computation, one = callers[0]
            if one.op == "while":  # no iteration of it may change the value
                is_constant = self._step(one, value) == 0
                value = self._before(value, one, computation) if is_constant else None
        return None if value is None else value.constant

    def _root(self, computation: str) -> Instruction | None:
        return self._computations.get(computation, Computation()).root

    def _sum(self, computation: str, name: str, index: int | None = None) -> _LoopInteger | None:
        """Return the value of an integer, None if it is neither a constant nor a sum with one."""
        one = self._computations[computation].by_name.get(name)
        if one is None:
            return None
        operands = one.operands()
        if one.op == "get-tuple-element":
            return self._sum(computation, operands[0], one.element()) if index is None else None
        if one.op == "tuple":
            return None if index is None else self._sum(computation, operands[index])
        if one.op in _SAME:
            return self._sum(computation, operands[0], index)
        if one.op in ("fusion", "call"):
            root = self._root(one.called()[0])
            return None if root is None else self._sum(one.called()[0], root.name, index)
        if one.op == "while" and index is not None and self._step(one, _LoopInteger(index, 0)) == 0:
            return self._sum(computation, operands[0], index)
        if one.op == "parameter":
            return self._entering(computation, one, index)
        return self._computed(computation, one) if index is None else None

    def _entering(
        self, computation: str, one: Instruction, index: int | None
    ) -> _LoopInteger | None:
        callers = self._callers[computation]
        if callers and all(caller.op == "while" for _, caller in callers):
            return None if index is None else _LoopInteger(index, 0)
        if len(callers) != 1 or callers[0][1].op not in ("fusion", "call"):
            return None
        name, caller = callers[0]
        return self._sum(name, caller.operands()[one.number()], index)

    def _computed(self, computation: str, one: Instruction) -> _LoopInteger | None:
        if one.op not in ("constant", "add") or not _INTEGER.match(one.shape):
            return None
        if one.op == "constant":
            found = _VALUE.match(one.rest)
            return _LoopInteger(None, int(found[1])) if found else None
        lhs, rhs = (self._sum(computation, name) for name in one.operands())
        if lhs is None or rhs is None or None not in (lhs.entry, rhs.entry):
            return None
        entry = rhs.entry if lhs.entry is None else lhs.entry
        return _LoopInteger(entry, lhs.constant + rhs.constant)


def _count(first: int, bound: int, step: int, order: str) -> int | None:
    """Return how many of first, first + step, ... come before one that is not `order` bound."""
    if order in ("GT", "GE"):
        return _count(-first, -bound, -step, _FLIPPED[order])
    if order == "NE":
        count, rest = divmod(bound - first, step)
        return None if rest or count < 0 else count
    distance = bound - first + (order == "LE")
    if distance <= 0:
        return 0
    return -(-distance // step) if step > 0 else None


def _fits(value: int, dtype: str) -> bool:
    """Whether an integer type, such as "s32", holds a value."""
    bits = int(dtype[1:]) - (dtype[0] == "s")
    return -(2**bits) * (dtype[0] == "s") <= value < 2**bits
