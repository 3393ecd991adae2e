"""Which leaves a collective of a compiled program takes: planned collectives found again in it.

A native call has a number. XLA merges its own collectives, packs their arrays into one, and forgets
whose they are, so each of those arrays is found by its size, and among equal sizes by the parameter
that it is a part of, or that its result updates.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from jdp.inspect import hlo
from jdp.inspect.computation import Computation, Instruction
from jdp.inspect.gathering_sums import shard_of
from jdp.inspect.hlo import Array, HloProgram
from jdp.inspect.leaf_names import in_parameters, update_of
from jdp.inspect.parameter_flow import ParameterFlow
from jdp.inspect.planned import Planned, SentLeaf
from jdp.inspect.transfers import SentArrays


class Match(NamedTuple):
    """What is known of a collective of the compiled program.

    Attributes:
      leaves: the arrays that it takes, a leaf without path for one that is not known.
      num_planned: of how many planned collectives of arrays it was merged; 0 if none is known.
      line: of the author's.
      is_of_author: whether the author's code called it, or XLA made it for a line of it, not jdp.
    """

    leaves: list[SentLeaf]
    num_planned: int
    line: str
    is_of_author: bool


def match(
    program: HloProgram, transfers: Sequence[SentArrays], plan: Sequence[Planned]
) -> list[Match]:
    """Return for each collective of a program what is known of it."""
    by_number = {each.number: each for each in plan if each.number is not None}
    left = _Unmatched([each for each in plan if each.number is None])
    parameters = ParameterFlow(program)
    found = []
    for transfer in transfers:
        if transfer.number in by_number:
            each = by_number[transfer.number]
            leaves = _kept(each.leaves, transfer.arrays)
            line = each.line or program.author_line(transfer.instruction)
            found.append(Match(leaves, 1, line, each.is_of_author))
        else:
            found.append(_matched(program, transfer, left, parameters))
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


# XLA for TPUs makes all-reduces of some collectives that scatter, and slices the sums.
_PLANNED_AS = {"all-reduce": ("all-reduce", "reduce-scatter")}
# The number of a planned collective, one of its leaves, and the collective.
_Leaf = tuple[int, SentLeaf, Planned]


class _Unmatched:
    """Leaves of planned collectives that were not found in the program yet."""

    def __init__(self, plan: Sequence[Planned]):
        self._left: dict[tuple, list[_Leaf]] = defaultdict(list)
        for i, each in enumerate(plan):
            for leaf in each.leaves:
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
        """Take the leaf of some size that is of a parameter, else the first one of that size.

        Leaves that the same line sends come first: statistics of a BatchNorm meet parameters that
        are as large as they are. XLA makes several collectives of one in a loop that it unrolls:
        these take the leaf again. It unrolls loops, and makes none.

        Args:
          own: leaves that the collective has taken already.
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
    """Return the leaves that are in at least so many loops, those in the fewest first."""
    found = [leaf for leaf in leaves if leaf[2].num_loops >= num_loops]
    return sorted(found, key=lambda leaf: leaf[2].num_loops)


def _on(line: str, leaves: Sequence[_Leaf]) -> list[_Leaf]:
    """Return the leaves that a line sends."""
    return [leaf for leaf in leaves if leaf[2].line == line]


def _of_names(leaves: Sequence[_Leaf], names: Sequence[str]) -> list[_Leaf]:
    """Return the leaves that are of the parameters of some names, the longest paths first.

    `.params['head']['w']` ends like the path of `grads['w']` too.
    """
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
        if shard := shard_of(program, transfer, pieces, i):
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
    # A collective that XLA makes of another has no line.
    is_of_author = bool(files) and not hlo.source_lines.is_of_jdp(files)
    if plans:
        is_of_author = all(each.is_of_author for each in plans.values())
    num_planned = sum(any(x.num_elements > 1 for x in each.leaves) for each in plans.values())
    return Match(leaves, num_planned, line, is_of_author)


def _is_forward(program: HloProgram, transfer: SentArrays, pieces: Sequence[Array], i: int) -> bool:
    """Whether an array of a collective is made in the forward pass, by its name in JAX."""
    operands = transfer.instruction.operands()
    one = program.computations[transfer.computation].by_name.get(
        operands[min(i, len(operands) - 1)]
    )
    name = one.op_name() if one is not None and len(pieces) == len(operands) else ""
    return "jvp(" in name and "transpose(" not in name


def _unpacked(
    computation: Computation, name: str, array: Array
) -> tuple[Instruction | None, Array]:
    """Return what makes an array, and its type; XLA for TPUs sends two of float16 as one u32."""
    one = made = computation.by_name.get(name)
    while made is not None and (made.op == "bitcast" or made.target() == "ZeroCrop"):
        made = computation.by_name.get(made.operands()[0])
    sent = hlo.arrays(made.shape) if made is not None else ()
    is_packed = array.dtype == "u32" and [each.dtype for each in sent] == ["f16"]
    return (made, sent[0]) if is_packed else (one, array)


def _pieces(program: HloProgram, transfer: SentArrays) -> list[Array]:
    """Return the arrays of a collective of XLA's, also where it has packed them into one."""
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
