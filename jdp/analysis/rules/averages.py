"""Distinguish means over a rank's own elements from divisions by the number of ranks.

A rank may have as many rows as there are ranks. In `jnp.mean` a sum precedes the division, and in
its gradient the divided value is copied to as many elements. A division by a number of that size,
without the sum or the copies, divides by the number of ranks.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from jdp.analysis import jaxprs
from jdp.analysis.interpreter import Interpreter, Quotient

_ADD = frozenset({"add", "add_any"})
# The number of divisors that are remembered for one value. A longer chain starts again.
_MOST_DIVISORS = 8


def record_sum(interp: Interpreter, eqn: Any) -> None:
    """Record the sizes of the dims that a rank has summed over, unless it is a gradient's sum."""
    (atom,), (total,) = eqn.invars, eqn.outvars
    sizes = tuple(atom.aval.shape[i] for i in eqn.params["axes"])
    if math.prod(sizes) == 1 and not jaxprs.is_literal(atom) and atom in interp.quotients:
        interp.quotients[total] = interp.quotients[atom]
    elif not jaxprs.is_transposed(eqn):
        interp.sums[total] = sizes


def record_rounds(interp: Interpreter, eqn: Any) -> None:
    """Record the number of terms that a scan adds up, as over micro-batches; not in a gradient."""
    if eqn.params["reverse"]:
        return
    body, num_constants, num_carry = jaxprs.scan_parts(eqn)
    sums = {each.outvars[0]: each.invars for each in body.eqns if each.primitive.name in _ADD}
    for i, total in enumerate(eqn.outvars[:num_carry]):
        atom, before = body.outvars[i], body.invars[num_constants + i]
        if not jaxprs.is_literal(atom) and before in sums.get(atom, ()):
            interp.sums[total] = (eqn.params["length"],)


def divided(interp: Interpreter, eqn: Any, dividend: Any, value: int, divisor: float) -> int:
    """Return the class of a quotient: a mean if a sum is divided by its number of terms."""
    is_literal = jaxprs.is_literal(dividend)
    if interp.lattice.is_constant(value):
        times = 0 if is_literal else interp.divisions.get(dividend, 0)
        more = interp.lattice.divisions(divisor)
        interp.divisions[eqn.outvars[0]] = times = times + more
        if more and not times:  # a product or a sum undoes it
            return value & ~interp.lattice.over("divided", interp.lattice.varying)
    before = None if is_literal else interp.quotients.get(dividend)
    if before is None or len(before.divisors) == _MOST_DIVISORS:
        before = Quotient(value, ())
    interp.quotients[eqn.outvars[0]] = Quotient(before.value, (*before.divisors, divisor))
    sizes = () if is_literal else interp.sums.get(dividend, ())
    mean = _without_mean(interp, Quotient(value, (divisor,)), sizes) if sizes else None
    return interp.lattice.scale_by_number(value, 1 / divisor) if mean is None else mean


def spread(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    """Return the class of copies: of a mean's gradient, if their number is the divisor."""
    (value, *_), (atom, *_), (copies,) = ins, eqn.invars, eqn.outvars
    if jaxprs.is_literal(atom):
        return value
    sizes = _copied(eqn)
    if not sizes and atom in interp.sums:
        interp.sums[copies] = interp.sums[atom]
    quotient = interp.quotients.get(atom)
    mean = None if quotient is None else _without_mean(interp, quotient, sizes)
    if mean is None:
        return value
    lattice = interp.lattice
    if not lattice.is_constant(value):
        return mean
    return mean | lattice.over("averaging", lattice.at(value, "divided"))


def _copied(eqn: Any) -> tuple[int, ...]:
    """Return the sizes of the dims along which a broadcast copies."""
    before, after = eqn.invars[0].aval.shape, eqn.params["shape"]
    kept = dict(zip(eqn.params["broadcast_dimensions"], before, strict=True))
    return tuple(size for i, size in enumerate(after) if size != kept.get(i, 1))


def _without_mean(interp: Interpreter, quotient: Quotient, sizes: tuple[int, ...]) -> int | None:
    """Return the class of a quotient without its division by a number of elements, None if by none.

    If the value is already a sum over the ranks, the division is by the number of ranks.
    """
    lattice, value = interp.lattice, quotient.value
    is_before_sums = value & lattice.varying and not value & lattice.total
    if not lattice.is_constant(value) and not is_before_sums:
        return None
    counts = {
        math.prod(chosen)
        for num in range(1, len(sizes) + 1)
        for chosen in itertools.combinations(sizes, num)
    }
    matches = [
        (count, i)
        for i, divisor in enumerate(quotient.divisors)
        for count in counts
        if count > 1 and abs(divisor - count) <= 4e-3 * count
    ]
    if not matches:
        return None
    _, mean = max(matches)  # the largest number of elements
    for i, divisor in enumerate(quotient.divisors):
        if i != mean:
            value = lattice.scale_by_number(value, 1 / divisor)
    return value
