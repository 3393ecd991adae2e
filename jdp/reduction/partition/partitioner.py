"""Run a function of whole arrays on slices, by operation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdp import axis, jax_compat
from jdp.analysis import diagnostics, jaxprs
from jdp.reduction import flat_program
from jdp.reduction.flat_program import FlatOperation, FlatValue
from jdp.reduction.partition import work_assignment
from jdp.reduction.partition.isomorphic_subgraphs import AlikeParts, with_alike_parts
from jdp.reduction.partition.rules import Plan, combine, plan
from jdp.reduction.partition.values import (
    ROUNDS_OF_WHILE,
    BroadcastValue,
    Computed,
    Count,
    Dim,
    Gather,
    Owned,
    Ranks,
    Value,
)


def _cond(partitioner: Any, eqn: Any, ins: list[Value]) -> list[Value]:
    """Choose a result's dim from a branch; the others slice theirs."""
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
    """The sliced dims of a loop body's inputs."""

    constants: Sequence[Dim]
    carry: Sequence[Dim]
    xs: Sequence[Dim]

    def flat(self) -> list[Dim]:
        """Return them in the body's order."""
        return [*self.constants, *self.carry, *self.xs]


def _scan(partitioner: Any, eqn: Any, ins: list[Value]) -> list[Value]:
    body, num_constants, num_carry = jaxprs.scan_parts(eqn)
    program = eqn.params["jaxpr"]
    avals = [variable.aval for variable in body.invars]
    start = num_constants + num_carry
    constants, carry, xs = ins[:num_constants], ins[num_constants:start], ins[start:]

    def probe(dims: LoopDims) -> Any:
        return partitioner.probe(program, avals, dims.flat())

    # Rounds use rows, so the first dim stays whole.
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
    """Slice the carry as the body does, and gather constants before the loop."""
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
    """Use whole values if the rounds would gather more bytes."""
    num_bytes = sum(value.num_bytes for value in ins if value.dim is not None)
    if probe(dims).num_bytes * rounds <= num_bytes:
        return dims
    return LoopDims(*([None] * len(each) for each in dims))


def _moved(dim: Dim, by: int) -> Dim:
    """Convert a dim of rows to that of their stack, or back."""
    return dim + by if isinstance(dim, int) and dim + by >= 0 else None


def _first(dims: Sequence[Dim]) -> Dim:
    return next((dim for dim in dims if dim is not None), None)


def _dims(values: Sequence[Value]) -> list[Dim]:
    return [value.dim for value in values]


def _at(values: Sequence[Value], dims: Sequence[Dim]) -> list[jax.Array]:
    """Drop weak types, since branches and rounds must agree."""
    return [_strong(value.at(dim)) for value, dim in zip(values, dims, strict=True)]


def _strong(x: Any) -> jax.Array:
    return lax.convert_element_type(x, x.dtype) if jax.typeof(x).weak_type else jnp.asarray(x)


def _values(
    partitioner: Any, variables: Sequence[Any], results: Sequence[Any], dims: Sequence[Dim]
) -> list[Value]:
    found = zip(variables, results, dims, strict=True)
    return [Computed(partitioner.ranks, variable.aval, x, dim) for variable, x, dim in found]


RULES = {"cond": _cond, "scan": _scan, "while": _while}


# The most elements of partial results that wait for a common collective.
_LARGEST_WAITING = 4096
# Hints to the compiler about whole arrays.
_IDENTITIES = frozenset("layout_constraint reshard sharding_constraint".split())
# They change where or how a body runs.
_CLOSED = frozenset("compute_on custom_partitioning linear_call remat_opt".split())


class Waiting(NamedTuple):
    """A partial result, not yet combined over ranks."""

    aval: Any
    part: jax.Array
    partial: str


class Probe(NamedTuple):
    """The results and costs of a body for inputs with some sliced dims."""

    dims: list[Dim]
    num_bytes: int
    gathered_inputs: set[int]


