"""The parameters that the arrays of a collective are parts of, or that their sums update."""

import re
from collections.abc import Collection, Sequence

from jdp.inspect import hlo
from jdp.inspect.computation import Computation, Instruction
from jdp.inspect.hlo import Array, HloProgram
from jdp.inspect.transfers import SentArrays

_SLICE = re.compile(r"slice=\{\[(\d+):")
# A tuple says nothing of its elements. By comparisons jdp orders operations that share no values.
_APART = ("tuple", "compare")
# TPUs bring parameters into their vector memory by a start and a done, large ones in slices.
_COPIES = ("bitcast", "copy", "copy-start", "copy-done", "reshape", "slice-start", "slice-done")
_JOINED_COPY = "ConcatBitcast"
# Up to this many operations lie between an array and its parameter.
_MAX_DISTANCE = 12


class ParameterFlow:
    """Finds parameters by the dataflow of a program."""

    def __init__(self, program: HloProgram):
        self._computations = program.computations
        # Of the body of each loop, the computation that runs it, and the loop.
        self._loops = {
            one.computation("body"): (name, one)
            for name, body in program.computations.items()
            for one in body
            if one.op == "while"
        }

    def gathered(self, transfer: SentArrays, i: int, shard: int) -> list[str]:
        """Return the names of the parameters that are gathered as the i-th array of a sum."""
        return self._sources(transfer.computation, [transfer.instruction.operands()[i]], {shard})

    def names_of(self, transfer: SentArrays, pieces: Sequence[Array], i: int) -> list[str]:
        """Return the names of the parameters of the i-th array of a collective."""
        where = transfer.computation
        users = self._computations[where].users
        one, sizes = transfer.instruction, _sizes(transfer, pieces[i])
        operands = one.operands()
        if transfer.kind == "all-gather" and len(pieces) == len(operands):
            return self._sources(where, [operands[i]], sizes)
        while len(users[one.name]) == 1 and users[one.name][0].op.endswith("-done"):
            (one,) = users[one.name]
        if len(pieces) == 1:
            return self._updated(where, [one.name], sizes)
        indexed = _elements(users[one.name], [i])
        if indexed and all(x.op == "get-tuple-element" for x in users[one.name]):
            return self._updated(where, indexed, sizes)
        begin = sum(piece.num_elements() for piece in pieces[:i])
        return self._updated(where, [one.name], sizes, begin)

    def _sources(self, where: str, level: list[str], sizes: Collection[int]) -> list[str]:
        """Return the nearest parameters that arrays of a computation are made of."""
        computation = self._computations[where]
        seen, entering = set[str](), list[str]()
        for _ in range(_MAX_DISTANCE):
            if found := _named(computation, level, sizes):
                return found
            seen.update(level)
            entering += [x for each in level for x in self._carried_in(where, each)]
            level = [x for each in level for x in self._made_of(computation, each) if x not in seen]
        return self._sources(self._loops[where][0], entering, sizes) if entering else []

    def _carried_in(self, where: str, name: str) -> list[str]:
        """Return the name outside a loop of an array that its body reads."""
        by_name = self._computations[where].by_name
        one = by_name.get(name)
        if one is None or one.op != "get-tuple-element" or where not in self._loops:
            return []
        outside, loop = self._loops[where]
        given = self._computations[outside].by_name.get(loop.operands()[0])
        if by_name[one.operands()[0]].op != "parameter" or given is None or given.op != "tuple":
            return []
        return [given.operands()[one.element()]]

    def _carried_out(self, where: str, user: Instruction, name: str) -> list[str]:
        """Return the results of a loop that its body makes of an array, by their names outside."""
        if user.op != "tuple" or not user.is_root or where not in self._loops:
            return []
        outside, loop = self._loops[where]
        numbers = [i for i, x in enumerate(user.operands()) if x == name]
        return _elements(self._computations[outside].users[loop.name], numbers)

    def _made_of(self, computation: Computation, name: str) -> list[str]:
        one = computation.by_name.get(name)
        if one is None or one.op.removesuffix("-done") in hlo.COLLECTIVES:
            return []
        if one.op != "get-tuple-element":
            return one.operands()
        fusion = computation.by_name.get(one.operands()[0])
        inner = self._inside(fusion)
        if fusion is None or inner.root is None or inner.root.op != "tuple":
            return []
        return _entering(fusion, inner, [inner.root.operands()[one.element()]])

    def _updated(
        self, where: str, level: list[str], sizes: set[int], begin: int | None = None
    ) -> list[str]:
        """Return the nearest parameters that are computed with an array."""
        computation = self._computations[where]
        seen, leaving = set[tuple[str, str]](), list[str]()
        for _ in range(_MAX_DISTANCE):
            found: list[str] = []
            after: list[str] = []
            for name in level:
                for user in computation.users[name]:
                    if (name, user.name) not in seen:
                        seen.add((name, user.name))
                        beside, results = self._computed_with(
                            computation, user, name, begin, min(sizes)
                        )
                        found += _named(computation, beside, sizes)
                        after += results
                        leaving += self._carried_out(where, user, name)
            if found:
                return found
            level, begin = after, None
        return self._updated(self._loops[where][0], leaving, sizes) if leaving else []

    def _computed_with(
        self,
        computation: Computation,
        user: Instruction,
        name: str,
        begin: int | None,
        least: int,
    ) -> tuple[list[str], list[str]]:
        """Return the operands of an operation that meet an array in it, and their results.

        A value of fewer than `least` elements, such as the norm of all gradients, is not followed.
        """
        if user.op in _APART or user.op.removesuffix("-start") in hlo.COLLECTIVES:
            return [], []
        inner = self._inside(user)
        root = inner.root
        if root is None:
            if _is_less(user, least):
                return [], []
            is_other = begin is not None and not _begins_at(user, begin)
            return ([], []) if is_other else (user.operands(), [user.name])
        reached = _entries(user, inner, name)
        if begin is not None:
            reached = {x.name for x in inner if _begins_at(x, begin) and x.operands()[0] in reached}
        for one in inner:
            is_part = one is not root and one.op not in _APART and not _is_less(one, least)
            if is_part and reached.intersection(one.operands()):
                reached.add(one.name)
        if root.op != "tuple":
            is_root = root.name in reached or reached.intersection(root.operands())
            return (_entering(user, inner, [root.name]), [user.name]) if is_root else ([], [])
        numbers = [i for i, x in enumerate(root.operands()) if x in reached]
        beside = _entering(user, inner, [root.operands()[i] for i in numbers])
        return beside, _elements(computation.users[user.name], numbers)

    def _inside(self, one: Instruction | None) -> Computation:
        """Return the computation of a fusion; of anything else an empty one."""
        called = one.called() if one is not None and one.op == "fusion" else []
        return self._computations.get(called[0] if called else "", Computation())


