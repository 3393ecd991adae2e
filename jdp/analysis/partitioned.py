"""What XLA may exchange between devices where a mesh axis is left to it."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from jdp.analysis import jaxprs

# XLA's partitioner sends the edges of a split dim to the neighbours: a collective-permute, which is
# one operation of all devices. Its other collectives stay among devices that share a data rank.
_SHIFTS = frozenset(
    "concatenate conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum "
    "dynamic_update_slice pad reduce_window reduce_window_max reduce_window_min reduce_window_sum "
    "reshape rev select_and_gather_add select_and_scatter select_and_scatter_add slice split "
    "unstack".split()
)


# XLA's CPU backend widens what these add up or compare. Where an axis is left to the compiler it
# fails to, and aborts the process.
_REDUCTIONS = "psum", "pmax", "pmin", "reduce_scatter", "unreduced_"


def bfloat16_reductions(eqn: Any) -> list[Any]:
    """Return the reductions of bfloat16 in a shard_map that leaves axes to the compiler.

    Those in a nested shard_map that leaves none are not among them.

    Args:
      eqn: a shard_map equation, which no other one encloses.
    """
    return list(_narrow(eqn, frozenset(), {}))


def _narrow(eqn: Any, manual: frozenset[str], seen: dict[int, Any]) -> Iterator[Any]:
    if eqn.primitive.name == "shard_map":
        manual = manual | jaxprs.manual_axes(eqn)
        if manual >= set(eqn.params["mesh"].axis_names):
            return
    for body in jaxprs.bodies(eqn):
        if id(body) in seen:  # called from several places
            continue
        seen[id(body)] = body
        for inner in body.eqns:
            if inner.primitive.name.startswith(_REDUCTIONS) and _is_bfloat16(inner):
                yield inner
            yield from _narrow(inner, manual, seen)


def _is_bfloat16(eqn: Any) -> bool:
    return any(getattr(atom.aval, "dtype", None) == jnp.bfloat16 for atom in eqn.invars)


def first_shift(jaxpr: Any, around: Any, num_axes: int) -> Any | None:
    """Return an equation that may become a collective-permute, where its operands are split.

    Over one axis arrays are split along one dim or another, and to change that is an all-to-all.
    Over several axes the same parts may lie on other devices, and any two arrays that meet, or
    leave by different branches, may have to be put in the same order: by a collective-permute.

    Args:
      jaxpr: the body of a branch or of a loop.
      around: the equation that it is a body of.
      num_axes: how many axes of several devices XLA may split arrays over, at least 1.
    """
    if num_axes > 1:
        found = next(_with_arrays(jaxpr, set()), None)
        if found is None and not all(map(_is_number, jaxpr.outvars)):
            return around
        return found
    shifts = (x for x in jaxprs.equations(jaxpr, mapped=False) if x.primitive.name in _SHIFTS)
    return next((eqn for eqn in shifts if not _is_local(eqn)), None)


def _with_arrays(jaxpr: Any, seen: set[int]) -> Iterator[Any]:
    if id(jaxpr) in seen:  # called from several places
        return
    seen.add(id(jaxpr))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "shard_map":
            for body in jaxprs.bodies(eqn):
                yield from _with_arrays(body, seen)
        if not all(map(_is_number, (*eqn.invars, *eqn.outvars))):
            yield eqn


def _is_number(atom: Any) -> bool:
    return getattr(atom.aval, "size", 1) == 1


def _is_local(eqn: Any) -> bool:
    shapes = [[d for d in atom.aval.shape if d != 1] for atom in (*eqn.invars, *eqn.outvars)]
    if eqn.primitive.name == "reshape":
        return shapes[0] == shapes[-1]
    return not any(shapes)
