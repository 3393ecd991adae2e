"""Values of a partitioned program: each is whole on every rank, or a slice on each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax import lax

from jdp.reduction import shard_ops
from jdp.reduction.partition.ranks import Dim, Ranks, Ravel


class Value:
    """An array of the whole program, and this rank's part of it.

    Args:
      aval: shape and dtype of the whole array.
      dim: along which it is at hand without communication, None for the whole.
    """

    def __init__(self, aval: Any, dim: Dim):
        self.shape: tuple[int, ...] = tuple(aval.shape)
        self.num_bytes: int = math.prod(self.shape) * aval.dtype.itemsize
        self.dim = dim
        self._known: dict[Dim, Any] = {}

    def at(self, dim: Dim) -> Any:
        """Return this rank's slice along `dim`, or the whole array; communicate if necessary."""
        if dim not in self._known:
            self._known[dim] = self._made(dim)
        return self._known[dim]

    def cost(self, dim: Dim) -> float:
        """Estimate the bytes that `at(dim)` gathers or exchanges."""
        return 0 if dim in self._known else self._cost(dim)

    def _cost(self, dim: Dim) -> float:
        raise NotImplementedError

    def _made(self, dim: Dim) -> Any:
        raise NotImplementedError


class Computed(Value):
    """A value that was computed, whole or as a slice along `dim`.

    Args:
      ranks: of the program.
      aval: shape and dtype of the whole array.
      x: the array, or this rank's slice along `dim`.
      dim: None for the whole.
      number: of the input that it is, None for others.
    """

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
    """Copies of a value along new dims, made only in the shape that is needed.

    A slice of copies costs no more than the value itself, however large the copies are.

    Args:
      ranks: of the program.
      aval: shape and dtype of the copies.
      operand: the value.
      dims: for each dim of `operand` its place in the copies.
    """

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
    """The positions along a dim (`lax.iota`), made only in the shape that is needed."""

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
        return shard_ops.part_of_whole(
            lax.add(own, lax.full_like(own, 0) + start), self._ranks.axes
        )
