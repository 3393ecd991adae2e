"""Run the operations of a program in order, each on slices where that is possible."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import jax
from jax import lax

from jdp import jax_compat
from jdp.analysis import jaxprs, source_lines
from jdp.reduction import flat_program
from jdp.reduction.flat_program import FlatOperation, FlatValue
from jdp.reduction.partition import control_flow, work_assignment
from jdp.reduction.partition.isomorphic_subgraphs import AlikeParts, with_alike_parts
from jdp.reduction.partition.ranks import Dim, Ranks
from jdp.reduction.partition.rules import Plan, plan
from jdp.reduction.partition.rules.reductions import combine
from jdp.reduction.partition.values import BroadcastValue, Computed, Count, Value

# Partial results up to that many elements wait for others, to be combined in one collective.
_LARGEST_WAITING = 4096
# Hints to the compiler about whole arrays.
_IDENTITIES = frozenset("layout_constraint reshard sharding_constraint".split())
# Calls that change where or how a body runs. They stay as they are.
_CLOSED = frozenset("compute_on custom_partitioning linear_call remat_opt".split())


class Waiting(NamedTuple):
    """A partial result, not yet combined with those of other ranks."""

    aval: Any
    part: jax.Array
    partial: str


class Probe(NamedTuple):
    """The results and costs of a body, for inputs sliced in one way.

    Attributes:
      dims: of its outputs.
      num_bytes: that it gathers.
      gathered_inputs: the positions of the inputs that it gathers.
    """

    dims: list[Dim]
    num_bytes: int
    gathered_inputs: set[int]


class Partitioner:
    """Runs programs of whole arrays on this rank's slices.

    Args:
      ranks: of the program.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def outputs(self, program: Any, values: Sequence[Value]) -> list[Value]:
        """Run a jaxpr. Operations that wait for a collective are run after all others.

        So the collectives of operations that do not depend on each other are one: the norms of
        all leaves, say.
        """
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
        """Run operations, and add their results to `env`; those in `whole` on whole arrays."""
        remaining = operations
        while remaining:
            remaining = self._run_ready(remaining, env, whole)

    def probe(self, program: Any, avals: Sequence[Any], dims: Sequence[Dim]) -> Probe:
        """Trace a body with inputs sliced along `dims`, and return its results and costs."""
        ranks = self.ranks.fresh()
        found: list[Dim] = []

        def trace(*locals_: jax.Array) -> list[Any]:
            values = Partitioner(ranks).inputs(avals, locals_, dims)
            outs = Partitioner(ranks).outputs(program, values)
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
        """Return the inputs of a body: this rank's slices along `dims`."""
        return [
            Computed(self.ranks, aval, x, dim, number)
            for number, (aval, x, dim) in enumerate(zip(avals, held, dims, strict=True))
        ]

    def _run_ready(
        self,
        operations: Sequence[FlatOperation | AlikeParts],
        env: Any,
        whole: Set[FlatValue],
    ) -> list[FlatOperation | AlikeParts]:
        """Run the operations that wait for nothing, then combine; return the others."""
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
        if name in control_flow.RULES:
            return control_flow.RULES[name](self, eqn, ins)
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
    """Run an equation, with its line if that is the author's: else with that of the update."""
    return jax_compat.bind(eqn, operands, at_caller=not source_lines.source(eqn))


def _opened_call(eqn: Any) -> Any | None:
    is_open = eqn.primitive.name in jaxprs.CALLS - _CLOSED
    return jaxprs.called(eqn) if is_open else None
