"""Matrices that are needed whole are computed by one rank each, their owner.

Where an optimizer multiplies matrices with themselves, as Newton and Schulz do for Muon, each rank
would need all of them whole, or send partial products. Here the matrices that are computed alike
are dealt out: an all-to-all brings each to its owner, and another one brings slices of the results
back. Source: Jordan et al. 2024, https://github.com/KellerJordan/modded-nanogpt, where each rank
computes its share of Muon's parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdp.reduction import shard_ops
from jdp.reduction.flat_program import FlatValue
from jdp.reduction.partition.deals import Deal, dealt, is_faster, out_dim, results_of_row
from jdp.reduction.partition.isomorphic_subgraphs import AlikeParts
from jdp.reduction.partition.ranks import Owned, Ranks
from jdp.reduction.partition.values import Computed


def run(partitioner: Any, alike: AlikeParts, env: dict[FlatValue, Any]) -> bool:
    """Run equal parts by their owners, into `env`; False if slices are faster."""
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
    """Each rank computes its share of the rows of alike parts.

    Args:
      partitioner: that runs the program.
      deal: how they are dealt out.
      num_parts: the number of parts.
      per_rank: the number of rows that each rank computes.
    """

    def __init__(self, partitioner: Any, deal: Deal, num_parts: int, per_rank: int):
        self._partitioner, self._deal = partitioner, deal
        self._ranks: Ranks = partitioner.ranks
        self._num_parts, self._per_rank = num_parts, per_rank
        # An operand that is not cut into rows gets a new first dim.
        self._new = 0 if deal.batch > 1 else 1

    def results(self, values: Sequence[Sequence[Any]]) -> list[list[Computed]]:
        """Return the results of each part from the values of its operands."""
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
        """Return this rank's rows of an operand, whole, from the slices of all parts."""
        deal, dim = self._deal, self._deal.dims[i]
        held = [value.at(dim) for value in column]
        if deal.batch == 1:
            held = [jnp.expand_dims(x, 0) for x in held]
        elif not column[0].shape:
            held = [jnp.full(deal.batch, x) for x in held]
        # Rows that are too few are filled up with the last one, which is sure to be a valid one.
        missing = self._per_rank * self._ranks.size - self._num_parts * deal.batch
        held += [held[-1][-1:]] * missing
        stack = lax.concatenate(held, 0)
        if dim is None:
            return shard_ops.own_slice(stack, 0, self._ranks.axes)
        return self._ranks.exchange(stack, dim + self._new, 0)

    def _row(self, stack: jax.Array, i: int, row: int) -> jax.Array:
        is_kept = self._deal.row_dims()[i] is not None
        return lax.slice_in_dim(stack, row, row + 1) if is_kept else stack[row]

    def _from_owner(self, column: Sequence[Any], aval: Any) -> list[Computed]:
        """Return the slices of a result for all parts, from this rank's rows."""
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
