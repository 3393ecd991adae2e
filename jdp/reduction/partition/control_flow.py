"""Branches and loops: their bodies run on slices, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdp.analysis import jaxprs
from jdp.reduction.partition.ranks import ROUNDS_OF_WHILE, Dim
from jdp.reduction.partition.values import Computed, Value


def _cond(partitioner: Any, eqn: Any, ins: list[Value]) -> list[Value]:
    """Choose for each result a dim that one of the branches gives; the others slice theirs."""
    index, operands = ins[0].at(None), ins[1:]
    branches = eqn.params["branches"]
    avals = [atom.aval for atom in eqn.invars[1:]]
    dims = [value.dim for value in operands]
    given = [partitioner.probe(branch, avals, dims).dims for branch in branches]
    outs = [_first(column) for column in zip(*given, strict=True)]

    def on_slices(branch: Any) -> Callable[..., list[jax.Array]]:
        def call(*held: jax.Array) -> list[jax.Array]:
            values = partitioner.inputs(avals, held, dims)
            return _at(partitioner.outputs(branch, values), outs)

        return call

    index = lax.convert_element_type(index, "int32")
    held = [value.at(dim) for value, dim in zip(operands, dims, strict=True)]
    results = lax.switch(index, [on_slices(branch) for branch in branches], *held)
    return _values(partitioner, eqn.outvars, results, outs)


class LoopDims(NamedTuple):
    """Along which dim each input of a loop's body is sliced."""

    constants: Sequence[Dim]
    carry: Sequence[Dim]
    xs: Sequence[Dim]

    def flat(self) -> list[Dim]:
        """Return them in the order of the body's inputs."""
        return [*self.constants, *self.carry, *self.xs]


def _scan(partitioner: Any, eqn: Any, ins: list[Value]) -> list[Value]:
    body, num_constants, num_carry = jaxprs.scan_parts(eqn)
    program = eqn.params["jaxpr"]
    avals = [variable.aval for variable in body.invars]
    start = num_constants + num_carry
    constants, carry, xs = ins[:num_constants], ins[num_constants:start], ins[start:]

    def probe(dims: LoopDims) -> Any:
        return partitioner.probe(program, avals, dims.flat())

    # The dim of a row: rounds take rows, so the first dim cannot stay sliced.
    rows = [_moved(value.dim, -1) for value in xs]
    dims = _settled(probe, LoopDims(_dims(constants), _dims(carry), rows), num_carry)
    dims = _cheaper(probe, dims, ins, eqn.params["length"])
    given = probe(dims).dims
    row_dims = [_moved(dim, 0) for dim in given[num_carry:]]
    outs = [*dims.carry, *row_dims]
    held_constants = _at(constants, dims.constants)

    def round_(state: Any, row: Any) -> Any:
        held = [*held_constants, *state, *row]
        values = partitioner.inputs(avals, held, dims.flat())
        results = _at(partitioner.outputs(program, values), outs)
        return results[:num_carry], results[num_carry:]

    stacked_dims = [_moved(dim, 1) for dim in dims.xs]
    last, stacked = lax.scan(
        round_,
        _at(carry, dims.carry),
        _at(xs, stacked_dims),
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    out_dims = [*dims.carry, *(_moved(dim, 1) for dim in row_dims)]
    return _values(partitioner, eqn.outvars, [*last, *stacked], out_dims)


def _while(partitioner: Any, eqn: Any, ins: list[Value]) -> list[Value]:
    cond, body, num_cond, num_body = jaxprs.while_parts(eqn)
    programs = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    avals = [[variable.aval for variable in each.invars] for each in (cond, body)]
    carry = ins[num_cond + num_body :]

    def probe(dims: LoopDims) -> Any:
        of_cond, of_body = dims.constants[:num_cond], dims.constants[num_cond:]
        first = partitioner.probe(programs[0], avals[0], [*of_cond, *dims.carry])
        found = partitioner.probe(programs[1], avals[1], [*of_body, *dims.carry])
        constants = {i for i in first.gathered_inputs if i < num_cond}
        constants |= {i + num_cond for i in found.gathered_inputs if i < num_body}
        num_bytes = first.num_bytes + found.num_bytes
        return found._replace(num_bytes=num_bytes, gathered_inputs=constants)

    dims = LoopDims(_dims(ins[: num_cond + num_body]), _dims(carry), [])
    dims = _cheaper(probe, _settled(probe, dims, len(carry)), ins, ROUNDS_OF_WHILE)
    held = _at(ins[: num_cond + num_body], dims.constants)

    def goes_on(state: Any) -> Any:
        held_dims = [*dims.constants[:num_cond], *dims.carry]
        values = partitioner.inputs(avals[0], [*held[:num_cond], *state], held_dims)
        return partitioner.outputs(programs[0], values)[0].at(None)

    def round_(state: Any) -> Any:
        held_dims = [*dims.constants[num_cond:], *dims.carry]
        values = partitioner.inputs(avals[1], [*held[num_cond:], *state], held_dims)
        return _at(partitioner.outputs(programs[1], values), dims.carry)

    last = lax.while_loop(goes_on, round_, _at(carry, dims.carry))
    return _values(partitioner, eqn.outvars, last, dims.carry)


def _settled(probe: Callable[[LoopDims], Any], dims: LoopDims, num_carry: int) -> LoopDims:
    """Slice the carry if the body slices it, and gather constants before the loop."""
    while True:
        found = probe(dims)
        gathered = found.gathered_inputs
        constants = [None if i in gathered else dim for i, dim in enumerate(dims.constants)]
        carry = [
            new if old is None else old
            for old, new in zip(dims.carry, found.dims[:num_carry], strict=True)
        ]
        if (constants, carry) == (list(dims.constants), list(dims.carry)):
            return dims
        dims = dims._replace(constants=constants, carry=carry)


def _cheaper(
    probe: Callable[[LoopDims], Any], dims: LoopDims, ins: list[Value], rounds: int
) -> LoopDims:
    """Take everything whole into the loop if the rounds would gather more than that."""
    num_bytes = sum(value.num_bytes for value in ins if value.dim is not None)
    if probe(dims).num_bytes * rounds <= num_bytes:
        return dims
    return LoopDims(*([None] * len(each) for each in dims))


def _moved(dim: Dim, by: int) -> Dim:
    """Return a dim of rows from that of their stack, or the other way round."""
    return dim + by if isinstance(dim, int) and dim + by >= 0 else None


def _first(dims: Sequence[Dim]) -> Dim:
    return next((dim for dim in dims if dim is not None), None)


def _dims(values: Sequence[Value]) -> list[Dim]:
    return [value.dim for value in values]


def _at(values: Sequence[Value], dims: Sequence[Dim]) -> list[jax.Array]:
    """Return this rank's slices of values, without weak types: branches and rounds must agree."""
    return [_strong(value.at(dim)) for value, dim in zip(values, dims, strict=True)]


def _strong(x: Any) -> jax.Array:
    return lax.convert_element_type(x, x.dtype) if jax.typeof(x).weak_type else jnp.asarray(x)


def _values(
    partitioner: Any, variables: Sequence[Any], results: Sequence[Any], dims: Sequence[Dim]
) -> list[Value]:
    found = zip(variables, results, dims, strict=True)
    return [Computed(partitioner.ranks, variable.aval, x, dim) for variable, x, dim in found]


RULES = {"cond": _cond, "scan": _scan, "while": _while}
