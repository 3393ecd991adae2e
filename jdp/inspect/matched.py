"""Which leaves a collective of a compiled program takes: planned collectives found again in it.

A native call has a number. XLA merges its own collectives, packs their arrays into one, and forgets
whose they are, so each of those arrays is found by its size, and among equal sizes by the parameter
that its result updates.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from jdp.inspect import hlo
from jdp.inspect.hlo import Array, HloProgram, Instruction
from jdp.inspect.planned import Planned, SentLeaf
from jdp.inspect.transfers import SentArrays

_SLICE = re.compile(r"slice=\{\[(\d+):")
# Up to this many operations lie between a sum and the update of its parameter.
_MAX_DISTANCE = 12


class Match(NamedTuple):
    """What is known of a collective of the compiled program.

    Attributes:
      leaves: the arrays that it takes, a leaf without path for one that is not known.
      num_planned: of how many planned collectives of arrays it was merged; 0 if none is known.
      line: of the author's.
      is_of_author: whether the author's code called it, or XLA made it, not jdp.
    """

    leaves: list[SentLeaf]
    num_planned: int
    line: str
    is_of_author: bool


def match(
    program: HloProgram, transfers: Sequence[SentArrays], plan: Sequence[Planned]
) -> list[Match]:
    """Return for each collective of a program what is known of it.

    Args:
      program: the compiled step.
      transfers: its collectives.
      plan: the collectives of the traced step.
    """
    by_number = {each.number: each for each in plan if each.number is not None}
    left = _Unmatched([each for each in plan if each.number is None])
    users = _Users(program)
    found = []
    for transfer in transfers:
        if transfer.number in by_number:
            each = by_number[transfer.number]
            leaves = _kept(each.leaves, transfer.arrays)
            found.append(Match(leaves, 1, each.line, each.is_of_author))
        else:
            found.append(_matched(program, transfer, left, users))
    return found


def _kept(leaves: Sequence[SentLeaf], arrays: Sequence[Array]) -> list[SentLeaf]:
    """Return the leaves that are left in a call; what nobody reads is not in it any more."""
    kept, after = [], 0
    for array in arrays:
        key = array.dtype, array.num_elements()
        i = next((i for i in range(after, len(leaves)) if leaves[i][1:] == key), None)
        kept.append(SentLeaf("", *key) if i is None else leaves[i])
        after = after if i is None else i + 1
    return kept


class _Unmatched:
    """Leaves of planned collectives that were not found in the program yet."""

    def __init__(self, plan: Sequence[Planned]):
        self._left: dict[tuple, list[tuple[int, SentLeaf, Planned]]] = defaultdict(list)
        for i, each in enumerate(plan):
            for leaf in each.leaves:
                self._left[each.kind, leaf.num_elements].append((i, leaf, each))

    def take(
        self, kind: str, num: int, updated: Sequence[str]
    ) -> tuple[int, SentLeaf, Planned] | None:
        """Take the leaf of some size that updates a parameter, else the first one of that size."""
        left = self._left[kind, num]
        path = [x for x in left if any(name.endswith(_plain(x[1].path)) for name in updated)]
        for chosen in (*(x for x in path if _plain(x[1].path)), *left):
            left.remove(chosen)
            return chosen
        return None


def _plain(path: str) -> str:
    return path.removeprefix("grads").removesuffix(" of one iteration").rpartition("state")[2]


def _matched(program: HloProgram, transfer: SentArrays, left: _Unmatched, users: "_Users") -> Match:
    computation = program.computations[transfer.computation]
    pieces = _pieces(program, transfer)
    leaves, plans = [], {}
    for i, piece in enumerate(pieces):
        updated = users.updated(computation, transfer.instruction, pieces, i)
        taken = left.take(transfer.kind, piece.num_elements(), updated)
        if taken is None:
            leaves.append(SentLeaf("", piece.dtype, piece.num_elements()))
            continue
        number, leaf, each = taken
        plans[number] = each
        leaves.append(leaf._replace(dtype=piece.dtype))
    files = [name.rpartition(":")[0] for name in program.where(transfer.instruction)]
    is_of_author = not hlo.source_lines.is_of_jdp(files)
    if plans:
        is_of_author = all(each.is_of_author for each in plans.values())
    line = program.author_line(transfer.instruction)
    num_planned = sum(any(x.num_elements > 1 for x in each.leaves) for each in plans.values())
    return Match(leaves, num_planned, line, is_of_author)


def _pieces(program: HloProgram, transfer: SentArrays) -> list[Array]:
    """Return the arrays of a collective of XLA's, also where it has packed them into one."""
    by_name = {one.name: one for one in program.computations[transfer.computation]}
    pieces = []
    for name, array in zip(transfer.instruction.operands(), transfer.arrays, strict=False):
        packed = by_name.get(name)
        inner = program.computations.get(next(iter(packed.called()), ""), []) if packed else []
        joins = [one for one in [packed, *inner] if one is not None and one.op == "concatenate"]
        if len(joins) == 1 and array.num_elements() == hlo.num_elements(joins[0].shape):
            shapes = {one.name: one.shape for one in inner or by_name.values()}
            pieces += [hlo.arrays(shapes[x])[0] for x in joins[0].operands()]
        else:
            pieces.append(array)
    return pieces