class _Partitioner:
    """Runs programs of whole arrays on this rank's slices."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def outputs(self, program: Any, values: Sequence[Value]) -> list[Value]:
        """Run a jaxpr. Independent operations share one collective; its users run last."""
        around = self.ranks.stack
        flat = flat_program.flatten(program, _opened_call, around[::-1])
        whole = self.ranks.bound_to_whole(flat)
        env: dict[FlatValue, Value | Waiting] = dict(zip(flat.ins, values, strict=True))
        for each in flat.constants:
            env[each] = Computed(self.ranks, jax.typeof(each.constant), each.constant, None)
        may_own = self.ranks.may_own()
        self.run(with_alike_parts(flat, whole) if may_own else flat.operations, env, whole)
        self.ranks.stack = around
        return [env[out] for out in flat.outs]  # pyrefly: ignore

    def run(
        self,
        operations: Sequence[FlatOperation | AlikeParts],
        env: dict[FlatValue, Any],
        whole: Set[FlatValue] = frozenset(),
    ) -> None:
        """Run operations into `env`; those in `whole` on whole arrays."""
        remaining = operations
        while remaining:
            remaining = self._run_ready(remaining, env, whole)

    def probe(self, program: Any, avals: Sequence[Any], dims: Sequence[Dim]) -> Probe:
        """Trace a body with inputs sliced along `dims`."""
        ranks = self.ranks.fresh()
        found: list[Dim] = []

        def trace(*locals_: jax.Array) -> list[Any]:
            values = _Partitioner(ranks).inputs(avals, locals_, dims)
            outs = _Partitioner(ranks).outputs(program, values)
            found.extend(out.dim for out in outs)
            return [out.at(out.dim) for out in outs]

        shapes = [
            jax.ShapeDtypeStruct(ranks.local_shape(aval.shape, dim), aval.dtype)
            for aval, dim in zip(avals, dims, strict=True)
        ]
        jax.eval_shape(trace, *shapes)
        num_bytes = sum(gather.num_bytes for gather in ranks.gathers)
        return Probe(found, num_bytes, ranks.gathered_inputs)

    def inputs(self, avals: Any, held: Any, dims: Any) -> list[Value]:
        return [
            Computed(self.ranks, aval, x, dim, number)
            for number, (aval, x, dim) in enumerate(zip(avals, held, dims, strict=True))
        ]

    def _run_ready(
        self, operations: Sequence[FlatOperation | AlikeParts], env: Any, whole: Set[FlatValue]
    ) -> list[FlatOperation | AlikeParts]:
        """Run the operations without waits; return the others."""
        later: list[FlatOperation | AlikeParts] = []
        waiting: dict[FlatValue, Waiting] = {}
        blocked: set[FlatValue] = set()
        is_effect_blocked = False
        pending = deque(operations)
        while pending:
            operation = pending.popleft()
            acts = isinstance(operation, FlatOperation) and jaxprs.acts(operation.eqn)
            if (acts and is_effect_blocked) or not blocked.isdisjoint(operation.ins):
                later.append(operation)
                blocked.update(operation.outs)
                is_effect_blocked |= acts
                continue
            if isinstance(operation, AlikeParts):
                if not work_assignment.run(self, operation, env):
                    pending.extendleft(operation.operations()[::-1])
                continue
            outs = self._step(operation, [env[each] for each in operation.ins], whole)
            for result, out in zip(operation.outs, outs, strict=True):
                env[result] = out
                if isinstance(out, Waiting):
                    waiting[result] = out
                    blocked.add(result)
        self._combine(waiting, env)
        return later

    def _combine(self, waiting: dict[FlatValue, Waiting], env: dict[FlatValue, Any]) -> None:
        for partial in dict.fromkeys(each.partial for each in waiting.values()):
            chosen = [result for result, each in waiting.items() if each.partial == partial]
            totals = combine([waiting[each].part for each in chosen], partial, self.ranks)
            for result, total in zip(chosen, totals, strict=True):
                env[result] = self._held(waiting[result].aval, total, None)

    def _step(
        self, operation: FlatOperation, ins: list[Value], whole: Set[FlatValue]
    ) -> Sequence[Any]:
        eqn = operation.eqn
        self.ranks.stack = (eqn, *operation.calls[::-1])
        name = eqn.primitive.name
        if not whole.isdisjoint(operation.outs):
            return self._whole(eqn, ins)
        if name in _IDENTITIES:
            return ins
        if name == "broadcast_in_dim" and len(ins) == 1:
            dims = eqn.params["broadcast_dimensions"]
            return [BroadcastValue(self.ranks, eqn.outvars[0].aval, ins[0], dims)]
        if name == "iota" and not ins:
            return [Count(self.ranks, eqn.outvars[0].aval, eqn.params["dimension"])]
        if all(value.dim is None for value in ins):
            return self._whole(eqn, ins)
        if name == "optimization_barrier":
            outs = _bound(eqn, [value.at(value.dim) for value in ins])
            return self._results(eqn, outs, [value.dim for value in ins])
        if name in RULES:
            return RULES[name](self, eqn, ins)
        cheapest = self._cheapest(eqn, ins)
        return self._whole(eqn, ins) if cheapest is None else self._planned(eqn, ins, cheapest)

    def _cheapest(self, eqn: Any, ins: list[Value]) -> Plan | None:
        plans = {}
        for position, value in enumerate(ins):
            found = plan(eqn, position, value.dim, self.ranks)
            if found is not None:
                costs = (each.cost(dim) for each, dim in zip(ins, found.ins, strict=True))
                plans.setdefault(sum(costs), found)
        return plans[min(plans)] if plans else None

    def _planned(self, eqn: Any, ins: list[Value], plan: Plan) -> Sequence[Any]:
        operands = [value.at(dim) for value, dim in zip(ins, plan.ins, strict=True)]
        outs = plan.run(operands)
        if not plan.partial:
            return self._results(eqn, outs, plan.outs)
        (part,), (variable,) = outs, eqn.outvars
        if math.prod(part.shape) <= _LARGEST_WAITING:
            return [Waiting(variable.aval, part, plan.partial)]
        return [self._held(variable.aval, combine([part], plan.partial, self.ranks)[0], None)]

    def _whole(self, eqn: Any, ins: list[Value]) -> list[Value]:
        outs = _bound(eqn, [value.at(None) for value in ins])
        return self._results(eqn, outs, [None] * len(outs))

    def _results(self, eqn: Any, outs: Sequence[Any], dims: Sequence[Dim]) -> list[Value]:
        variables = zip(eqn.outvars, outs, dims, strict=True)
        return [Computed(self.ranks, variable.aval, x, dim) for variable, x, dim in variables]

    def _held(self, aval: Any, x: jax.Array, dim: Dim) -> Value:
        is_same = x.dtype == aval.dtype
        return Computed(
            self.ranks, aval, x if is_same else lax.convert_element_type(x, aval.dtype), dim
        )


def _bound(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    return jax_compat.bind(eqn, operands, at_caller=not diagnostics.source_of(eqn))


def _opened_call(eqn: Any) -> Any | None:
    is_open = eqn.primitive.name in jaxprs.CALLS - _CLOSED
    return jaxprs.called(eqn) if is_open else None


class Piece(NamedTuple):
    """This rank's part of an array.

    Attributes:
      dim: of the ranks' equal slices, in the order of `lax.axis_index`; None for the whole array,
        with equal bits on every rank.
    """

    value: jax.Array
    dim: int | None


class Partitioned(NamedTuple):
    """Results on slices, the gathered values in order, and the matrices of one rank each."""

    pieces: list[Piece]
    gathers: list[Gather]
    owned: list[Owned]


def partitioned(
    function: Callable[..., Sequence[jax.Array]],
    args: Sequence[Piece],
    axes: tuple[str, ...],
    want: Sequence[int | None] | Callable[[list[jax.ShapeDtypeStruct]], Sequence[int | None]],
) -> Partitioned:
    """Run a function of whole arrays on each rank's slices, with the same result.

    Arrays needed whole are gathered once and reported; other changes of the sliced dim are
    all-to-alls. Matrices multiplied alike are computed by one rank each if estimated to be faster.
    The method is that of GSPMD (Xu et al. 2021, arXiv:2105.04663) for one sliced dim of each array.
    Custom derivatives are lost.
    """
    size = axis.size(axes)
    if size > 1 and axis.is_typed(axes):
        raise ValueError(
            f"the shard_map over {axes} types its values (check_vma=True), but here slices and "
            "whole arrays have one type. Write jax.shard_map(..., check_vma=False)."
        )
    ranks = Ranks(axes, size)
    whole = [_whole(piece, i, ranks) for i, piece in enumerate(args)]
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*whole)
    shapes = list(shapes)
    dims = list(want(shapes) if callable(want) else want)
    _check_wanted(dims, shapes, ranks)
    is_alone = size == 1
    values = [
        Computed(ranks, shape, piece.value, None if is_alone else piece.dim)
        for shape, piece in zip(whole, args, strict=True)
    ]
    outs = _Partitioner(ranks).outputs(program, values)
    pieces = [
        Piece(jnp.asarray(out.at(None if is_alone else dim)), dim)
        for out, dim in zip(outs, dims, strict=True)
    ]
    return Partitioned(pieces, ranks.gathers, ranks.owned)


def _whole(piece: Piece, i: int, ranks: Ranks) -> jax.ShapeDtypeStruct:
    shape, dim = piece.value.shape, piece.dim
    if dim is not None and not 0 <= dim < len(shape):
        raise ValueError(
            f"argument {i} is declared sliced along dim {dim}, but its slice has {len(shape)} "
            f"dims: {shape}. Write a dim from 0 to {len(shape) - 1}, or None for a whole array."
        )
    full = tuple(n * ranks.size if k == dim else n for k, n in enumerate(shape))
    weak = jax.typeof(piece.value).weak_type
    return jax.ShapeDtypeStruct(full, piece.value.dtype, weak_type=weak)


def _check_wanted(dims: list[int | None], shapes: list[Any], ranks: Ranks) -> None:
    if len(dims) != len(shapes):
        raise ValueError(
            f"want= has {len(dims)} dims for {len(shapes)} results. Write one for each result."
        )
    for i, (dim, shape) in enumerate(zip(dims, shapes, strict=True)):
        if dim is None:
            continue
        if not 0 <= dim < len(shape.shape) or not ranks.divide(shape.shape[dim]):
            raise ValueError(
                f"result {i} of shape {shape.shape} does not divide into {ranks.size} equal "
                f"slices along dim {dim}. Write a dim whose size is a multiple of {ranks.size}, "
                "or None for the whole."
            )
