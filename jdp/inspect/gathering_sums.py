"""Sums by which XLA for TPUs gathers small arrays: each rank writes its part into zeros."""

from collections.abc import Sequence

from jdp.inspect import hlo
from jdp.inspect.computation import Computation
from jdp.inspect.hlo import Array, HloProgram
from jdp.inspect.transfers import SentArrays

_SAME = ("bitcast", "copy", "reshape")


def shard_of(
    program: HloProgram, transfer: SentArrays, pieces: Sequence[Array], i: int
) -> int | None:
    """Return the elements of a rank's part of an array that a sum gathers; None if it adds up."""
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
