"""A plan: one way to run an equation on slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jdp import jax_compat
from jdp.reduction.partition.ranks import Dim, Ranks


class Plan(NamedTuple):
    """How to run an equation on slices.

    Attributes:
      ins: for each operand the dim along which it must be sliced, None for the whole.
      outs: the same for each result.
      run: computes this rank's results from its operands.
      partial: "sum", "max", ...: the results are this rank's share, and combining them over the
        ranks in this way gives the whole. Empty if they are as in `outs`.
    """

    ins: Sequence[Dim]
    outs: Sequence[Dim]
    run: Callable[[list[Any]], list[jax.Array]]
    partial: str = ""


# `rule(eqn, position, dim, ranks)`: how to run `eqn` if the operand at `position` is sliced along
# `dim`; None if it cannot run on slices of it.
Rule = Callable[[Any, int, int, Ranks], Plan | None]


def same(eqn: Any, ins: Sequence[Dim], outs: Sequence[Dim], **changes: Any) -> Plan:
    """Return the plan to run the equation itself, with some parameters changed."""
    return Plan(ins, outs, lambda operands: jax_compat.bind(eqn, operands, **changes))


def along(eqn: Any, dim: int) -> list[Dim]:
    """Return `dim` for each operand that is not a scalar."""
    return [dim if atom.aval.shape else None for atom in eqn.invars]
