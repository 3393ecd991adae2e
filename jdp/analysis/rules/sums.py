"""Compute the classes of sums over ranks, and whether they stay undivided."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jdp.analysis import jaxprs
from jdp.analysis.interpreter import Interpreter


def all_reduced(interp: Interpreter, eqn: Any, value: int, position: int, axes: int) -> int:
    """Return the class of the sum over `axes` of one operand of a collective."""
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
    """Return the class of a sum over `axes`, with the bits "undivided" and "duplicated".

    Sums of integers are counts. JAX itself sums cotangents that are equal on every rank. Neither
    gets the bits.
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
    """Record the result of a gather: the class of each rank's part, the axes, and their dim."""
    if "all_gather_dimension" in eqn.params:
        interp.gathered[eqn.outvars[0]] = value, axes, eqn.params["all_gather_dimension"]


def of_gathered(interp: Interpreter, eqn: Any) -> int | None:
    """Return the class of a sum over the gathered parts of all ranks, None for any other sum."""
    (atom,) = eqn.invars
    gathered = None if jaxprs.is_literal(atom) else interp.gathered.get(atom)
    if gathered is None or gathered[2] not in eqn.params["axes"]:
        return None
    value, axes, _ = gathered
    # Other terms may be divided by the number of terms, and the weights are unknown.
    total = all_reduced(interp, eqn, value, 0, axes) | interp.lattice.bent
    return total | interp.lattice.over("uneven", axes & value)
