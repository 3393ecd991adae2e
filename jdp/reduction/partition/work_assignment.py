"""Matrices needed whole are computed by one rank each, their owner.

For products of matrices with themselves, as in Muon's Newton-Schulz iteration, each rank would
need all matrices. Instead all-to-alls send each to its owner, and return slices.
Source: Jordan et al. 2024, https://github.com/KellerJordan/modded-nanogpt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdp.reduction import shard_registry
from jdp.reduction.flat_program import FlatValue
from jdp.reduction.partition.costs import Cost, cost_of
from jdp.reduction.partition.isomorphic_subgraphs import AlikeParts, Subprogram
from jdp.reduction.partition.values import Computed, Owned, Ranks, Ravel


class _NotARow(Exception):
    """One row of a batch needs others."""


class _BatchRows(Ranks):
    """A batch's `size` independent rows, instead of ranks."""

    def __init__(self, size: int):
        super().__init__((), size)

    @property
    def axes(self) -> tuple[str, ...]:
        # Communication and the rank's position read the axes.
        raise _NotARow

    def fresh(self) -> Ranks:
        return _BatchRows(self.size)

    def may_own(self) -> bool:
        return False

    def communicate(self, eqn: Any) -> bool:
        return False

    def bound_to_whole(self, program: Any) -> set[FlatValue]:
        return set()


class Deal(NamedTuple):
    """The assignment of isomorphic parts' matrices to ranks.

    Attributes:
      shared: positions of operands equal for all parts.
      batch: number of rows cut from the other operands; 1: not cut.
    """

    part: Subprogram
    shared: frozenset[int]
    dims: tuple[int | None, ...]
    batch: int

    def own(self) -> list[int]:
        """Return unshared operands' positions."""
        return [i for i in range(len(self.dims)) if i not in self.shared]

    def row_dims(self) -> list[int | None]:
        """Return each operand's row dim."""
        return [
            0 if self.batch > 1 and i not in self.shared and value.aval.shape else None
            for i, value in enumerate(self.part.ins)
        ]


def dealt(partitioner: Any, alike: AlikeParts, env: dict[FlatValue, Any]) -> Deal | None:
    """Return the assignment, None if all operands are shared."""
    first = alike.parts[0]
    dims = tuple(env[value].dim for value in first.ins)
    columns = zip(*(part.ins for part in alike.parts), strict=True)
    # A single part's slices are those of stacked matrices.
    is_single = len(alike.parts) == 1
    shared = frozenset(
        i
        for i, column in enumerate(columns)
        if column[0].constant is not None or (dims[i] is None if is_single else len({*column}) == 1)
    )
    if any(isinstance(dim, Ravel) for dim in dims) or len(shared) == len(dims):
        return None
    deal = Deal(first, shared, dims, 1)
    sizes = {first.ins[i].aval.shape[0] for i in deal.own() if first.ins[i].aval.shape}
    if len(sizes) == 1 and 0 not in (dims[i] for i in deal.own()) and (batch := sizes.pop()) > 1:
        cut = deal._replace(batch=batch)
        try:
            _traced_row(partitioner, cut)
        except _NotARow:
            return deal
        return cut
    return deal


def results_of_row(partitioner: Any, deal: Deal, operands: Sequence[Any]) -> list[Any]:
    """Compute one matrix."""
    rows = _BatchRows(deal.batch)
    env = {
        value: Computed(rows, value.aval, x, dim)
        for value, x, dim in zip(deal.part.ins, operands, deal.row_dims(), strict=True)
    }
    type(partitioner)(rows).run(deal.part.operations, env)
    outs = [env[value] for value in deal.part.outs]
    dim = 0 if deal.batch > 1 else None
    if any(out.dim != dim for out in outs):
        raise _NotARow
    return [out.at(dim) for out in outs]


def _traced_row(partitioner: Any, deal: Deal) -> Any:
    local_shape = _BatchRows(deal.batch).local_shape
    shapes = [
        jax.ShapeDtypeStruct(local_shape(value.aval.shape, dim), value.aval.dtype)
        for value, dim in zip(deal.part.ins, deal.row_dims(), strict=True)
    ]
    return jax.make_jaxpr(lambda *row: results_of_row(partitioner, deal, row))(*shapes)


def is_faster(partitioner: Any, deal: Deal, num_parts: int, per_rank: int) -> bool:
    """Whether owners are faster than slices, by `Cost.time`."""
    ranks: Ranks = partitioner.ranks
    part, size = deal.part, ranks.size

    def on_slices(*held: jax.Array) -> list[Any]:
        own = ranks.fresh()
        env = {
            value: Computed(own, value.aval, x, dim)
            for value, x, dim in zip(part.ins, held, deal.dims, strict=True)
        }
        type(partitioner)(own).run(part.operations, env)
        return [env[value].at(env[value].dim) for value in part.outs]

    shapes = [
        jax.ShapeDtypeStruct(ranks.local_shape(value.aval.shape, dim), value.aval.dtype)
        for value, dim in zip(part.ins, deal.dims, strict=True)
    ]
    slices = cost_of(jax.make_jaxpr(on_slices)(*shapes), size).times(num_parts)
    row = cost_of(_traced_row(partitioner, deal), size)
    # Bytes that leave their rank.
    moved = [part.ins[i] for i in deal.own() if deal.dims[i] is not None]
    sent = sum(value.num_bytes() for value in moved) / size
    for value in part.outs:
        is_whole = out_dim(deal, value.aval, ranks) is None
        sent += value.num_bytes() / (1 if is_whole else size)
    padding = per_rank * size / (num_parts * deal.batch)
    sent *= num_parts * padding * (size - 1) / size
    return row.times(per_rank).and_(Cost(0, sent)).time() < slices.time()


