"""Parts of values that every rank has the same: one slice on each rank.

The proof sees a slice at the position of a rank as a value that differs from rank to rank. So the
slice is a primitive here, whose result has the class of its operand; and parts that the ranks put
together are marked where they must be such slices.
"""

from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jdp.analysis.marks import MEAN, PART, SHARD, WHOLE, mark


def own_slice(whole: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    """Return this rank's slice along `dim` of an array that is the same on every rank."""
    return own_slice_p.bind(whole, dim=dim, axes=tuple(axes), size=lax.axis_size(axes))


def part_of_whole(part: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return this rank's part of a value, marked as one because of the way it was made."""
    return mark(part, kind=SHARD, path="", axes=tuple(axes))


def checked(part: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return this rank's part of a value; a step is refused if it may not be a part of one."""
    return mark(part, kind=PART, path="", axes=tuple(axes))


def joined(whole: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return the value that was gathered from checked parts."""
    return mark(whole, kind=WHOLE, path="", axes=tuple(axes))


def combined(total: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return the sum over ranks of sums over checked parts: the sum of the whole value once."""
    return mark(total, kind=MEAN, path="", axes=tuple(axes))


# A primitive: the position of the slice depends on the rank, and the proof would take the slice of
# a uniform value for a varying one.
own_slice_p = Primitive("jdp_own_slice")


def _slice(x: jax.Array, *, dim: int, axes: tuple[str, ...], size: int) -> jax.Array:
    length = x.shape[dim] // size
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * length, length, dim)


@own_slice_p.def_abstract_eval
def _sliced_type(x: Any, *, dim: int, axes: tuple[str, ...], size: int) -> Any:
    shape = (*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :])
    return jax.core.ShapedArray(shape, x.dtype)


def _batch(args: tuple, dims: tuple, *, dim: int, **params: Any) -> tuple[Any, int]:
    (x,), (batched,) = args, dims
    moved = dim + 1 if batched <= dim else dim
    return own_slice_p.bind(x, dim=moved, **params), batched


def _transpose(cotangent: Any, x: Any, *, dim: int, axes: tuple[str, ...], size: int) -> list[Any]:
    # A rank's cotangent is that of its own loss, and their mean is that of the step. All slices
    # together are the value once, but every rank has the whole value: the mean is 1 / n of the
    # joined cotangents.
    return [lax.all_gather(cotangent, axes, axis=dim, tiled=True) / size]


ad.deflinear2(own_slice_p, _transpose)
batching.primitive_batchers[own_slice_p] = _batch
mlir.register_lowering(own_slice_p, mlir.lower_fun(_slice, multiple_results=False))
