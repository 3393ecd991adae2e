"""Keys of equations: two that compute the same have equal ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from jdp.analysis import jaxprs


def number_key(value: Any) -> Any:
    """Return a key of a constant: a number is equal to the same number, an array only to itself."""
    if isinstance(value, (bool, int, float, complex, np.generic)) or (
        isinstance(value, np.ndarray) and not value.shape
    ):
        return type(value), np.asarray(value).tobytes()
    return id(value)


def type_key(aval: Any) -> Any:
    """Return a key of the type of a value, equal for alike values."""
    return tuple(getattr(aval, name, None) for name in ("shape", "dtype", "weak_type"))


def equation_key(eqn: Any) -> Any:
    """Return a key of an equation and its bodies, without its operands; equal for alike ones."""
    program = jaxprs.called(eqn) if eqn.primitive.name in jaxprs.CALLS else None
    if program is not None:  # how it is differentiated does not matter
        return eqn.primitive, _program_key(program)
    params = tuple((name, _param_key(value)) for name, value in sorted(eqn.params.items()))
    return eqn.primitive, params


def _param_key(value: Any) -> Any:
    if jaxprs.is_jaxpr(value):
        return _program_key(value)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_param_key, value))
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def _program_key(program: Any) -> Any:
    body = jaxprs.opened(program)
    place = {variable: i for i, variable in enumerate(body.invars)}
    key: list[Any] = [tuple(type_key(variable.aval) for variable in body.invars)]
    for variable, value in jaxprs.constants(program):
        place[variable] = len(place)
        key.append(number_key(value))

    def at(atom: Any) -> Any:
        if jaxprs.is_literal(atom):
            return type_key(atom.aval), number_key(atom.val)
        return place[atom]

    for eqn in body.eqns:
        key.append((equation_key(eqn), tuple(map(at, eqn.invars))))
        for variable in eqn.outvars:
            place[variable] = len(place)
    return tuple(key), tuple(map(at, body.outvars))