class _Users:
    """Finds the parameter that an array updates."""

    def __init__(self, program: HloProgram):
        self._program = program
        self._users: dict[int, dict[str, list[Instruction]]] = {}

    def updated(
        self, computation: list[Instruction], one: Instruction, pieces: Sequence[Array], i: int
    ) -> list[str]:
        """Return the names of the parameters that the i-th array of a collective updates."""
        users = self._of(computation)
        by_name = {each.name: each for each in computation}
        level = self._first(users, one, pieces, i)
        seen = set()
        for _ in range(_MAX_DISTANCE):
            found = []
            for each in level:
                for name in each.operands():
                    path = self._parameter(by_name, name, pieces[i].num_elements())
                    found += [path] if path else []
            if found:
                return found
            seen.update(each.name for each in level)
            level = [x for each in level for x in users[each.name] if x.name not in seen]
        return []

    def _first(
        self, users: dict[str, list[Instruction]], one: Instruction, pieces: Sequence[Array], i: int
    ) -> list[Instruction]:
        found = [one]
        while len(found) == 1 and users[found[0].name] and len(users[found[0].name]) == 1:
            (user,) = users[found[0].name]
            if not user.op.endswith("-done"):
                break
            found = [user]
        direct = users[found[0].name]
        if len(pieces) == 1:
            return direct
        indexed = [x for x in direct if re.search(rf"\bindex={i}\b", x.rest)]
        if indexed and all(x.op == "get-tuple-element" for x in direct):
            return indexed
        start = sum(piece.num_elements() for piece in pieces[:i])
        return [x for x in direct if start in self._offsets(x)]

    def _offsets(self, one: Instruction) -> list[int]:
        inner = self._program.computations.get(next(iter(one.called()), ""), [])
        found = [_SLICE.search(each.rest) for each in [one, *inner] if each.op == "slice"]
        return [int(each[1]) for each in found if each]

    def _parameter(self, by_name: dict[str, Instruction], name: str, num_elements: int) -> str:
        one = by_name.get(name)
        while one is not None and one.op in ("bitcast", "copy", "reshape"):
            one = by_name.get(next(iter(one.operands()), ""))
        if one is None or one.op != "parameter" or hlo.num_elements(one.shape) != num_elements:
            return ""
        path = one.op_name()
        return path if ".params" in path else ""

    def _of(self, computation: list[Instruction]) -> dict[str, list[Instruction]]:
        key = id(computation)
        if key not in self._users:
            users: dict[str, list[Instruction]] = defaultdict(list)
            for one in computation:
                for name in one.operands():
                    users[name].append(one)
            self._users[key] = users
        return self._users[key]
