"""How each kind of primitive runs on slices, and along which dim its results are sliced."""

from typing import Any

from jdp.reduction.partition.ranks import Dim, Ranks, Ravel
from jdp.reduction.partition.rules import (
    batched,
    elementwise,
    indexing,
    products,
    raveled,
    reductions,
    shapes,
)
from jdp.reduction.partition.rules.plans import Plan, Rule

_RULES: dict[str, Rule] = {
    **batched.RULES,
    **indexing.RULES,
    **products.RULES,
    **reductions.RULES,
    **shapes.RULES,
}


def plan(eqn: Any, position: int, dim: Dim, ranks: Ranks) -> Plan | None:
    """Return how to run an equation on slices of the operand at `position`; None if it cannot."""
    name = eqn.primitive.name
    if isinstance(dim, Ravel):
        return raveled.RULES.get(name, raveled.UNKNOWN)(eqn, position, dim, ranks)
    return None if dim is None else _RULES.get(name, elementwise.plan)(eqn, position, dim, ranks)


__all__ = ["Plan", "plan"]
