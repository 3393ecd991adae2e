"""Rules for primitives that treat some dims as a batch, and whose sliced dim is one of those."""

from __future__ import annotations

from typing import Any

from jdp.reduction.partition.ranks import Ranks
from jdp.reduction.partition.rules.plans import Plan, along, same


def _along_axis(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    """Keep slices along any dim but the one that is accumulated over, or sorted along."""
    name = "dimension" if "dimension" in eqn.params else "axis"
    if dim == eqn.params[name]:
        return None
    return same(eqn, along(eqn, dim), [dim] * len(eqn.outvars))


def _matrices(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    """Keep slices along any dim but the last two."""
    shapes = [atom.aval.shape for atom in (*eqn.invars, *eqn.outvars)]
    if any(len(shape) <= dim for shape in shapes) or dim >= len(shapes[position]) - 2:
        return None
    return same(eqn, along(eqn, dim), [dim] * len(eqn.outvars))


RULES = {
    **dict.fromkeys("cumlogsumexp cummax cummin cumprod cumsum sort top_k".split(), _along_axis),
    **dict.fromkeys(
        "cholesky eig eigh geqrf householder_product lu qr schur svd triangular_solve".split(),
        _matrices,
    ),
}
