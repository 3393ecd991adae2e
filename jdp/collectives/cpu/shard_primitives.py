"""The JAX primitives of reduce-scatter, all-gather and all-to-all in compiled code.

The first two are mutual transposes. That of an all-to-all has the dims of each leaf swapped.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir

from jdp import axis
from jdp.collectives import call_order
from jdp.collectives.cpu import dead_results
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.collectives.cpu.lowering import lowered
from jdp.collectives.cpu.operands import of_one_row
from jdp.collectives.xla import scaled

# (rank, group, scale, token, *leaves) -> (token, *leaves), with the parameters
#   dims: for each leaf the dim along which it is split, None for a leaf of a reduce-scatter that
#     stays whole; of an all-to-all a pair of it and of the dim along which the slices that arrive
#     are joined,
#   overwrites: of an all-gather, for each leaf whether its result takes the memory of an operand
#     that follows the leaves; the value of that operand is not used,
#   axes, num_ranks, number, communicator, beside_xla: as for the all-reduce.
# In a typed shard_map the results vary, as those of `lax.all_gather` do, but for whole sums of a
# reduce-scatter. The scale of an all-gather and of an all-to-all is 1.
reduce_scatter_p = jax.extend.core.Primitive(cpu_runtime.REDUCE_SCATTER)
all_gather_p = jax.extend.core.Primitive(cpu_runtime.ALL_GATHER)
all_to_all_p = jax.extend.core.Primitive(cpu_runtime.ALL_TO_ALL)
_NUM_BEFORE = call_order.TOKEN + 1
_ONE = np.float32(1)
_WHOLE = -1  # in compiled code, the dim of a leaf that is not split


def _split_and_joined(primitive: Any, dim: Any) -> tuple[int | None, int | None]:
    """Return the dims that get smaller and larger by the number of ranks."""
    if primitive is all_to_all_p:
        return dim
    return (None, dim) if primitive is all_gather_p else (dim, None)


def _typed(
    primitive: Any, rank: Any, group: Any, scale: Any, token: Any, *leaves: Any,
    dims: tuple[Any, ...], num_ranks: int, **params: Any,
) -> list[Any]:  # fmt: skip
    resized = []
    for x, dim in zip(leaves[: len(dims)], dims, strict=True):
        if dim is None:  # equal on every rank, as the result of an all-reduce
            resized.append(jax.core.ShapedArray(x.shape, x.dtype))
            continue
        shape = list(x.shape)
        split, joined = _split_and_joined(primitive, dim)
        if split is not None:
            shape[split] //= num_ranks
        if joined is not None:
            shape[joined] *= num_ranks
        resized.append(x.update(shape=tuple(shape)))
    return [jax.core.ShapedArray(token.shape, token.dtype), *resized]


def _lower(
    name: str, context: Any, *args: Any, axes: Any, dims: tuple[Any, ...],
    overwrites: tuple[bool, ...] = (), **params: Any,
) -> Any:  # fmt: skip
    # Only in place where leaves were put into arrays of the results' size.
    places = [call_order.TOKEN, *(_NUM_BEFORE + i for i, flag in enumerate(overwrites) if flag)]
    if len(places) > 1:
        context, args = _put_into_wholes(context, args, dims, overwrites)
    flat = np.array([_WHOLE if dim is None else dim for dim in dims], np.int64).reshape(-1)
    return lowered(name, context, args, in_place=places, dims=flat, **params)


def _put_into_wholes(
    context: Any, args: Sequence[Any], dims: tuple[int, ...], overwrites: tuple[bool, ...]
) -> tuple[Any, tuple[Any, ...]]:
    """Return the operands of a call in which some leaves are slices of the arrays they overwrite.

    XLA fuses what computes the leaf with what writes it into the array. The barrier keeps that
    apart from a copy that XLA puts in front of each call, and later removes.
    """

    def operands(*args: jax.Array) -> list[jax.Array]:
        rank, leaves, wholes = args[0], args[_NUM_BEFORE:][: len(dims)], args[_NUM_BEFORE:]
        left = iter(wholes[len(dims) :])
        put = [
            lax.dynamic_update_slice_in_dim(next(left), x, rank * x.shape[dim], dim) if flag else x
            for x, dim, flag in zip(leaves, dims, overwrites, strict=True)
        ]
        return [*args[:_NUM_BEFORE], *lax.optimization_barrier(put)]

    types = jax.eval_shape(
        operands, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in context.avals_in)
    )
    types = [jax.core.ShapedArray(x.shape, x.dtype) for x in types]
    within = context.replace(primitive=None, avals_out=types)
    args = mlir.lower_fun(operands, multiple_results=True)(within, *args)
    return context.replace(avals_in=types), tuple(args)


def _jvp(
    primitive: Any, primals: tuple, tangents: tuple, *, number: int, **params: Any
) -> tuple[Any, Any]:
    rank, group, scale, _, *_ = primals
    token, *results = primitive.bind(*primals, number=number, **params)
    count = len(params["dims"])
    slopes = [ad.instantiate_zeros(slope) for slope in tangents[_NUM_BEFORE:][:count]]
    slopes = axis.as_varying(slopes, params["axes"])
    params |= _nothing_overwritten(params)
    number = call_order.derived(number, "tangent")
    _, *slopes = primitive.bind(rank, group, scale, token, *slopes, number=number, **params)
    return [token, *results], [ad.Zero(jax.typeof(token).to_tangent_aval()), *slopes]


def _nothing_overwritten(params: dict[str, Any]) -> dict[str, Any]:
    flags = params.get("overwrites")
    return {} if flags is None else {"overwrites": (False,) * len(flags)}


def _transpose(
    other: Any, cotangents: Sequence[Any], rank: Any, group: Any, scale: Any, token: Any,
    *leaves: Any, number: int, dims: tuple[Any, ...], overwrites: Any = None, **params: Any,
) -> list[Any]:  # fmt: skip
    leaves, wholes = leaves[: len(dims)], leaves[len(dims) :]
    given = axis.as_varying([ad.instantiate_zeros(ct) for ct in cotangents[1:]], params["axes"])
    whole = [i for i, dim in enumerate(dims) if dim is None]
    cut = [i for i, dim in enumerate(dims) if dim is not None]
    found = {i: given[i] for i in whole}
    if whole and not axis.is_typed(params["axes"]):  # as the cotangents of an all-reduce
        token, *sums = reduce_scatter_p.bind(
            rank, group, _ONE, token, *found.values(), dims=(None,) * len(whole),
            number=call_order.derived(number, "cotangent of whole"), **params,
        )  # fmt: skip
        found = dict(zip(whole, sums, strict=True))
    if cut:
        of_cut = tuple(dims[i] for i in cut)
        if other is all_gather_p:
            params["overwrites"] = (False,) * len(cut)
        if other is all_to_all_p:
            of_cut = tuple((joined, split) for split, joined in of_cut)
        _, *results = other.bind(
            rank, group, _ONE, token, *(given[i] for i in cut), dims=of_cut,
            number=call_order.derived(number, "cotangent"), **params,
        )  # fmt: skip
        found |= dict(zip(cut, results, strict=True))
    asked = map(ad.is_undefined_primal, leaves)
    own = [scaled(found[i], scale) if is_asked else None for i, is_asked in enumerate(asked)]
    return [None] * _NUM_BEFORE + own + [None] * len(wholes)


def _batch(
    primitive: Any, of_rows: Callable, axis_data: Any, args: Sequence[Any], places: Sequence[Any],
    *, axes: tuple[str, ...], dims: tuple[Any, ...], num_ranks: int, **params: Any,
) -> tuple[Any, Any]:  # fmt: skip
    before, leaves = of_one_row(args, places), args[_NUM_BEFORE:][: len(dims)]
    places, params = places[: _NUM_BEFORE + len(dims)], params | _nothing_overwritten(params)
    leaves = [
        x if place is None else jnp.moveaxis(x, place, 0)
        for x, place in zip(leaves, places[_NUM_BEFORE:], strict=True)
    ]
    is_batched = [place is not None for place in places[_NUM_BEFORE:]]
    if axis_data.name in axes:  # vmap gives its rows the name of the axis
        if axes != (axis_data.name,):
            raise NotImplementedError(
                f"{primitive.name} over {axes}, of which a vmap has taken the name "
                f"{axis_data.name!r}. Give the axis of the vmap a name of its own."
            )
        rows = [
            x if flag else jnp.broadcast_to(x, (num_ranks, *x.shape))
            for x, flag in zip(leaves, is_batched, strict=True)
        ]
        results = [of_rows(x, dim, before[2]) for x, dim in zip(rows, dims, strict=True)]
        return [before[-1], *results], [None, *[0] * len(results)]
    dims = tuple(
        jax.tree.map(lambda i, flag=flag: i + flag, dim)
        for dim, flag in zip(dims, is_batched, strict=True)
    )
    out = primitive.bind(*before, *leaves, axes=axes, dims=dims, num_ranks=num_ranks, **params)
    return out, [None, *(0 if flag else None for flag in is_batched)]


def _scatter_rows(rows: jax.Array, dim: int | None, scale: Any) -> jax.Array:
    """Return the slice of the sum that each row keeps: `[n, ...]`, `dim` split by n if given."""
    is_float = jnp.issubdtype(rows.dtype, jnp.floating)
    wide = rows.astype(jnp.promote_types(rows.dtype, jnp.float32)) if is_float else rows
    total = wide.sum(0, dtype=wide.dtype)
    total = (total * scale if is_float else total).astype(rows.dtype)
    if dim is None:
        return jnp.broadcast_to(total, rows.shape)
    return jnp.stack(jnp.split(total, len(rows), axis=dim))


def _gather_rows(rows: jax.Array, dim: int, scale: Any) -> jax.Array:
    """Return the concatenated rows `[n, ...]`, once for each row."""
    return jnp.broadcast_to(whole := jnp.concatenate([*rows], axis=dim), (len(rows), *whole.shape))


def _exchange_rows(rows: jax.Array, dims: tuple[int, int], scale: Any) -> jax.Array:
    """Return the received slices of each row, joined: `[n, ...]`."""
    split, joined = dims
    slices = [jnp.split(row, len(rows), axis=split) for row in rows]
    return jnp.stack([jnp.concatenate(each, axis=joined) for each in zip(*slices, strict=True)])


def _register(
    primitive: Any, transpose: Any, of_rows: Callable[..., jax.Array], of_leaves: Sequence[str]
) -> None:
    def run(*args: Any, **params: Any) -> Any:
        return jax.jit(functools.partial(primitive.bind, **params))(*args)

    primitive.multiple_results = True
    primitive.def_impl(run)
    primitive.def_abstract_eval(functools.partial(_typed, primitive))
    ad.primitive_jvps[primitive] = functools.partial(_jvp, primitive)
    ad.primitive_transposes[primitive] = functools.partial(_transpose, transpose)
    batching.fancy_primitive_batchers[primitive] = functools.partial(_batch, primitive, of_rows)
    dead_results.drop(primitive, of_leaves=of_leaves)
    lower = functools.partial(_lower, primitive.name)
    mlir.register_lowering(primitive, lower, platform="cpu", cacheable=False)


_register(reduce_scatter_p, all_gather_p, _scatter_rows, ["dims"])
_register(all_gather_p, reduce_scatter_p, _gather_rows, ["dims", "overwrites"])
_register(all_to_all_p, all_to_all_p, _exchange_rows, ["dims"])
