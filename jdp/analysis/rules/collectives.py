"""Rules for communication between ranks, and for marks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jdp.analysis import jaxprs
from jdp.analysis.marks import ALL_REDUCED, AVERAGED, MEAN, SHARE, SUMMED

if TYPE_CHECKING:
    from jdp.analysis.interpreter import Walk


def _all_reduce(walk: Walk, eqn: Any, ins: list[int]) -> list[int]:
    axes = _meet(walk, eqn)
    groups = jaxprs.groups(eqn)
    if groups is None:
        return [walk.lattice.all_reduce(x, axes) for x in ins]
    if len({len(group) for group in groups}) == 1:
        if len(groups[0]) == 1:
            return ins
        return [walk.lattice.sum_in_groups(x, axes) for x in ins]
    return [_spread(walk, x, axes) for x in ins]  # What is uniform is summed unequally often.


def _native(walk: Walk, eqn: Any, ins: list[int]) -> list[int]:
    axes = _meet(walk, eqn)
    token, *leaves = ins[3:]  # before them the rank, its group and the scale
    scale = jaxprs.number(eqn.invars[2])
    sums = [walk.lattice.all_reduce(x, axes) for x in leaves]
    if scale is None:
        sums = [walk.lattice.scale(x, ins[2]) for x in sums]
    elif scale != 1:
        sums = [walk.lattice.scale_by_number(x, scale) for x in sums]
    return [walk.lattice.agree(token, axes), *sums]


def _agree(walk: Walk, eqn: Any, ins: list[int]) -> list[int]:
    axes = _meet(walk, eqn)
    if jaxprs.groups(eqn) is not None:
        return ins
    return [walk.lattice.agree(x, axes) for x in ins]


def _agree_on_source(walk: Walk, eqn: Any, ins: list[int]) -> int:
    value, source = ins
    return walk.lattice.agree(value, _meet(walk, eqn)) | source & walk.lattice.varying


def _exchange(walk: Walk, eqn: Any, ins: list[int]) -> int:
    return _spread(walk, _join(ins), _meet(walk, eqn))


def _pass_on(walk: Walk, eqn: Any, ins: list[int]) -> int:
    return _spread(walk, _join(ins), _meet(walk, eqn, in_groups=False))


def _rank(walk: Walk, eqn: Any, ins: list[int]) -> int:
    return _spread(walk, 0, walk.lattice.axes(jaxprs.collective_axes(eqn)))


def _mark(walk: Walk, eqn: Any, ins: list[int]) -> int:
    walk.note_mark(eqn, ins[0])
    believed = _BELIEVED.get(eqn.params["kind"])
    if believed is not None:
        return believed(walk, ins[0], eqn)
    return ins[0]


def _reduced(walk: Walk, value: int, eqn: Any) -> int:
    return walk.lattice.all_reduce(value, _meet(walk, eqn))


def _averaged(walk: Walk, value: int, eqn: Any) -> int:
    return walk.lattice.mean(value, _marked_axes(walk, eqn))


def _share(walk: Walk, value: int, eqn: Any) -> int:
    return walk.lattice.share(value, _marked_axes(walk, eqn))


def _summed(walk: Walk, value: int, eqn: Any) -> int:
    return walk.lattice.as_stated(value, _marked_axes(walk, eqn))


def _marked_axes(walk: Walk, eqn: Any) -> int:
    return walk.lattice.axes(eqn.params["axes"])


# Kinds of marks that say more than the program shows.
_BELIEVED = {
    ALL_REDUCED: _reduced,
    AVERAGED: _averaged,
    MEAN: _averaged,
    SHARE: _share,
    SUMMED: _summed,
}


def _meet(walk: Walk, eqn: Any, *, in_groups: bool = True) -> int:
    """Give the axes of a collective, and note it where not all ranks that it needs may come.

    A collective in groups needs the ranks along its axes alone; one from rank to rank is a
    single operation of all devices.
    """
    axes = walk.lattice.axes(jaxprs.collective_axes(eqn))
    absent = walk.where & axes if in_groups else walk.where
    if absent and axes:
        walk.note_deadlock(eqn, absent, axes)
    return axes


def _join(ins: list[int]) -> int:
    value = 0
    for operand in ins:
        value |= operand
    return value


def _spread(walk: Walk, value: int, axes: int) -> int:
    lattice = walk.lattice
    return lattice.mix(value | axes | lattice.divided_over(axes) | lattice.data)


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
    **dict.fromkeys(
        _with_start("all_to_all ragged_all_to_all reduce_scatter unreduced_reduce_scatter"),
        _exchange,
    ),
    **dict.fromkeys(_with_start("ppermute psend precv"), _pass_on),
    "axis_index": _rank,
    "jdp_all_reduce": _native,
    "jdp_mark": _mark,
    "pbroadcast_dynamic": _agree_on_source,
}
