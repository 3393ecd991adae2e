"""A partitioned program's values, and the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from jdp.analysis import jaxprs
from jdp.analysis.diagnostics import source_of
from jdp.analysis.marks import ALL_REDUCED
from jdp.collectives import call_order, shards, xla_shards
from jdp.reduction import shard_registry, step_context
from jdp.reduction.flat_program import FlatProgram, FlatValue

# Their results are equal on all of their axes' ranks.
_AGREEING = frozenset(
    "all_gather all_gather_invariant jdp_all_reduce pmax pmin psum psum_invariant".split()
)


def bound_to_whole(program: FlatProgram, axes: Sequence[str]) -> set[FlatValue]:
    """Return results bound to whole arrays: slices of a rank's data, as a loss's, do not match."""
    whole: set[FlatValue] = set()
    naming = [operation for operation in program.operations if names_axes(operation.eqn, axes)]
    if not naming:
        return whole
    differing = {c for c in program.constants if isinstance(c.constant, jax.core.Tracer)}
    named = {out for operation in naming for out in operation.outs}
    for eqn, ins, outs, _ in program.operations:
        is_named = not named.isdisjoint(outs)
        if is_named or not differing.isdisjoint(ins):
            whole.update(outs)
            if not _agrees(eqn, axes):
                differing.update(outs)
    return whole


def names_axes(eqn: Any, axes: Sequence[str]) -> bool:
    """Whether an equation or its bodies are collectives over `axes`."""
    if eqn.primitive.name == "jdp_mark":
        return False
    inside = (inner for body in jaxprs.bodies(eqn) for inner in jaxprs.equations(body))
    return any(not jaxprs.named_axes(each).isdisjoint(axes) for each in (eqn, *inside))


def _agrees(eqn: Any, axes: Sequence[str]) -> bool:
    if eqn.primitive.name == "jdp_mark":
        return eqn.params["kind"] == ALL_REDUCED and {*eqn.params["axes"]} >= {*axes}
    if eqn.primitive.name not in _AGREEING or jaxprs.axis_groups(eqn) is not None:
        return False
    return {*jaxprs.collective_axes(eqn)} >= {*axes}


# Assumed for costs.
ROUNDS_OF_WHILE = 10


class Ravel(NamedTuple):
    """A vector reshaped from an array of `shape`, with a slice along `dim` on each rank."""

    shape: tuple[int, ...]
    dim: int


# A value's sliced dim, None if whole.
Dim = int | Ravel | None


class Gather(NamedTuple):
    """A value gathered on every rank, for the `primitive` of an equation or an "output"."""

    primitive: str
    shape: tuple[int, ...]
    num_bytes: int
    line: str


class Owned(NamedTuple):
    """Matrices of one shape that single ranks computed, at most `count_of_rank` on each."""

    count: int
    count_of_rank: int
    shape: tuple[int, ...]
    line: str


class Ranks:
    """One program's ranks, and its gathered values."""

    def __init__(self, axes: tuple[str, ...], size: int):
        self._axes, self.size = axes, size
        self.gathers: list[Gather] = []
        self.owned: list[Owned] = []
        # By the number in `Computed`.
        self.gathered_inputs: set[int] = set()
        # The current equation and those around it, innermost first.
        self.stack: tuple[Any, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes' names."""
        return self._axes

    def fresh(self) -> Ranks:
        """Return the same ranks with a new record."""
        return Ranks(self.axes, self.size)

    def may_own(self) -> bool:
        """Whether single ranks may compute for the others."""
        return self.size > 1

    def bound_to_whole(self, program: FlatProgram) -> set[FlatValue]:
        """Return the results that need whole arrays."""
        return bound_to_whole(program, self.axes)

    def communicate(self, eqn: Any) -> bool:
        """Whether an equation combines several ranks' values."""
        return names_axes(eqn, self.axes)

    def divide(self, size: int) -> bool:
        """Whether a dim of this size has equal slices."""
        return size > 0 and size % self.size == 0

    def local_shape(self, shape: Sequence[int], dim: Dim) -> tuple[int, ...]:
        """Return a slice's shape along `dim`, or that of the whole."""
        if isinstance(dim, Ravel):
            return (math.prod(dim.shape) // self.size,)
        return tuple(size // self.size if i == dim else size for i, size in enumerate(shape))

    def cut(self, x: jax.Array, dim: int | Ravel) -> jax.Array:
        """Return this rank's slice of a whole array."""
        if isinstance(dim, Ravel):
            return self.cut(lax.reshape(x, dim.shape), dim.dim).reshape(-1)
        return shard_registry.own_slice(x, dim, self.axes)

    def gather(self, x: jax.Array, dim: int | Ravel, shape: tuple[int, ...]) -> jax.Array:
        """Return a slice's whole array, and record it."""
        name = self.stack[0].primitive.name if self.stack else "output"
        num_bytes = math.prod(shape) * x.dtype.itemsize
        self.gathers.append(Gather(name, shape, num_bytes, self.line()))
        if isinstance(dim, Ravel):
            x = lax.reshape(x, self.local_shape(dim.shape, dim.dim))
            return self.joined(x, dim.dim).reshape(shape)
        return self.joined(x, dim)

    def line(self) -> str:
        """Return the equation's line, or empty."""
        return next(filter(None, map(source_of, self.stack)), "")

    def joined(self, x: jax.Array, dim: int) -> jax.Array:
        """Return the whole array of the ranks' slices."""
        x = lax.all_gather(
            shard_registry.checked_slice(x, self.axes), self.axes, axis=dim, tiled=True
        )
        return shard_registry.joined_slices(x, self.axes)

    def exchange(self, x: jax.Array, dim: int, other: int) -> jax.Array:
        """Return this rank's slice along `other` from those along `dim`."""
        x = shard_registry.checked_slice(x, self.axes)
        scope = step_context.innermost()
        mesh = None if scope is None else scope.mesh
        # In a loop, and for cost estimates, no token would order native calls.
        of = shards if call_order.is_in_step() else xla_shards
        [[x]] = of.all_to_all([[x]], [[(other, dim)]], self.axes, mesh=mesh)
        return shard_registry.part_of_whole(x, self.axes)


class Value:
    """An array of the whole program, and this rank's part; `dim` needs no communication."""

    def __init__(self, aval: Any, dim: Dim):
        self.shape: tuple[int, ...] = tuple(aval.shape)
        self.num_bytes: int = math.prod(self.shape) * aval.dtype.itemsize
        self.dim = dim
        self._known: dict[Dim, Any] = {}

    def at(self, dim: Dim) -> Any:
        """Return this rank's slice along `dim`, or the whole; communicate if necessary."""
        if dim not in self._known:
            self._known[dim] = self._made(dim)
        return self._known[dim]

    def cost(self, dim: Dim) -> float:
        """Estimate the bytes that `at(dim)` sends."""
        return 0 if dim in self._known else self._cost(dim)

    def _cost(self, dim: Dim) -> float:
        raise NotImplementedError

    def _made(self, dim: Dim) -> Any:
        raise NotImplementedError


class Computed(Value):
    """A computed value, whole or this rank's slice along `dim`."""

    def __init__(self, ranks: Ranks, aval: Any, x: Any, dim: Dim, number: int | None = None):
        super().__init__(aval, dim)
        self._ranks, self._number = ranks, number
        self._known[dim] = x

    def _cost(self, dim: Dim) -> float:
        if None in self._known:
            return 0
        is_exchange = isinstance(dim, int) and isinstance(self.dim, int)
        return self.num_bytes / self._ranks.size if is_exchange else self.num_bytes

    def _made(self, dim: Dim) -> Any:
        own = self.dim
        if None not in self._known and isinstance(dim, int) and isinstance(own, int):
            return self._ranks.exchange(self._known[own], own, dim)
        if dim is not None:
            return self._ranks.cut(self.at(None), dim)
        assert own is not None  # a whole value is known
        if self._number is not None:
            self._ranks.gathered_inputs.add(self._number)
        return self._ranks.gather(self._known[own], own, self.shape)


class BroadcastValue(Value):
    """Copies of a value, made only in the needed shape; `dims` are its places in them."""

    def __init__(self, ranks: Ranks, aval: Any, operand: Value, dims: Sequence[int]):
        own = operand.dim
        is_kept = isinstance(own, int) and self._keeps(aval, operand, dims, own)
        super().__init__(aval, dims[own] if isinstance(own, int) and is_kept else None)
        self._ranks, self._operand, self._dims = ranks, operand, tuple(dims)
        self._aval = aval

    @staticmethod
    def _keeps(aval: Any, operand: Value, dims: Sequence[int], dim: int) -> bool:
        return aval.shape[dims[dim]] == operand.shape[dim]

    def _dim_of_operand(self, dim: Dim) -> Dim:
        if not isinstance(dim, int) or dim not in self._dims:
            return None
        inner = self._dims.index(dim)
        return inner if self._keeps(self._aval, self._operand, self._dims, inner) else None

    def _cost(self, dim: Dim) -> float:
        return self._operand.cost(self._dim_of_operand(dim))

    def _made(self, dim: Dim) -> Any:
        if isinstance(dim, Ravel) and self._operand.shape:
            return self._ranks.cut(self.at(None), dim)
        x = self._operand.at(self._dim_of_operand(dim))
        return lax.broadcast_in_dim(x, self._ranks.local_shape(self.shape, dim), self._dims)


class Count(Value):
    """Positions along a dim, made only in the needed shape."""

    def __init__(self, ranks: Ranks, aval: Any, along: int):
        super().__init__(aval, None)
        self._ranks, self._dtype, self._along = ranks, aval.dtype, along

    def _cost(self, dim: Dim) -> float:
        return 0

    def _made(self, dim: Dim) -> Any:
        if isinstance(dim, Ravel):
            return self._ranks.cut(self.at(None), dim)
        shape = self._ranks.local_shape(self.shape, dim)
        own = lax.broadcasted_iota(self._dtype, shape, self._along)
        if dim != self._along:
            return own
        start = lax.axis_index(self._ranks.axes) * shape[self._along]
        start = lax.convert_element_type(start, self._dtype)
        return shard_registry.part_of_whole(
            lax.add(own, lax.full_like(own, 0) + start), self._ranks.axes
        )
