"""Rules for communication between ranks, and for marks."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jdp.analysis import jaxprs
from jdp.analysis.interpreter import Interpreter
from jdp.analysis.marks import ALL_REDUCED, AVERAGED, MEAN, SHARD, SHARE, SUMMED


def all_reduced(interp: Interpreter, eqn: Any, value: int, position: int, axes: int) -> int:
    """Sum an operand of a collective over `axes`."""
    atom = eqn.invars[position]
    if interp.lattice.is_constant(value):
        times = 0 if jaxprs.is_literal(atom) else interp.divisions.get(atom, 0)
        interp.divisions[eqn.outvars[position - len(eqn.invars)]] = times - 1
        if times > 1:  # the sum undoes one of the divisions
            return value
    return undivided(interp, eqn, interp.lattice.all_reduce(value, axes), value, position, axes)


def undivided(
    interp: Interpreter, eqn: Any, total: int, value: int, position: int, axes: int
) -> int:
    """Mark a sum as "undivided" and "duplicated", unless of integers or of equal cotangents."""
    lattice = interp.lattice
    is_inexact = jnp.issubdtype(eqn.invars[position].aval.dtype, jnp.inexact)
    if not is_inexact or not lattice.is_data(value):
        return total
    axes &= ~lattice.at(value, "divided")
    differed, same = value & axes, axes & ~value
    total |= lattice.over("undivided", differed & ~lattice.at(value, "total"))
    if same and not jaxprs.is_transposed(eqn):
        total |= lattice.over("duplicated", same)
    return total


def record_gathered(interp: Interpreter, eqn: Any, value: int, axes: int) -> None:
    """Record a gather's class of a shard, axes, and their dim."""
    if "all_gather_dimension" in eqn.params:
        interp.gathered[eqn.outvars[0]] = value, axes, eqn.params["all_gather_dimension"]


def of_gathered(interp: Interpreter, eqn: Any) -> int | None:
    """Sum over gathered shards; None for other sums."""
    (atom,) = eqn.invars
    gathered = None if jaxprs.is_literal(atom) else interp.gathered.get(atom)
    if gathered is None or gathered[2] not in eqn.params["axes"]:
        return None
    value, axes, _ = gathered
    # Other terms may be divided by their number, and the weights are unknown.
    total = all_reduced(interp, eqn, value, 0, axes) | interp.lattice.bent
    return total | interp.lattice.over("uneven", axes & value)


def _all_reduce(interp: Interpreter, eqn: Any, ins: list[int]) -> list[int]:
    axes = _meet(interp, eqn)
    groups = jaxprs.axis_groups(eqn)
    if groups is None:
        return [all_reduced(interp, eqn, x, i, axes) for i, x in enumerate(ins)]
    if len({len(group) for group in groups}) == 1:
        if len(groups[0]) == 1:
            return ins
        return [
            undivided(interp, eqn, interp.lattice.sum_in_groups(x, axes), x, i, axes)
            for i, x in enumerate(ins)
        ]
    return [
        _spread(interp, x, axes) for x in ins
    ]  # In groups of different sizes the sums of a uniform value differ.


def _native(interp: Interpreter, eqn: Any, ins: list[int]) -> list[int]:
    axes = _meet(interp, eqn)
    token, *leaves = ins[3:]  # the first three are the rank, its group and the scale
    totals = [all_reduced(interp, eqn, x, i, axes) for i, x in enumerate(leaves, 4)]
    return [interp.lattice.agree(token, axes), *_native_scaled(interp, eqn, ins[2], totals)]


def _native_scatter(interp: Interpreter, eqn: Any, ins: list[int]) -> list[int]:
    axes = _meet(interp, eqn)
    token, *leaves = ins[3:]
    totals = [
        all_reduced(interp, eqn, x, i, axes)
        if dim is None
        else undivided(interp, eqn, _spread(interp, x, axes), x, i, axes)
        for i, (x, dim) in enumerate(zip(leaves, eqn.params["dims"], strict=True), 4)
    ]
    return [interp.lattice.agree(token, axes), *_native_scaled(interp, eqn, ins[2], totals)]


def _native_scaled(interp: Interpreter, eqn: Any, by: int, totals: list[int]) -> list[int]:
    scale = jaxprs.number(eqn.invars[2])
    if scale is None:
        return [interp.lattice.scale_by(x, by) for x in totals]
    return totals if scale == 1 else [interp.lattice.scale_by_number(x, scale) for x in totals]


def _native_gather(interp: Interpreter, eqn: Any, ins: list[int]) -> list[int]:
    axes = _meet(interp, eqn)
    token, *leaves = ins[3 : 3 + len(eqn.outvars)]  # not the arrays that the results overwrite
    for out, value, dim in zip(eqn.outvars[1:], leaves, eqn.params["dims"], strict=True):
        interp.gathered[out] = value, axes, dim
    return [interp.lattice.agree(x, axes) for x in (token, *leaves)]


