"""Rules for `gather` and `scatter`: indices pick rows, and the sliced dim is not indexed."""

from __future__ import annotations

from typing import Any

from jdp.reduction.partition.ranks import Dim, Ranks
from jdp.reduction.partition.rules.plans import Plan, same


def _gather(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape = eqn.invars[0].aval.shape
    removed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if position or sizes[dim] != shape[dim] or dim in (*removed, *numbers.start_index_map):
        return None
    out = numbers.offset_dims[_place(len(shape), removed, dim)]
    return same(eqn, [dim, None], [out], slice_sizes=ranks.local_shape(sizes, dim))


def _scatter(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    numbers = eqn.params["dimension_numbers"]
    shape, updates = eqn.invars[0].aval.shape, eqn.invars[2].aval.shape
    removed = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = {
        i: numbers.update_window_dims[_place(len(shape), removed, i)]
        for i in range(len(shape))
        if i not in (*removed, *numbers.scatter_dims_to_operand_dims)
    }
    if position == 2:
        dim = next((i for i, window in windows.items() if window == dim), -1)
    if position == 1 or dim not in windows or updates[windows[dim]] != shape[dim]:
        return None
    ins: list[Dim] = [dim, None, windows[dim]]
    return same(eqn, ins, [dim])


def _place(num_dims: int, removed: tuple[int, ...], dim: int) -> int:
    """Return the position of a dim among those that are not removed."""
    return [i for i in range(num_dims) if i not in removed].index(dim)


_SCATTERS = ("scatter", *(f"scatter-{name}" for name in ("add", "max", "min", "mul", "sub")))

RULES = {"gather": _gather, **dict.fromkeys(_SCATTERS, _scatter)}
