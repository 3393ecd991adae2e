"""Rules for communication between ranks, and for marks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jdp.mark import ALL_REDUCED
from jdp.uniformity import jaxprs

if TYPE_CHECKING:
    from jdp.uniformity.walk import Walk


def _all_reduce(walk: Walk, eqn: Any, ins: list[int]) -> list[int]:
    axes = _meet(walk, eqn)
    groups = jaxprs.groups(eqn)
    if groups is None:
        return [walk.lattice.all_reduce(x, axes) for x in ins]
    if len({len(group) for group in groups}) == 1:
        return ins
    return [_spread(walk, x, axes) for x in ins]  # What is uniform is summed unequally often.


def _native(walk: Walk, eqn: Any, ins: list[int]) -> list[int]:
    axes = _meet(walk, eqn)
    token, *leaves = ins[3:]  # before them the rank, its group and the scale
    return [walk.lattice.agree(token, axes), *(walk.lattice.all_reduce(x, axes) for x in leaves)]


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
    if eqn.params["kind"] != ALL_REDUCED:
        return ins[0]
    return walk.lattice.all_reduce(ins[0], _meet(walk, eqn))


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
    return walk.lattice.mix(value | axes | walk.lattice.data)


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
