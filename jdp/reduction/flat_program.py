"""A traced program as a flat list of live operations."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jdp import jax_compat
from jdp.analysis import jaxprs
from jdp.analysis.marks import MICRO_BATCH

# They do not change how their body runs or is differentiated.
_OPENED = frozenset("jit closed_call".split())


class FlatValue:
    """An input, a constant, or a result."""

    __slots__ = ("aval", "constant")

    def __init__(self, aval: Any, constant: Any = None):
        self.aval = aval
        self.constant = constant

    def num_bytes(self) -> int:
        """Return the bytes; 0 if it is not an array."""
        dtype = getattr(self.aval, "dtype", None)
        return 0 if dtype is None else self.aval.size * dtype.itemsize


class FlatOperation(NamedTuple):
    """An equation with its values and calling equations, outermost first."""

    eqn: Any
    ins: tuple[FlatValue, ...]
    outs: tuple[FlatValue, ...]
    calls: tuple[Any, ...]

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """Return the results."""
        return jax_compat.bind(self.eqn, operands, self.calls)


class FlatProgram(NamedTuple):
    """A program without calls."""

    operations: list[FlatOperation]
    ins: list[FlatValue]
    outs: list[FlatValue]
    constants: list[FlatValue]


def _opened_call(eqn: Any) -> Any | None:
    if eqn.primitive.name not in _OPENED or eqn.params.get("name") == MICRO_BATCH:
        return None
    return jaxprs.called(eqn)


def flatten(
    program: Any,
    called: Callable[[Any], Any | None] = _opened_call,
    calls: tuple[Any, ...] = (),
    *,
    drops_dead: bool = True,
) -> FlatProgram:
    """Flatten a program; `called` returns a call's program."""
    ins = [FlatValue(variable.aval) for variable in jaxprs.opened(program).invars]
    flat = FlatProgram([], ins, [], [])
    flat.outs.extend(_append(program, ins, calls, flat, called))
    if not drops_dead:
        return flat
    needed = {*flat.outs}
    live = []
    for operation in reversed(flat.operations):
        if jaxprs.acts(operation.eqn) or not needed.isdisjoint(operation.outs):
            needed.update(operation.ins)
            live.append(operation)
    return flat._replace(operations=live[::-1])


def zeros_of(program: FlatProgram) -> set[FlatValue]:
    """Return the certain zeros, such as missing gradients."""
    found = {each for each in program.constants if _is_zero(each.constant)}
    for operation in program.operations:
        if operation.eqn.primitive.name == "broadcast_in_dim" and found.issuperset(operation.ins):
            found.update(operation.outs)
    return found


def _is_zero(constant: Any) -> bool:
    is_number = not isinstance(constant, jax.Array) and np.ndim(constant) == 0
    return is_number and not bool(constant)


def _append(
    program: Any,
    ins: Sequence[FlatValue],
    calls: tuple[Any, ...],
    flat: FlatProgram,
    called: Callable[[Any], Any | None],
) -> list[FlatValue]:
    body = jaxprs.opened(program)
    env = dict(zip(body.invars, ins, strict=True))

    def constant(aval: Any, value: Any) -> FlatValue:
        flat.constants.append(FlatValue(aval, value))
        return flat.constants[-1]

    def read(atom: Any) -> FlatValue:
        return constant(atom.aval, atom.val) if jaxprs.is_literal(atom) else env[atom]

    for variable, value in jaxprs.constants(program):
        env[variable] = constant(variable.aval, value)
    for eqn in body.eqns:
        operands = tuple(map(read, eqn.invars))
        inner = called(eqn)
        if inner is not None:
            outs = _append(inner, operands, (*calls, eqn), flat, called)
        else:
            outs = [FlatValue(variable.aval) for variable in eqn.outvars]
            flat.operations.append(FlatOperation(eqn, operands, tuple(outs), calls))
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in body.outvars]
