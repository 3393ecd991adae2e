"""Collectives that XLA runs in parts on TPUs: a start, computations beside it, and a done.

Each part is a fusion that holds the same collective. The start and the done hold a call, too.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from jdp.inspect import hlo
from jdp.inspect.computation import Computation, Instruction

_CHAIN = re.compile(r'\bchain_id="(\w+)"')
_START, _DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"


class ChainPart(NamedTuple):
    """A part of a collective.

    Attributes:
      chain: a name that its parts share.
      is_start: whether it starts the collective.
      is_done: whether it waits for its end.
    """

    chain: str
    is_start: bool
    is_done: bool


def part_of(inside: Sequence[Instruction]) -> ChainPart | None:
    """Return which part of a collective a fusion is, None if it is not one."""
    found = (_CHAIN.search(one.rest) for one in inside if one.op in hlo.COLLECTIVES)
    chain = next((each[1] for each in found if each), None)
    if chain is None:
        return None
    targets = {one.target() for one in inside if one.op == "custom-call"}
    return ChainPart(f"chain {chain}", _START in targets, _DONE in targets)


def computation_of(inside: Computation) -> Computation:
    """Return the computation of a part, without the collective and what passes through it."""
    passed = {one.name for one in inside if one.op in (*hlo.COLLECTIVES, "parameter")}
    found = Computation()
    for one in inside:
        if one.is_root:
            made = ", ".join(f"%{name}" for name in one.operands() if name not in passed)
            one = one._replace(rest=f"{made})")
        if one.op not in hlo.COLLECTIVES:
            found.append(one)
    return found
