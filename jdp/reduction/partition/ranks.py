"""The ranks of a partitioned program, and the collectives between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from jdp.analysis.source_lines import source
from jdp.collectives import call_order, shards, xla_shards
from jdp.reduction import shard_ops, step_context
from jdp.reduction.flat_program import FlatProgram, FlatValue
from jdp.reduction.partition.rank_data import bound_to_whole, names_axes

# A `while` does not say how often it runs: so often, where its rounds cost something.
ROUNDS_OF_WHILE = 10


class Ravel(NamedTuple):
    """How a vector is distributed that came from an array by a reshape: each rank has its slice.

    Its elements are in another order than those of slices of the vector. Sums and elementwise
    operations do not depend on the order.

    Attributes:
      shape: of the array.
      dim: along which the array is sliced.
    """

    shape: tuple[int, ...]
    dim: int


# How a value is distributed: along which dim it is sliced, None if it is whole.
Dim = int | Ravel | None


class Gather(NamedTuple):
    """A value that was gathered whole on every rank.

    Attributes:
      primitive: of the equation that needs the whole value; "output" where an output is whole.
      shape: of the whole value.
      num_bytes: of the whole value.
      line: of the author's program, such as "train.py:41"; empty if it is not known.
    """

    primitive: str
    shape: tuple[int, ...]
    num_bytes: int
    line: str


class Owned(NamedTuple):
    """Matrices that were computed by one rank each.

    Attributes:
      count: the number of matrices.
      count_of_rank: how many of them one rank computes, at most.
      shape: of one of them.
      line: of the author's program, as in `Gather`.
    """

    count: int
    count_of_rank: int
    shape: tuple[int, ...]
    line: str


class Ranks:
    """The ranks of one program, and a record of the values gathered from them.

    Args:
      axes: names of the mesh axes.
      size: the number of ranks.
    """

    def __init__(self, axes: tuple[str, ...], size: int):
        self._axes, self.size = axes, size
        self.gathers: list[Gather] = []
        self.owned: list[Owned] = []
        # The inputs that were gathered, by the number that `Computed` was given.
        self.gathered_inputs: set[int] = set()
        # The equation that is run and those around it, innermost first; empty for the outputs.
        self.stack: tuple[Any, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the mesh axes."""
        return self._axes

    def fresh(self) -> Ranks:
        """Return the same ranks with a record of their own."""
        return Ranks(self.axes, self.size)

    def may_own(self) -> bool:
        """Whether single ranks may compute for the others."""
        return self.size > 1

    def bound_to_whole(self, program: FlatProgram) -> set[FlatValue]:
        """Return the results of a program that must be computed from whole arrays."""
        return bound_to_whole(program, self.axes)

    def communicate(self, eqn: Any) -> bool:
        """Whether an equation combines values of several ranks."""
        return names_axes(eqn, self.axes)

    def divide(self, size: int) -> bool:
        """Whether a dim of this size has equal slices."""
        return size > 0 and size % self.size == 0

    def local_shape(self, shape: Sequence[int], dim: Dim) -> tuple[int, ...]:
        """Return the shape of a slice along `dim`; of the whole if it is None."""
        if isinstance(dim, Ravel):
            return (math.prod(dim.shape) // self.size,)
        return tuple(size // self.size if i == dim else size for i, size in enumerate(shape))

    def cut(self, x: jax.Array, dim: int | Ravel) -> jax.Array:
        """Return this rank's slice of a whole array."""
        if isinstance(dim, Ravel):
            return self.cut(lax.reshape(x, dim.shape), dim.dim).reshape(-1)
        return shard_ops.own_slice(x, dim, self.axes)

    def gather(self, x: jax.Array, dim: int | Ravel, shape: tuple[int, ...]) -> jax.Array:
        """Return the whole array of a slice along `dim`, and record it."""
        name = self.stack[0].primitive.name if self.stack else "output"
        num_bytes = math.prod(shape) * x.dtype.itemsize
        self.gathers.append(Gather(name, shape, num_bytes, self.line()))
        if isinstance(dim, Ravel):
            x = lax.reshape(x, self.local_shape(dim.shape, dim.dim))
            return self.joined(x, dim.dim).reshape(shape)
        return self.joined(x, dim)

    def line(self) -> str:
        """Return the line of the author's program that the equation stands in, if it is known."""
        return next(filter(None, map(source, self.stack)), "")

    def joined(self, x: jax.Array, dim: int) -> jax.Array:
        """Return the whole array of the ranks' slices along `dim`."""
        x = lax.all_gather(shard_ops.checked(x, self.axes), self.axes, axis=dim, tiled=True)
        return shard_ops.joined(x, self.axes)

    def exchange(self, x: jax.Array, dim: int, other: int) -> jax.Array:
        """Return this rank's slice along `other` from the ranks' slices along `dim`."""
        x = shard_ops.checked(x, self.axes)
        scope = step_context.innermost()
        mesh = None if scope is None else scope.mesh
        # In a loop, and where costs are estimated, no token of the step would order native calls.
        of = shards if call_order.is_in_step() else xla_shards
        [[x]] = of.all_to_all([[x]], [[(other, dim)]], self.axes, mesh=mesh)
        return shard_ops.part_of_whole(x, self.axes)
