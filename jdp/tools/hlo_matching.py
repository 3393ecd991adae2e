"""Match a compiled program's collectives with planned ones, to name their leaves.

A native call has a number. XLA merges and packs its collectives, and drops names, so arrays are
matched by size, and among equal sizes by their source or updated parameter.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from jdp.tools import hlo
from jdp.tools.hlo import Array, Computation, HloProgram, Instruction
from jdp.tools.transfers import SentArrays
from jdp.training.communication_plan import PlannedCollective, SentLeaf, in_parameters, update_of

_SAME = ("bitcast", "copy", "reshape")


def gathered_shard(
    program: HloProgram, transfer: SentArrays, pieces: Sequence[Array], i: int
) -> int | None:
    """Return the elements of a shard gathered by a sum, or None if it adds."""
    operands = transfer.instruction.operands()
    if transfer.kind != "all-reduce" or not transfer.groups or len(pieces) != len(operands):
        return None
    around = program.computations[transfer.computation]
    one = around.by_name.get(operands[i])
    called = one.called() if one is not None and one.op == "fusion" else []
    if called:
        around = program.computations.get(called[0], Computation())
        one = around.root
    while one is not None and one.op in _SAME:
        one = around.by_name.get(one.operands()[0])
    if one is None or one.op != "dynamic-update-slice":
        return None
    shard = hlo.num_elements(around.shapes[one.operands()[1]])
    return shard if shard * len(transfer.groups[0]) == pieces[i].num_elements() else None


_SLICE = re.compile(r"slice=\{\[(\d+):")
# A tuple is independent of its elements. jdp's comparisons only order operations.
_APART = ("tuple", "compare")
# TPUs copy parameters to vector memory by a start and a done, large ones in slices.
_COPIES = ("bitcast", "copy", "copy-start", "copy-done", "reshape", "slice-start", "slice-done")
_JOINED_COPY = "ConcatBitcast"
# The most operations between an array and its parameter.
_MAX_DISTANCE = 12


class ParameterFlow:
    """Finds parameters by a program's dataflow."""

    def __init__(self, program: HloProgram):
        self._computations = program.computations
        # body -> the calling computation, and the loop
        self._loops = {
            one.computation("body"): (name, one)
            for name, body in program.computations.items()
            for one in body
            if one.op == "while"
        }

    def gathered(self, transfer: SentArrays, i: int, shard: int) -> list[str]:
        """Return the parameters gathered as a sum's i-th array."""
        return self._sources(transfer.computation, [transfer.instruction.operands()[i]], {shard})

    def names_of(self, transfer: SentArrays, pieces: Sequence[Array], i: int) -> list[str]:
        """Return the parameters of a collective's i-th array."""
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
        """Return the nearest parameters behind arrays."""
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
        """Return the outside name of an array read by a loop's body."""
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
        """Return outside names of a loop's results from an array."""
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
        """Return the nearest parameters computed with an array."""
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
        self, computation: Computation, user: Instruction, name: str, begin: int | None, least: int
    ) -> tuple[list[str], list[str]]:
        """Return other operands and results; below `least` elements, as of a norm, it ends."""
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
        called = one.called() if one is not None and one.op == "fusion" else []
        return self._computations.get(called[0] if called else "", Computation())


