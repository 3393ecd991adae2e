"""Sums over ranks, and what they leave undivided."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jdp.analysis import jaxprs
from jdp.analysis.interpreter import Interpreter


def all_reduced(interp: Interpreter, eqn: Any, value: int, position: int, axes: int) -> int:
    """Return the class of the sum over `axes` of the operand `value`."""
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
    """Return the class of `total`, a sum of the operand `value`, with what it leaves undivided.

    Sums of integers are counts, and those of cotangents that every rank has the same are JAX's.
    """
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
    """Record what all ranks along `axes` were asked for, and along which dim it lies."""
    if "all_gather_dimension" in eqn.params:
        interp.gathered[eqn.outvars[0]] = value, axes, eqn.params["all_gather_dimension"]


def of_gathered(interp: Interpreter, eqn: Any) -> int | None:
    """Return the class of a sum over what all ranks had, None for a sum of something else."""
    (atom,) = eqn.invars
    gathered = None if jaxprs.is_literal(atom) else interp.gathered.get(atom)
    if gathered is None or gathered[2] not in eqn.params["axes"]:
        return None
    value, axes, _ = gathered
    # Other terms of the sum may be divided by their number, and the weights are unknown.
    total = all_reduced(interp, eqn, value, 0, axes) | interp.lattice.bent
    return total | interp.lattice.over("uneven", axes & value)
