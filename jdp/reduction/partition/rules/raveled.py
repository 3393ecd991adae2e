"""Rules for vectors in which a rank's elements lie in several places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jdp.reduction.partition.ranks import Ranks, Ravel
from jdp.reduction.partition.rules import elementwise, products, reductions
from jdp.reduction.partition.rules.plans import Plan, same

# `rule(eqn, position, layout, ranks)`, as `Rule`.
RavelRule = Callable[[Any, int, Ravel, Ranks], Plan | None]


def _as_slices(
    rule: Callable[[Any, int, int, Ranks], Plan | None],
) -> RavelRule:
    """Return the rule for slices of a vector, where the order of the elements does not matter."""

    def plan(eqn: Any, position: int, layout: Ravel, ranks: Ranks) -> Plan | None:
        if any(len(atom.aval.shape) > 1 for atom in eqn.invars):
            return None
        found = rule(eqn, position, 0, ranks)
        if found is None:
            return None
        ins, outs = (
            [layout if dim == 0 else None for dim in dims] for dims in (found.ins, found.outs)
        )
        return found._replace(ins=ins, outs=outs)

    return plan


def _reshape(eqn: Any, position: int, layout: Ravel, ranks: Ranks) -> Plan | None:
    after = eqn.params["new_sizes"]
    if tuple(after) != layout.shape or eqn.params["dimensions"] is not None:
        return None
    shape = ranks.local_shape(after, layout.dim)
    return same(eqn, [layout], [layout.dim], new_sizes=shape)


_REDUCTIONS = [name for name in reductions.RULES if name.startswith("reduce_")]

RULES: dict[str, RavelRule] = {
    **{name: _as_slices(reductions.RULES[name]) for name in _REDUCTIONS},
    "dot_general": _as_slices(products.RULES["dot_general"]),
    "reshape": _reshape,
}
# For primitives that have a rule for slices only, and for primitives without a rule.
UNKNOWN = _as_slices(elementwise.plan)
