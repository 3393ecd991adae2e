"""Lookup in a table that is split over ranks, and its transpose, as primitives."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir

from jdp.collectives import row_exchange

_NO_SECOND_TRANSPOSE = (
    "the gradient of jdp.sharded_embedding is differentiated in reverse mode, for which there is "
    "no rule. Write the outer derivative in forward mode (jax.jvp, jax.jacfwd), or look the rows "
    "up in a table that every rank holds."
)


def take_rows(part: jax.Array, ids: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    """Return rows of a table that is split over the ranks of `axes`; linear in the table.

    Its transpose is `add_rows`.

    Args:
      part: this rank's part, `[rows / n, ...]`, or `[rows, ..., size / n, ...]` for dim > 0.
      ids: int, any shape, 0 <= ids < rows; they may differ between ranks.
    """
    return take_p.bind(part, ids, dim=dim, axes=axes, num_ranks=lax.axis_size(axes))


def add_rows(
    rows: jax.Array, ids: jax.Array, num_rows: int, dim: int, axes: tuple[str, ...]
) -> jax.Array:
    """Return this rank's part of a table that is the sum of the rows of all ranks, 0 elsewhere.

    Args:
      rows: `[*ids.shape, ...]`, whole rows of this rank.
      ids: int, any shape, 0 <= ids < num_rows: where to add each row.
    """
    split: dict[str, Any] = {"dim": dim, "axes": axes, "num_ranks": lax.axis_size(axes)}
    return add_p.bind(rows, ids, num_rows=num_rows, **split)


# These are primitives because JAX cannot transpose a loop with collectives. Under `vmap` the ids
# of a whole batch are one lookup, where JAX would batch the loop.
take_p = jax.extend.core.Primitive("jdp_take_rows")
add_p = jax.extend.core.Primitive("jdp_add_rows")


def _resized(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


@take_p.def_abstract_eval
def taken_type(part: Any, ids: Any, *, dim: int, axes: tuple[str, ...], num_ranks: int) -> Any:
    """Return the type of the rows of a lookup.

    Args:
      part: `[...]`, this rank's part of the table.
    """
    whole = _resized(part.shape, dim, part.shape[dim] * num_ranks)
    return jax.core.ShapedArray((*ids.shape, *whole[1:]), part.dtype)


@add_p.def_abstract_eval
def added_type(
    rows: Any, ids: Any, *, num_rows: int, dim: int, axes: tuple[str, ...], num_ranks: int
) -> Any:
    """Return the type of this rank's part of a sum of rows.

    Args:
      rows: `[*ids.shape, ...]`, a row to add for each id.
    """
    whole = (num_rows, *rows.shape[ids.ndim :])
    return jax.core.ShapedArray(_resized(whole, dim, whole[dim] // num_ranks), rows.dtype)


def _jvp(primitive: Any, primals: tuple, tangents: tuple, **params: Any) -> tuple[Any, Any]:
    out = primitive.bind(*primals, **params)
    if type(tangents[0]) is ad.Zero:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, primitive.bind(tangents[0], primals[1], **params)


def _take_transpose(cotangent: Any, part: Any, ids: Any, *, dim: int, **split: Any) -> list[Any]:
    aval = part.aval
    if type(cotangent) is ad.Zero:
        return [ad.Zero(aval), None]
    num_rows = aval.shape[0] * (split["num_ranks"] if dim == 0 else 1)
    return [add_p.bind(cotangent, ids, num_rows=num_rows, dim=dim, **split), None]


def _add_transpose(cotangent: Any, rows: Any, ids: Any, **params: Any) -> list[Any]:
    raise ValueError(_NO_SECOND_TRANSPOSE)


def _batch(primitive: Any, args: tuple, dims: tuple, *, dim: int, **params: Any) -> tuple[Any, Any]:
    (x, ids), (x_dim, ids_dim) = args, dims
    is_take = primitive is take_p
    if ids_dim is None:  # the batch dim becomes the first dim of the rows
        x = jnp.moveaxis(x, x_dim, 1 if is_take else ids.ndim)
        out = primitive.bind(x, ids, dim=dim + (dim > 0), **params)
        return out, ids.ndim if is_take else 1
    ids = jnp.moveaxis(ids, ids_dim, 0)
    if is_take and x_dim is None:
        return primitive.bind(x, ids, dim=dim, **params), 0
    each = [x] * len(ids) if x_dim is None else jnp.moveaxis(x, x_dim, 0)
    outs = [primitive.bind(y, i, dim=dim, **params) for y, i in zip(each, ids, strict=True)]
    return jnp.stack(outs), 0


def _run(
    exchange: Callable, x: Any, ids: Any, *, axes: tuple[str, ...], num_ranks: int, **params: Any
) -> jax.Array:
    calls = row_exchange.XlaCollectives(axes, num_ranks)
    return exchange(calls, None, x, ids, **params)[1]


for _primitive, _exchange, _transpose in (
    (take_p, row_exchange.take, _take_transpose),
    (add_p, row_exchange.add, _add_transpose),
):
    ad.primitive_jvps[_primitive] = functools.partial(_jvp, _primitive)
    ad.primitive_transposes[_primitive] = _transpose
    batching.primitive_batchers[_primitive] = functools.partial(_batch, _primitive)
    _by_xla = functools.partial(_run, _exchange)
    mlir.register_lowering(_primitive, mlir.lower_fun(_by_xla, multiple_results=False))
