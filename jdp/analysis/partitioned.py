"""Exchanges between devices that XLA may add along a mesh axis that it partitions."""

from typing import Any

import jax.numpy as jnp

from jdp.analysis import eqn_axes, jaxprs

# XLA's partitioner sends the edges of a split dim to the neighbours with a collective-permute, in
# which all devices take part. Its other collectives stay among devices that share a data rank.
_SHIFTS = frozenset(
    "concatenate conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum "
    "dynamic_update_slice pad reduce_window reduce_window_max reduce_window_min reduce_window_sum "
    "reshape rev select_and_gather_add select_and_scatter select_and_scatter_add slice split "
    "unstack".split()
)


# XLA's CPU backend widens the operands of these reductions to float32. If an axis is left to the
# compiler, the widening fails and the process aborts.
_REDUCTIONS = "psum", "pmax", "pmin", "reduce_scatter", "unreduced_"


def bfloat16_reductions(eqn: Any) -> list[Any]:
    """Return the reductions of bfloat16 in an outermost shard_map that leaves axes to the compiler.

    The body of a nested shard_map that leaves no axis to the compiler is skipped.
    """
    every = frozenset(eqn.params["mesh"].axis_names)

    def enter(manual: frozenset[str], inner: Any) -> frozenset[str] | None:
        if inner.primitive.name == "shard_map":
            manual = manual | eqn_axes.manual_axes(inner)
        return None if manual >= every else manual

    manual = enter(frozenset(), eqn)
    if manual is None:
        return []
    placed = jaxprs.placed_equations(jaxprs.mapped_body(eqn), manual, enter)
    named = (inner for inner, _ in placed if inner.primitive.name.startswith(_REDUCTIONS))
    return [inner for inner in named if _is_bfloat16(inner)]


def _is_bfloat16(eqn: Any) -> bool:
    return any(getattr(atom.aval, "dtype", None) == jnp.bfloat16 for atom in eqn.invars)


def first_shift(jaxpr: Any, around: Any, num_axes: int) -> Any | None:
    """Return an equation that may become a collective-permute, where its operands are split.

    With one partitioned axis, an array is split along one dim or another, and a change of the dim
    is an all-to-all. With several axes, two arrays may have the same parts on different devices.
    Where the arrays meet, or are the results of different branches, XLA may reorder the parts with
    a collective-permute.
    """
    inside = jaxprs.equations(jaxpr, mapped=False)
    if num_axes == 1:
        shifts = (eqn for eqn in inside if eqn.primitive.name in _SHIFTS)
        return next((eqn for eqn in shifts if not _is_local(eqn)), None)
    with_arrays = [eqn for eqn in inside if not all(map(_is_number, (*eqn.invars, *eqn.outvars)))]
    innermost = (eqn for eqn in with_arrays if not jaxprs.bodies(eqn))
    if with_arrays:
        return next(innermost, with_arrays[0])
    return None if all(map(_is_number, jaxpr.outvars)) else around


def _is_number(atom: Any) -> bool:
    return getattr(atom.aval, "size", 1) == 1


def _is_local(eqn: Any) -> bool:
    shapes = [[d for d in atom.aval.shape if d != 1] for atom in (*eqn.invars, *eqn.outvars)]
    if eqn.primitive.name == "reshape":
        return shapes[0] == shapes[-1]
    return not any(shapes)
