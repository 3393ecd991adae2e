"""How matrices are dealt out to the ranks that compute them, and whether that is faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jdp.reduction.flat_program import FlatValue
from jdp.reduction.partition.costs import Cost, cost_of
from jdp.reduction.partition.isomorphic_subgraphs import AlikeParts, Subprogram
from jdp.reduction.partition.ranks import Ranks, Ravel
from jdp.reduction.partition.values import Computed


class _NotARow(Exception):
    """Raised where one row of a batch needs others."""


class _BatchRows(Ranks):
    """The rows of a batch, in the place of ranks: none needs another one.

    Args:
      size: the number of rows.
    """

    def __init__(self, size: int):
        super().__init__((), size)

    @property
    def axes(self) -> tuple[str, ...]:
        # An operation that sends, or depends on the position of the rank, asks for the axes.
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
    """How the matrices of alike parts are dealt out.

    Attributes:
      part: the first of them.
      shared: positions of the operands that are the same for all parts.
      dims: for each operand the dim along which it is sliced.
      batch: into how many rows along their first dim the other operands are cut, each of which is
        computed by itself. With 1 they are not cut.
    """

    part: Subprogram
    shared: frozenset[int]
    dims: tuple[int | None, ...]
    batch: int

    def own(self) -> list[int]:
        """Return the positions of the operands that are not shared."""
        return [i for i in range(len(self.dims)) if i not in self.shared]

    def row_dims(self) -> list[int | None]:
        """Return the dim of the rows of each operand, None if it is not cut into rows."""
        return [
            0 if self.batch > 1 and i not in self.shared and value.aval.shape else None
            for i, value in enumerate(self.part.ins)
        ]


def dealt(partitioner: Any, alike: AlikeParts, env: dict[FlatValue, Any]) -> Deal | None:
    """Return how to deal out alike parts, None if they read nothing of their own."""
    first = alike.parts[0]
    dims = tuple(env[value].dim for value in first.ins)
    columns = zip(*(part.ins for part in alike.parts), strict=True)
    # The slices of a single part are those of a stack of matrices.
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
    """Whether owners take less time than slices, as `Cost.time` estimates it."""
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
    # Bytes that all ranks send together, without those that stay on their rank.
    moved = [part.ins[i] for i in deal.own() if deal.dims[i] is not None]
    sent = sum(value.num_bytes() for value in moved) / size
    for value in part.outs:
        is_whole = out_dim(deal, value.aval, ranks) is None
        sent += value.num_bytes() / (1 if is_whole else size)
    padding = per_rank * size / (num_parts * deal.batch)
    sent *= num_parts * padding * (size - 1) / size
    return row.times(per_rank).and_(Cost(0, sent)).time() < slices.time()


def out_dim(deal: Deal, aval: Any, ranks: Ranks) -> int | None:
    """Return the dim along which a result is sliced: that of an operand of its shape, if any."""
    for i in deal.own():
        if deal.dims[i] is not None and deal.part.ins[i].aval.shape == aval.shape:
            return deal.dims[i]
    first = 1 if deal.batch > 1 else 0
    dims = [i for i in range(first, len(aval.shape)) if ranks.divide(aval.shape[i])]
    return max(dims, key=lambda i: aval.shape[i], default=None)
