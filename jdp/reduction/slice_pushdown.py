"""Slice before elementwise operations, so no operand is gathered.

`optax.apply_updates`, which Flax calls, adds whole updates to whole parameters; the step keeps a
slice.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jdp.reduction import flat_program, shard_registry
from jdp.reduction.flat_program import FlatOperation, FlatProgram, FlatValue
from jdp.reduction.partition import rules
from jdp.reduction.partition.values import names_axes


class _Cut(NamedTuple):
    dim: int
    axes: tuple[str, ...]


def sliced_early(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Slice operands before elementwise operations."""

    def run(*args: Any) -> Any:
        trees: list[Any] = []
        cuts: list[_Cut] = []

        # JAX names it and the arguments of `fn` in errors: see `error_hints`.
        def recording(*args: Any) -> list[list[Any]]:
            with shard_registry.recorded() as found:
                leaves, tree = jax.tree.flatten(fn(*args))
            trees.append(tree)
            cuts.extend(_Cut(part.dim, part.axes) for _, part in found)
            return [leaves, [whole for whole, _ in found], [part.value for _, part in found]]

        setattr(recording, "__signature__", inspect.signature(fn))  # noqa: B010
        closed = jax.make_jaxpr(recording)(*args)
        # Unused results include marks for the proof.
        program = flat_program.flatten(closed, drops_dead=False)
        end = len(program.outs) - 2 * len(cuts)
        wholes, own = program.outs[end : end + len(cuts)], program.outs[end + len(cuts) :]
        run_program = _SlicedProgram(program, dict(zip(wholes, cuts, strict=True)))
        values = run_program(jax.tree.leaves(args), dict(zip(wholes, own, strict=True)))
        return trees[0].unflatten([values[out] for out in program.outs[:end]])

    return run


class _SlicedProgram:
    """A program that slices early; `known` maps gathered arrays to their slices."""

    def __init__(self, program: FlatProgram, known: Mapping[FlatValue, _Cut]):
        self._program = program
        # Of known values, or elementwise computed from such.
        self._cuts = dict(known)
        for operation in program.operations:
            cut = next((self._cuts[v] for v in operation.ins if v in self._cuts), None)
            if cut is not None and _is_elementwise(operation, cut.axes):
                self._cuts[operation.outs[0]] = cut
        self._needed = {v for v in map(self._sliced, program.operations) if v is not None}
        for operation in reversed(program.operations):
            if not self._needed.isdisjoint(operation.outs) and operation.outs[0] not in known:
                cut = self._cuts[operation.outs[0]]
                self._needed.update(v for v in operation.ins if self._cuts.get(v) == cut)
        self._needed.difference_update(known)

    def _sliced(self, operation: FlatOperation) -> FlatValue | None:
        """Return the operand of a slice computed early."""
        if operation.eqn.primitive is not shard_registry.own_slice_p:
            return None
        cut = _Cut(operation.eqn.params["dim"], operation.eqn.params["axes"])
        (operand,) = operation.ins
        return operand if self._cuts.get(operand) == cut else None

    def __call__(
        self, arguments: Sequence[Any], known: Mapping[FlatValue, FlatValue]
    ) -> dict[FlatValue, Any]:
        values = dict(zip(self._program.ins, arguments, strict=True))
        values.update((value, value.constant) for value in self._program.constants)
        slices: dict[FlatValue, Any] = {}

        def slice_of(value: FlatValue, cut: _Cut) -> Any:
            if self._cuts.get(value) != cut:
                return shard_registry.own_slice(values[value], *cut)
            return values[known[value]] if value in known else slices[value]

        for operation in self._program.operations:
            if (operand := self._sliced(operation)) is not None:
                values[operation.outs[0]] = slice_of(operand, self._cuts[operand])
                continue
            results = operation.run([values[v] for v in operation.ins])
            values.update(zip(operation.outs, results, strict=True))
            if not self._needed.isdisjoint(operation.outs):
                (out,) = operation.outs
                cut = self._cuts[out]
                ins = [slice_of(v, cut) if v.aval.shape else values[v] for v in operation.ins]
                (slices[out],) = operation.run(ins)
        return values


def _is_elementwise(operation: FlatOperation, axes: Sequence[str]) -> bool:
    """Whether slices of the operands give that of the result; not for marks."""
    if len(operation.outs) != 1 or operation.eqn.primitive.name == "jdp_mark":
        return False
    shape = operation.outs[0].aval.shape
    if any(value.aval.shape not in ((), shape) for value in operation.ins):
        return False
    if names_axes(operation.eqn, axes):  # slices of other ranks have other elements
        return False
    return rules.is_elementwise(operation.eqn, len(shape))
