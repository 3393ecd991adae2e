"""What XLA may exchange between devices where a mesh axis is left to it."""

from collections.abc import Iterator
from typing import Any

from jdp.uniformity import jaxprs

# XLA's partitioner sends the edges of a split dim to the neighbours: a collective-permute, which is
# one operation of all devices. Its other collectives stay among devices that share a data rank.
_SHIFTS = frozenset(
    "concatenate conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum "
    "dynamic_update_slice pad reduce_window reduce_window_max reduce_window_min reduce_window_sum "
    "reshape rev select_and_gather_add select_and_scatter select_and_scatter_add slice split "
    "unstack".split()
)


def shifts(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations that may become a collective-permute, where their operands are split."""
    yield from _shifts(jaxpr, set())


def _shifts(jaxpr: Any, seen: set[int]) -> Iterator[Any]:
    if id(jaxpr) in seen:  # called from several places
        return
    seen.add(id(jaxpr))
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _SHIFTS and not _is_local(eqn):
            yield eqn
        if name != "shard_map":
            for body in jaxprs.bodies(eqn):
                yield from _shifts(body, seen)


def _is_local(eqn: Any) -> bool:
    shapes = [[d for d in atom.aval.shape if d != 1] for atom in (*eqn.invars, *eqn.outvars)]
    if eqn.primitive.name == "reshape":
        return shapes[0] == shapes[-1]
    return not any(shapes)