def _sizes(transfer: SentArrays, piece: Array) -> set[int]:
    """Return the numbers of elements that the parameter of an array may have: a shard, or all."""
    size = piece.num_elements()
    num_parts = len(transfer.groups[0]) if transfer.groups else 1
    if transfer.kind == "all-gather":
        return {size, size * num_parts}
    return {size, size // num_parts}  # XLA may slice what an all-reduce has summed


def _elements(users: Sequence[Instruction], numbers: Collection[int]) -> list[str]:
    """Return the names of some elements of a tuple, given what takes it."""
    found = [x for x in users if x.op == "get-tuple-element"]
    return [x.name for x in found if x.element() in numbers]


def _is_less(one: Instruction, least: int) -> bool:
    return not one.shape.startswith("(") and hlo.num_elements(one.shape) < least


def _begins_at(one: Instruction, begin: int) -> bool:
    found = _SLICE.search(one.rest) if one.op == "slice" else None
    return found is not None and int(found[1]) == begin


def _entries(fusion: Instruction, inner: Computation, name: str) -> set[str]:
    """Return the names that an operand of a fusion has inside of it."""
    operands = fusion.operands()
    return {x.name for i, x in inner.parameters.items() if operands[i] == name}


def _entering(fusion: Instruction, inner: Computation, names: Sequence[str]) -> list[str]:
    """Return the operands of a fusion that some values inside of it are made of."""
    reached, left = set[str](), list(names)
    while left:
        one = inner.by_name.get(left.pop())
        if one is not None and one.name not in reached:
            reached.add(one.name)
            left += one.operands() if one.op not in (*_APART, "parameter") else []
    operands = fusion.operands()
    return [operands[i] for i, x in inner.parameters.items() if x.name in reached]


def _named(computation: Computation, names: Sequence[str], sizes: Collection[int]) -> list[str]:
    return [path for name in names if (path := _name_of(computation, name, sizes))]


def _name_of(computation: Computation, name: str, sizes: Collection[int]) -> str:
    """Return the name of a parameter of the model of one of some sizes; empty for others."""
    one = computation.by_name.get(name)
    while one is not None and (one.op in _COPIES or one.target() == _JOINED_COPY):
        one = computation.by_name.get(next(iter(one.operands()), ""))
    if one is None or one.op != "parameter" or hlo.num_elements(one.shape) not in sizes:
        return ""
    path = one.op_name()
    return path if ".params" in path else ""
