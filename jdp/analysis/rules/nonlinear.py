"""Rules for functions whose results are not n times too large if their operands are."""

from __future__ import annotations

import functools
import operator
from typing import Any

from jdp.analysis import jaxprs
from jdp.analysis.interpreter import Interpreter, image, mix


def bend(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    """Join the operands, as image does, if a constant other than 1 / n may correct the result."""
    value = image(interp, eqn, ins)
    return value | interp.lattice.bent if value & interp.lattice.data else value


def _larger(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    # max(n x, 0) is n max(x, 0). With another bound it may be 1 if any rank has a 1.
    for i, atom in enumerate(eqn.invars):
        if jaxprs.number(atom) == 0:
            return image(interp, eqn, [ins[1 - i]])
    return _bound(interp, eqn, ins)


def _bound(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    lattice, value = interp.lattice, mix(interp, eqn, ins)
    constants = [x for x in ins if lattice.is_constant(x) and x & lattice.nonzero]
    if not constants:
        return value
    if not all(x & lattice.other for x in constants):
        # The result may be 1 if any rank has a 1.
        value &= ~lattice.over("duplicated", lattice.varying)
    return value | lattice.capped


def _invert(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    value = bend(interp, eqn, ins)
    return interp.lattice.invert(value) if value & interp.lattice.data else value


def _power(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    if "y" not in eqn.params:
        value, exponent = mix(interp, eqn, ins), interp.number(eqn.invars[1])
        is_inverse = exponent is not None and exponent < 0 and value & interp.lattice.data
        return interp.lattice.invert(value) if is_inverse else value
    return (bend if eqn.params["y"] > 0 else _invert)(interp, eqn, ins)


def _solve(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    """Return the class of a linear system's solution: the right-hand side over the matrix."""
    lattice, (*matrix, vector) = interp.lattice, ins
    ratio = lattice.quotient(vector, functools.reduce(operator.or_, matrix))
    return lattice.without_scale(mix(interp, eqn, ins)) | ratio & lattice.scale


def _decompose(interp: Interpreter, eqn: Any, ins: list[int]) -> list[int]:
    value = mix(interp, eqn, ins)
    bases, scaled = interp.lattice.without_scale(value), _SCALED.get(eqn.primitive.name)
    return [value if i == scaled else bases for i in range(len(eqn.outvars))]


def _logarithm(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    # A factor n becomes an added term, and the exponential of the result may divide by it.
    return interp.lattice.without_scale(bend(interp, eqn, ins))


def _decide(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    return interp.lattice.without_scale(mix(interp, eqn, ins))


def _largest(interp: Interpreter, eqn: Any, ins: list[int]) -> list[int]:
    value = mix(interp, eqn, ins)
    return [value, interp.lattice.without_scale(value)]


# Another constant than 1 / n corrects these: for a sum of elements, 1 over n times their number.
_BEND = "cbrt cumsum reduce_window_sum sqrt square"

# Booleans, signs and positions, which a factor n does not change.
_DECIDE = """
    and argmax argmin eq eq_to ge gt is_finite le le_to lt lt_to ne not or reduce_and reduce_or
    reduce_xor sign xor
"""

# Decompositions into orthogonal bases, which a factor n does not change, and the position of the
# one result that it does change.
_SCALED = {"eig": 0, "eigh": 1, "qr": 1, "svd": 0}

RULES = {
    **dict.fromkeys(_BEND.split(), bend),
    **dict.fromkeys(_DECIDE.split(), _decide),
    **dict.fromkeys(("householder_product", *_SCALED), _decompose),
    **dict.fromkeys("approx_top_k top_k".split(), _largest),
    **dict.fromkeys("clamp min".split(), _bound),
    **dict.fromkeys("integer_pow pow".split(), _power),
    **dict.fromkeys("log log1p log2".split(), _logarithm),
    **dict.fromkeys("triangular_solve tridiagonal_solve".split(), _solve),
    "max": _larger,
    "rsqrt": _invert,
}
