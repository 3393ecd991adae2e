"""Operations of a program that compute with data of their rank, which slices do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jdp.analysis import eqn_axes, jaxprs
from jdp.analysis.marks import ALL_REDUCED
from jdp.reduction.flat_program import FlatProgram, FlatValue

# Collectives whose result is the same on all ranks of their axes.
_AGREEING = frozenset(
    "all_gather all_gather_invariant jdp_all_reduce pmax pmin psum psum_invariant".split()
)


def bound_to_whole(program: FlatProgram, axes: Sequence[str]) -> set[FlatValue]:
    """Return the results of the operations that must run on whole arrays.

    A function may compute with data of its rank, as a line search does that evaluates the loss: it
    then contains the collective that makes the result the same on all ranks. Such data is whole
    and differs from rank to rank, so slices of it do not belong together. Without a collective, all
    that a function has captured is the same on all ranks.
    """
    whole: set[FlatValue] = set()
    naming = [operation for operation in program.operations if names_axes(operation.eqn, axes)]
    if not naming:
        return whole
    differing = {c for c in program.constants if isinstance(c.constant, jax.core.Tracer)}
    named = {out for operation in naming for out in operation.outs}
    for eqn, ins, outs, _ in program.operations:
        is_named = not named.isdisjoint(outs)
        if is_named or not differing.isdisjoint(ins):
            whole.update(outs)
            if not _agrees(eqn, axes):
                differing.update(outs)
    return whole


def names_axes(eqn: Any, axes: Sequence[str]) -> bool:
    """Whether an equation, or one inside of it, is a collective over one of `axes`."""
    if eqn.primitive.name == "jdp_mark":
        return False
    inside = (inner for body in jaxprs.bodies(eqn) for inner in jaxprs.equations(body))
    return any(not eqn_axes.named_axes(each).isdisjoint(axes) for each in (eqn, *inside))


def _agrees(eqn: Any, axes: Sequence[str]) -> bool:
    if eqn.primitive.name == "jdp_mark":
        return eqn.params["kind"] == ALL_REDUCED and {*eqn.params["axes"]} >= {*axes}
    if eqn.primitive.name not in _AGREEING or eqn_axes.groups(eqn) is not None:
        return False
    return {*eqn_axes.collective_axes(eqn)} >= {*axes}