def out_dim(deal: Deal, aval: Any, ranks: Ranks) -> int | None:
    """Return a result's sliced dim, mostly an operand's."""
    for i in deal.own():
        if deal.dims[i] is not None and deal.part.ins[i].aval.shape == aval.shape:
            return deal.dims[i]
    first = 1 if deal.batch > 1 else 0
    dims = [i for i in range(first, len(aval.shape)) if ranks.divide(aval.shape[i])]
    return max(dims, key=lambda i: aval.shape[i], default=None)


def run(partitioner: Any, alike: AlikeParts, env: dict[FlatValue, Any]) -> bool:
    """Run parts by their owners into `env`; False if slices are faster."""
    deal = dealt(partitioner, alike, env)
    if deal is None:
        return False
    count = len(alike.parts) * deal.batch
    per_rank = -(-count // partitioner.ranks.size)
    if count < 2 or not is_faster(partitioner, deal, len(alike.parts), per_rank):
        return False
    own = _Owners(partitioner, deal, len(alike.parts), per_rank)
    results = own.results([[env[value] for value in part.ins] for part in alike.parts])
    for part, outs in zip(alike.parts, results, strict=True):
        env.update(zip(part.outs, outs, strict=True))
    return True


class _Owners:
    def __init__(self, partitioner: Any, deal: Deal, num_parts: int, per_rank: int):
        self._partitioner, self._deal = partitioner, deal
        self._ranks: Ranks = partitioner.ranks
        self._num_parts, self._per_rank = num_parts, per_rank
        # An uncut operand gets a new first dim.
        self._new = 0 if deal.batch > 1 else 1

    def results(self, values: Sequence[Sequence[Any]]) -> list[list[Computed]]:
        deal = self._deal
        self._ranks.stack = (deal.part.operations[0].eqn, *deal.part.operations[0].calls[::-1])
        self._record()
        stacks = {i: self._to_owner([value[i] for value in values], i) for i in deal.own()}
        fixed = {i: values[0][i].at(None) for i in deal.shared}
        rows = []
        for row in range(self._per_rank):
            own = {i: self._row(stack, i, row) for i, stack in stacks.items()}
            operands = {**fixed, **own}
            outs = results_of_row(
                self._partitioner, deal, [operands[i] for i in range(len(operands))]
            )
            rows.append(outs)
        columns = [
            self._from_owner(column, value.aval)
            for column, value in zip(zip(*rows, strict=True), deal.part.outs, strict=True)
        ]
        return [list(each) for each in zip(*columns, strict=True)]

    def _record(self) -> None:
        deal, line = self._deal, self._ranks.line()
        largest = max((deal.part.ins[i].aval for i in deal.own()), key=lambda aval: aval.size)
        count = self._num_parts * deal.batch
        shape = largest.shape[1:] if deal.batch > 1 else largest.shape
        self._ranks.owned.append(Owned(count, self._per_rank, shape, line))

    def _to_owner(self, column: Sequence[Any], i: int) -> jax.Array:
        deal, dim = self._deal, self._deal.dims[i]
        held = [value.at(dim) for value in column]
        if deal.batch == 1:
            held = [jnp.expand_dims(x, 0) for x in held]
        elif not column[0].shape:
            held = [jnp.full(deal.batch, x) for x in held]
        # Pad with a valid row.
        missing = self._per_rank * self._ranks.size - self._num_parts * deal.batch
        held += [held[-1][-1:]] * missing
        stack = lax.concatenate(held, 0)
        if dim is None:
            return shard_registry.own_slice(stack, 0, self._ranks.axes)
        return self._ranks.exchange(stack, dim + self._new, 0)

    def _row(self, stack: jax.Array, i: int, row: int) -> jax.Array:
        is_kept = self._deal.row_dims()[i] is not None
        return lax.slice_in_dim(stack, row, row + 1) if is_kept else stack[row]

    def _from_owner(self, column: Sequence[Any], aval: Any) -> list[Computed]:
        deal, dim = self._deal, out_dim(self._deal, aval, self._ranks)
        if deal.batch == 1:
            column = [jnp.expand_dims(x, 0) for x in column]
        stack = lax.concatenate(list(column), 0)
        if dim is None:
            rows = self._ranks.joined(stack, 0)
        else:
            rows = self._ranks.exchange(stack, 0, dim + self._new)
        found = []
        for start in range(0, self._num_parts * deal.batch, deal.batch):
            x = lax.slice_in_dim(rows, start, start + deal.batch)
            x = x if deal.batch > 1 else lax.squeeze(x, (0,))
            found.append(Computed(self._ranks, aval, x, dim))
        return found