def _sizes(transfer: SentArrays, piece: Array) -> set[int]:
    """Return an array's possible parameter sizes: a shard, or all."""
    size = piece.num_elements()
    num_parts = len(transfer.groups[0]) if transfer.groups else 1
    if transfer.kind == "all-gather":
        return {size, size * num_parts}
    return {size, size // num_parts}  # XLA may slice what an all-reduce has summed


def _elements(users: Sequence[Instruction], numbers: Collection[int]) -> list[str]:
    found = [x for x in users if x.op == "get-tuple-element"]
    return [x.name for x in found if x.element() in numbers]


def _is_less(one: Instruction, least: int) -> bool:
    return not one.shape.startswith("(") and hlo.num_elements(one.shape) < least


def _begins_at(one: Instruction, begin: int) -> bool:
    found = _SLICE.search(one.rest) if one.op == "slice" else None
    return found is not None and int(found[1]) == begin


def _entries(fusion: Instruction, inner: Computation, name: str) -> set[str]:
    operands = fusion.operands()
    return {x.name for i, x in inner.parameters.items() if operands[i] == name}


def _entering(fusion: Instruction, inner: Computation, names: Sequence[str]) -> list[str]:
    """Return a fusion's operands behind inner values."""
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
    one = computation.by_name.get(name)
    while one is not None and (one.op in _COPIES or one.target() == _JOINED_COPY):
        one = computation.by_name.get(next(iter(one.operands()), ""))
    if one is None or one.op != "parameter" or hlo.num_elements(one.shape) not in sizes:
        return ""
    path = one.op_name()
    return path if ".params" in path else ""


class Match(NamedTuple):
    """A collective's match: unknown leaves have no path, and `num_planned` is 0 if unknown."""

    leaves: list[SentLeaf]
    num_planned: int
    line: str
    is_of_author: bool


def match(
    program: HloProgram, transfers: Sequence[SentArrays], plan: Sequence[PlannedCollective]
) -> list[Match]:
    """Return each collective's match."""
    by_number = {each.number: each for each in plan if each.number is not None}
    left = _Unmatched([each for each in plan if each.number is None])
    parameters = ParameterFlow(program)
    found = []
    for transfer in transfers:
        if transfer.number in by_number:
            each = by_number[transfer.number]
            leaves = _kept(each.operands, transfer.arrays)
            line = each.line or program.author_line(transfer.instruction)
            found.append(Match(leaves, 1, line, each.is_of_author))
        else:
            found.append(_matched(program, transfer, left, parameters))
    return found


def _kept(leaves: Sequence[SentLeaf], arrays: Sequence[Array]) -> list[SentLeaf]:
    kept, after = [], 0
    for array in arrays:
        key = array.dtype, array.num_elements()
        i = next((i for i in range(after, len(leaves)) if leaves[i][1:] == key), None)
        kept.append(SentLeaf("", *key) if i is None else leaves[i])
        after = after if i is None else i + 1
    return kept


# XLA for TPUs compiles some reduce-scatters as all-reduces, and slices the sums.
_PLANNED_AS = {"all-reduce": ("all-reduce", "reduce-scatter")}
# A planned collective's number, one of its leaves, and the collective.
_Leaf = tuple[int, SentLeaf, PlannedCollective]


class _Unmatched:
    def __init__(self, plan: Sequence[PlannedCollective]):
        self._left: dict[tuple, list[_Leaf]] = defaultdict(list)
        for i, each in enumerate(plan):
            for leaf in each.operands:
                self._left[each.kind, leaf.num_elements].append((i, leaf, each))
        self._taken: dict[tuple, list[_Leaf]] = defaultdict(list)

    def take(
        self,
        keys: Sequence[tuple[str, int]],
        names: Sequence[str],
        line: str,
        own: Sequence[_Leaf],
        num_loops: int,
        is_forward: bool,
    ) -> _Leaf | None:
        """Take the leaf of some size that belongs to a parameter, else the first of that size.

        Leaves sent by the same line come first. XLA unrolls loops, and never creates them, so
        collectives of an unrolled loop share a leaf. `own`: leaves taken by the collective.
        """
        left = _in_loops([leaf for key in keys for leaf in self._left[key]], num_loops)
        taken = _in_loops([leaf for key in keys for leaf in self._taken[key]], num_loops)
        again = _of_names([leaf for leaf in taken if leaf in own], names)
        named = _of_names([*left, *(leaf for leaf in taken if leaf not in own)], names)
        unnamed = [leaf for leaf in left if not leaf[1].path]
        ranked = [*_on(line, unnamed), *unnamed] if is_forward else []
        ranked += [*_on(line, named), *_on(line, unnamed), *named]
        exact = [leaf for leaf in left if leaf[2].num_loops == num_loops]
        ranked += [*(unnamed if names else ()), *again, *_on(line, exact), *_on("", exact)]
        ranked += [*_on(line, left), *left]
        ranked += [leaf for leaf in taken if leaf not in own and leaf[2].num_loops]
        if not ranked:
            return None
        for key in keys:
            if ranked[0] in self._left[key]:
                self._left[key].remove(ranked[0])
                self._taken[key].append(ranked[0])
        return ranked[0]


def _in_loops(leaves: Sequence[_Leaf], num_loops: int) -> list[_Leaf]:
    """The fewest loops come first."""
    found = [leaf for leaf in leaves if leaf[2].num_loops >= num_loops]
    return sorted(found, key=lambda leaf: leaf[2].num_loops)


def _on(line: str, leaves: Sequence[_Leaf]) -> list[_Leaf]:
    return [leaf for leaf in leaves if leaf[2].line == line]


def _of_names(leaves: Sequence[_Leaf], names: Sequence[str]) -> list[_Leaf]:
    """The longest paths come first: `.params['head']['w']` also ends like `grads['w']`."""
    plain = [(leaf, _plain(leaf[1].path)) for leaf in leaves]
    found = [it for it in plain if it[1] and any(name.endswith(it[1]) for name in names)]
    return [leaf for leaf, _ in sorted(found, key=lambda it: -len(it[1]))]


def _plain(path: str) -> str:
    return in_parameters(path).rpartition("state")[2]


def _matched(
    program: HloProgram, transfer: SentArrays, left: _Unmatched, parameters: ParameterFlow
) -> Match:
    pieces, line = _pieces(program, transfer), program.author_line(transfer.instruction)
    loops = program.num_loops(transfer.computation)
    leaves: list[SentLeaf] = []
    own: list[_Leaf] = []
    for i, piece in enumerate(pieces):
        num = piece.num_elements()
        names = parameters.names_of(transfer, pieces, i)
        keys = [(kind, num) for kind in _PLANNED_AS.get(transfer.kind, (transfer.kind,))]
        if shard := gathered_shard(program, transfer, pieces, i):
            keys = [("all-gather", shard)]
            names = parameters.gathered(transfer, i, shard)
        is_forward = _is_forward(program, transfer, pieces, i)
        taken = left.take(keys, names, line, own, loops, is_forward)
        own += [] if taken is None else [taken]
        path = "" if taken is None else taken[1].path
        if shard and path.startswith("grads"):
            path = update_of(path)
        leaves.append(SentLeaf(path, piece.dtype, num))
    plans = {number: each for number, _, each in own}
    files = [name.rpartition(":")[0] for name in program.where(transfer.instruction)]
    # A collective made by XLA of another has no line.
    is_of_author = bool(files) and not hlo.diagnostics.is_of_jdp(files)
    if plans:
        is_of_author = all(each.is_of_author for each in plans.values())
    num_planned = sum(any(x.num_elements > 1 for x in each.operands) for each in plans.values())
    return Match(leaves, num_planned, line, is_of_author)


def _is_forward(program: HloProgram, transfer: SentArrays, pieces: Sequence[Array], i: int) -> bool:
    """Whether an array is from the forward pass, by its JAX name."""
    operands = transfer.instruction.operands()
    one = program.computations[transfer.computation].by_name.get(
        operands[min(i, len(operands) - 1)]
    )
    name = one.op_name() if one is not None and len(pieces) == len(operands) else ""
    return "jvp(" in name and "transpose(" not in name


def _unpacked(
    computation: Computation, name: str, array: Array
) -> tuple[Instruction | None, Array]:
    """Return an array's maker, and its type; XLA for TPUs sends two float16 as one u32."""
    one = made = computation.by_name.get(name)
    while made is not None and (made.op == "bitcast" or made.target() == "ZeroCrop"):
        made = computation.by_name.get(made.operands()[0])
    sent = hlo.arrays(made.shape) if made is not None else ()
    is_packed = array.dtype == "u32" and [each.dtype for each in sent] == ["f16"]
    return (made, sent[0]) if is_packed else (one, array)


def _pieces(program: HloProgram, transfer: SentArrays) -> list[Array]:
    around = program.computations[transfer.computation]
    pieces = []
    for name, array in zip(transfer.instruction.operands(), transfer.arrays, strict=False):
        packed, array = _unpacked(around, name, array)
        called = packed.called() if packed else []
        inner = program.computations.get(called[0] if called else "", Computation())
        joins = [one for one in [packed, *inner] if one is not None and one.op == "concatenate"]
        if len(joins) == 1 and array.num_elements() == hlo.num_elements(joins[0].shape):
            shapes = (inner or around).shapes
            pieces += [hlo.arrays(shapes[x])[0] for x in joins[0].operands()]
        else:
            pieces.append(array)
    return pieces
