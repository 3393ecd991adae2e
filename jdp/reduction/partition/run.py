"""Run a function of whole arrays on this rank's slices of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdp import axis
from jdp.reduction.partition.partitioner import Partitioner
from jdp.reduction.partition.ranks import Gather, Owned, Ranks
from jdp.reduction.partition.values import Computed


class Piece(NamedTuple):
    """This rank's part of an array.

    Attributes:
      value: this rank's slice, or the whole array.
      dim: the dim along which the ranks' slices, of equal size and in the order of
        `lax.axis_index`, make up the array; None if `value` is the whole array, with equal bits on
        every rank.
    """

    value: jax.Array
    dim: int | None


class Partitioned(NamedTuple):
    """The results of a function that ran on slices, and how.

    Attributes:
      pieces: this rank's part of each result.
      gathers: the values that were gathered whole, in order.
      owned: what one rank each computed for the others.
    """

    pieces: list[Piece]
    gathers: list[Gather]
    owned: list[Owned]


def partitioned(
    function: Callable[..., Sequence[jax.Array]],
    args: Sequence[Piece],
    axes: tuple[str, ...],
    want: Sequence[int | None] | Callable[[list[jax.ShapeDtypeStruct]], Sequence[int | None]],
) -> Partitioned:
    """Run a function of whole arrays on the slices of each rank, with the same result.

    The function is traced for whole arrays, and each operation is run on slices if possible:
    elementwise operations as they are, a reduction over the sliced dim with a collective. An array
    that an operation needs whole is gathered once and reported. Matrices that are multiplied in the
    same way are computed by one rank each where that is estimated to be faster. Slices along
    another dim than needed are exchanged (all-to-all), which is not reported. The method is that of
    GSPMD (Xu et al. 2021, arXiv:2105.04663) for one sliced dim of each array. Custom derivatives
    (`jax.custom_jvp`) of the function are lost.

    >>> import jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,),
    ...                      devices=jax.devices("cpu")[:4])
    >>> def normalize(x):
    ...     return [x / (x**2).sum() ** 0.5]
    >>> def on_rank(rows):
    ...     (out,), gathers, owned = partitioned(normalize, [Piece(rows, 0)], ("data",), [0])
    ...     assert not gathers and not owned
    ...     return out.value
    >>> run = jax.shard_map(on_rank, mesh=mesh, in_specs=P("data"), out_specs=P("data"),
    ...                     check_vma=False)
    >>> np.asarray(jax.jit(run)(np.full(16, 3.0, np.float32)))[:4]
    array([0.25, 0.25, 0.25, 0.25], dtype=float32)
    """
    size = axis.size(axes)
    if size > 1 and axis.is_typed(axes):
        raise ValueError(
            f"the shard_map over {axes} types its values (check_vma=True), but slices and whole "
            "arrays are of one type here. Write jax.shard_map(..., check_vma=False)."
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
    outs = Partitioner(ranks).outputs(program, values)
    pieces = [
        Piece(_as_array(out.at(None if is_alone else dim)), dim)
        for out, dim in zip(outs, dims, strict=True)
    ]
    return Partitioned(pieces, ranks.gathers, ranks.owned)


def _as_array(x: Any) -> jax.Array:
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _whole(piece: Piece, i: int, ranks: Ranks) -> jax.ShapeDtypeStruct:
    shape, dim = piece.value.shape, piece.dim
    if dim is not None and not 0 <= dim < len(shape):
        raise ValueError(
            f"argument {i} is said to be sliced along dim {dim}, but its slice has {len(shape)} "
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
                f"result {i} of shape {shape.shape} is wanted in {ranks.size} equal slices along "
                f"dim {dim}. Write a dim whose size is a multiple of {ranks.size}, or None for the "
                "whole."
            )