def _native_exchange(interp: Interpreter, eqn: Any, ins: list[int]) -> list[int]:
    axes = _meet(interp, eqn)
    token, *leaves = ins[3:]
    return [interp.lattice.agree(token, axes), *(_spread(interp, x, axes) for x in leaves)]


def _native_scatter_rows(interp: Interpreter, eqn: Any, ins: list[int]) -> list[int]:
    axes = _meet(interp, eqn)
    token, rows, ids = ins[3:]
    total = undivided(interp, eqn, _spread(interp, rows | ids, axes), rows, 4, axes)
    return [interp.lattice.agree(token, axes), total]


def _native_take(interp: Interpreter, eqn: Any, ins: list[int]) -> list[int]:
    axes = _meet(interp, eqn)
    return [interp.lattice.agree(ins[3], axes), _spread(interp, _join(ins[4:]), axes)]


def _agree(interp: Interpreter, eqn: Any, ins: list[int]) -> list[int]:
    axes = _meet(interp, eqn)
    if jaxprs.axis_groups(eqn) is not None:
        return ins
    record_gathered(interp, eqn, ins[0], axes)
    return [interp.lattice.agree(x, axes) for x in ins]


def _agree_on_source(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    value, source = ins
    return interp.lattice.agree(value, _meet(interp, eqn)) | source & interp.lattice.varying


def _exchange(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    return _spread(interp, _join(ins), _meet(interp, eqn))


def _scatter_sum(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    axes = interp.lattice.axes(jaxprs.collective_axes(eqn))
    return undivided(interp, eqn, _exchange(interp, eqn, ins), ins[0], 0, axes)


def _pass_on(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    return _spread(interp, _join(ins), _meet(interp, eqn, in_groups=False))


def _rank(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    return _spread(interp, 0, interp.lattice.axes(jaxprs.collective_axes(eqn)))


def _mark(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    """Return a marked value's class, with facts hidden from a program."""
    (value,), kind, lattice = ins, eqn.params["kind"], interp.lattice
    interp.record.add("mark", eqn, value, interp.where)
    if kind == ALL_REDUCED:
        return all_reduced(interp, eqn, value, 0, _meet(interp, eqn))
    axes = lattice.axes(eqn.params["axes"])
    if kind in (AVERAGED, MEAN):
        return lattice.mean(value, axes)
    if kind == SHARD:  # all ranks together hold one value
        return lattice.mix(value & ~axes)
    if kind == SHARE:
        value = lattice.rescaled(value | lattice.mixed, axes) & ~lattice.sums(axes, axes, 0)
        return value | lattice.sums(0, 0, axes) | lattice.over("uneven", axes)
    if kind == SUMMED:
        value = lattice.rescaled(value, axes) | lattice.sums(axes, axes, 0)
        return value | lattice.over("unrepeated", axes) | lattice.over("uneven", axes)
    return value


def _meet(interp: Interpreter, eqn: Any, *, in_groups: bool = True) -> int:
    """Return a collective's axes; record it if a needed rank (a transfer: a device) may skip it."""
    axes = interp.lattice.axes(jaxprs.collective_axes(eqn))
    absent = interp.where & axes if in_groups else interp.where
    if absent and axes:
        interp.record_deadlock(eqn, absent, axes)
    return axes


def _join(ins: list[int]) -> int:
    value = 0
    for operand in ins:
        value |= operand
    return value


def _spread(interp: Interpreter, value: int, axes: int) -> int:
    lattice = interp.lattice
    return lattice.mix(value | axes | lattice.over("divided", axes) | lattice.data)


def _with_start(names: str) -> list[str]:
    return [name + ending for name in names.split() for ending in ("", "_start")]


RULES = {
    **dict.fromkeys(_with_start("psum psum_invariant unreduced_psum"), _all_reduce),
    **dict.fromkeys(
        _with_start(
            "all_gather all_gather_invariant all_gather_reduced pbroadcast pmax pmin "
            "unreduced_pmax unreduced_pmin"
        ),
        _agree,
    ),
    **dict.fromkeys([*_with_start("all_to_all ragged_all_to_all"), "jdp_take_rows"], _exchange),
    **dict.fromkeys(
        [*_with_start("reduce_scatter unreduced_reduce_scatter"), "jdp_add_rows"], _scatter_sum
    ),
    **dict.fromkeys(_with_start("ppermute psend precv"), _pass_on),
    "axis_index": _rank,
    "jdp_add_rows_native": _native_scatter_rows,
    "jdp_all_gather": _native_gather,
    "jdp_all_reduce": _native,
    "jdp_all_to_all": _native_exchange,
    "jdp_mark": _mark,
    "jdp_own_slice": lambda interp, eqn, ins: interp.lattice.mix(ins[0]),
    "jdp_reduce_scatter": _native_scatter,
    "jdp_take_rows_native": _native_take,
    "pbroadcast_dynamic": _agree_on_source,
}
