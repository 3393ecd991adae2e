"""Rules for primitives that move elements."""

from __future__ import annotations

import math
from typing import Any

from jdp.reduction.partition.ranks import Dim, Ranks, Ravel
from jdp.reduction.partition.rules.plans import Plan, same


def _transpose(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    return same(eqn, [dim], [eqn.params["permutation"].index(dim)])


def _squeeze(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    removed = eqn.params["dimensions"]
    if dim in removed:
        return None
    return same(eqn, [dim], [dim - sum(each < dim for each in removed)])


def _expand_dims(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    added = eqn.params["dimensions"]
    kept = [i for i in range(len(eqn.outvars[0].aval.shape)) if i not in added]
    return same(eqn, [dim], [kept[dim]])


def _reshape(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    """Keep slices that are contiguous in the same way: as many elements before the sliced dim.

    Slices of a vector are not; each rank then keeps the elements that it has.
    """
    before, after = eqn.invars[0].aval.shape, eqn.params["new_sizes"]
    if eqn.params["dimensions"] is not None:
        return None
    outside = math.prod(before[:dim])
    for i, size in enumerate(after):
        if math.prod(after[:i]) == outside and size > 1 and ranks.divide(size):
            return same(eqn, [dim], [i], new_sizes=ranks.local_shape(after, i))
    if len(after) == 1:
        layout = Ravel(before, dim)
        return same(eqn, [dim], [layout], new_sizes=ranks.local_shape(after, layout))
    return None


def _slice(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    starts, limits, strides = (
        eqn.params[name] for name in ("start_indices", "limit_indices", "strides")
    )
    size = eqn.invars[0].aval.shape[dim]
    if starts[dim] or limits[dim] != size or (strides is not None and strides[dim] != 1):
        return None
    return same(eqn, [dim], [dim], limit_indices=ranks.local_shape(limits, dim))


def _pad(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    if position or any(eqn.params["padding_config"][dim]):
        return None
    return same(eqn, [dim, None], [dim])


def _rev(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    return None if dim in eqn.params["dimensions"] else same(eqn, [dim], [dim])


def _concatenate(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    if dim == eqn.params["dimension"]:
        return None
    return same(eqn, [dim] * len(eqn.invars), [dim])


def _split(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    if dim == eqn.params["axis"]:
        return None
    return same(eqn, [dim], [dim] * len(eqn.outvars))


def _stack(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    return same(eqn, [dim] * len(eqn.invars), [dim + (eqn.params["axis"] <= dim)])


def _unstack(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    removed = eqn.params["axis"]
    if dim == removed:
        return None
    return same(eqn, [dim], [dim - (removed < dim)] * len(eqn.outvars))


def _dynamic_slice(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    sizes = eqn.params["slice_sizes"]
    # The index along a dim that is taken whole is clamped to 0, on a slice of it too.
    if position or sizes[dim] != eqn.invars[0].aval.shape[dim]:
        return None
    ins: list[Dim] = [dim, *[None] * (len(eqn.invars) - 1)]
    return same(eqn, ins, [dim], slice_sizes=ranks.local_shape(sizes, dim))


def _dynamic_update_slice(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    operand, update = (atom.aval.shape for atom in eqn.invars[:2])
    if position > 1 or operand[dim] != update[dim]:
        return None
    ins: list[Dim] = [dim, dim, *[None] * (len(eqn.invars) - 2)]
    return same(eqn, ins, [dim])


RULES = {
    "concatenate": _concatenate,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "expand_dims": _expand_dims,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _rev,
    "slice": _slice,
    "split": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "transpose": _transpose,
    "unstack": _unstack,
}
