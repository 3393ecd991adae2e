"""How each primitive runs on slices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdp import jax_compat
from jdp.analysis import jaxprs
from jdp.reduction.partition.values import Dim, Ranks, Ravel
from jdp.reduction.shard_registry import checked_slice, combined_parts, joined_slices


class Plan(NamedTuple):
    """How to run an equation on slices.

    Attributes:
      ins: each operand's sliced dim, None for the whole.
      outs: the same for results.
      partial: "sum", "max", ...: how the ranks' results combine into the whole, or empty.
    """

    ins: Sequence[Dim]
    outs: Sequence[Dim]
    run: Callable[[list[Any]], list[jax.Array]]
    partial: str = ""


# `rule(eqn, position, dim, ranks)`: how to run `eqn` with a sliced operand, or None.
Rule = Callable[[Any, int, int, Ranks], Plan | None]


def same(eqn: Any, ins: Sequence[Dim], outs: Sequence[Dim], **changes: Any) -> Plan:
    """Return the plan to run the equation, with changed parameters."""
    return Plan(ins, outs, lambda operands: jax_compat.bind(eqn, operands, **changes))


def along(eqn: Any, dim: int) -> list[Dim]:
    """Return `dim` for each operand but scalars."""
    return [dim if atom.aval.shape else None for atom in eqn.invars]


# Elementwise primitives, recognized by their batching in JAX.
def elementwise_plan(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    """Slice all operands along `dim`, except those with one element there."""
    shape = eqn.outvars[0].aval.shape if eqn.outvars else ()
    shapes = [atom.aval.shape for atom in eqn.invars]
    if not _fit(shapes, shape) or any(atom.aval.shape != shape for atom in eqn.outvars):
        return None
    if ranks.communicate(eqn):
        return None
    if shapes[position][dim] != shape[dim] or not is_elementwise(eqn, len(shape)):
        return None
    ins: list[Dim] = [dim if each and each[dim] == shape[dim] else None for each in shapes]
    return same(eqn, ins, [dim] * len(eqn.outvars))


def _fit(shapes: list[tuple[int, ...]], out: tuple[int, ...]) -> bool:
    return all(
        not shape
        or len(shape) == len(out)
        and all(size in (1, full) for size, full in zip(shape, out, strict=True))
        for shape in shapes
    )


def is_elementwise(eqn: Any, num_dims: int) -> bool:
    """Whether results depend only on the same elements of operands, within a rank."""
    if eqn.primitive.name == "jdp_mark":
        return True
    try:
        params = tuple(sorted(eqn.params.items()))
        dtypes = tuple(atom.aval.dtype for atom in eqn.invars)
        return _batches_anywhere(eqn.primitive, params, dtypes, num_dims)
    except TypeError:
        return False


# The answer does not depend on sizes.
@functools.lru_cache(maxsize=4096)
def _batches_anywhere(primitive: Any, params: Any, dtypes: Any, num_dims: int) -> bool:
    """Whether `vmap` over a new first and a new last dim keeps the primitive."""
    settings = dict(params)

    def bind(*operands: Any) -> Any:
        return primitive.bind(*operands, **primitive.get_bind_params(settings))

    shape = (2,) * (num_dims + 1)
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes]
    for new in (0, num_dims):
        batched = jax.vmap(bind, in_axes=new, out_axes=new)
        try:
            jaxpr = jaxprs.opened(jax.make_jaxpr(batched)(*shapes))
        except Exception:  # foreign code
            return False
        if not jaxpr.eqns and jaxpr.outvars == jaxpr.invars:
            continue  # A conversion to the same dtype is left out.
        if len(jaxpr.eqns) != 1 or any(out.aval.shape != shape for out in jaxpr.outvars):
            return False
        (eqn,) = jaxpr.eqns
        if eqn.primitive is not primitive or eqn.params != settings:
            return False
    return True


def _along_axis(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    """Keep slices along other dims than the accumulated, sorted or joined one."""
    name = "dimension" if "dimension" in eqn.params else "axis"
    if dim == eqn.params[name]:
        return None
    return same(eqn, along(eqn, dim), [dim] * len(eqn.outvars))


def _matrices(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    """Keep slices along any dim but the last two."""
    shapes = [atom.aval.shape for atom in (*eqn.invars, *eqn.outvars)]
    if any(len(shape) <= dim for shape in shapes) or dim >= len(shapes[position]) - 2:
        return None
    return same(eqn, along(eqn, dim), [dim] * len(eqn.outvars))


_BATCHED = {
    **dict.fromkeys("cumlogsumexp cummax cummin cumprod cumsum sort top_k".split(), _along_axis),
    **dict.fromkeys(
        "cholesky eig eigh geqrf householder_product lu qr schur svd triangular_solve".split(),
        _matrices,
    ),
}


# `gather` and `scatter`: the sliced dim is not indexed.
def _gather(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape = eqn.invars[0].aval.shape
    removed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if position or sizes[dim] != shape[dim] or dim in (*removed, *numbers.start_index_map):
        return None
    out = numbers.offset_dims[_place(len(shape), removed, dim)]
    return same(eqn, [dim, None], [out], slice_sizes=ranks.local_shape(sizes, dim))


def _scatter(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    numbers = eqn.params["dimension_numbers"]
    shape, updates = eqn.invars[0].aval.shape, eqn.invars[2].aval.shape
    removed = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = {
        i: numbers.update_window_dims[_place(len(shape), removed, i)]
        for i in range(len(shape))
        if i not in (*removed, *numbers.scatter_dims_to_operand_dims)
    }
    if position == 2:
        dim = next((i for i, window in windows.items() if window == dim), -1)
    if position == 1 or dim not in windows or updates[windows[dim]] != shape[dim]:
        return None
    ins: list[Dim] = [dim, None, windows[dim]]
    return same(eqn, ins, [dim])


def _place(num_dims: int, removed: tuple[int, ...], dim: int) -> int:
    return [i for i in range(num_dims) if i not in removed].index(dim)


_SCATTERS = ("scatter", *(f"scatter-{name}" for name in ("add", "max", "min", "mul", "sub")))

_INDEXING = {"gather": _gather, **dict.fromkeys(_SCATTERS, _scatter)}


def _dot_general(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    """Slice the other operand likewise if it has the dim."""
    contracted, batch = eqn.params["dimension_numbers"]
    ins: list[Dim] = [None, None]
    ins[position] = dim
    if dim in contracted[position]:
        ins[1 - position] = contracted[1 - position][contracted[position].index(dim)]
        is_narrow = eqn.outvars[0].aval.dtype in (jnp.bfloat16, jnp.float16)
        # Ranks' shares are rounded once, after the sum.
        wide = {"preferred_element_type": jnp.dtype(jnp.float32)} if is_narrow else {}
        return same(eqn, ins, [None], **wide)._replace(partial="sum")
    if dim in batch[position]:
        out = batch[position].index(dim)
        ins[1 - position] = batch[1 - position][out]
        return same(eqn, ins, [out])
    free = [_free(eqn, i) for i in (0, 1)]
    out = len(batch[0]) + position * len(free[0]) + free[position].index(dim)
    return same(eqn, ins, [out])


def _free(eqn: Any, position: int) -> list[int]:
    contracted, batch = (dims[position] for dims in eqn.params["dimension_numbers"])
    num_dims = len(eqn.invars[position].aval.shape)
    return [i for i in range(num_dims) if i not in contracted and i not in batch]


_PRODUCTS = {"dot_general": _dot_general}


# With pmax, a NaN of one rank might not reach all.
_OVER_ROWS = {
    "and": lax.reduce_and,
    "max": lax.reduce_max,
    "min": lax.reduce_min,
    "or": lax.reduce_or,
    "prod": lax.reduce_prod,
    "xor": lax.reduce_xor,
}


def combine(parts: Sequence[jax.Array], partial: str, ranks: Ranks) -> list[jax.Array]:
    """Combine partial results, in one collective per dtype."""
    outs: list[Any] = [None] * len(parts)
    # XLA:CPU may abort on an all-reduce of bfloat16, and float32 loses less.
    wide = [_widened(part) for part in parts] if partial == "sum" else parts
    for dtype in dict.fromkeys(part.dtype for part in wide):
        chosen = [i for i, part in enumerate(wide) if part.dtype == dtype]
        flat = [lax.reshape(wide[i], (wide[i].size,)) for i in chosen]
        joined = flat[0] if len(flat) == 1 else lax.concatenate(flat, 0)
        joined = checked_slice(joined, ranks.axes)
        if partial == "sum":
            joined = combined_parts(lax.psum(joined, ranks.axes), ranks.axes)
        else:
            rows = joined_slices(lax.all_gather(joined, ranks.axes), ranks.axes)
            joined = _OVER_ROWS[partial](rows, (0,))
        start = 0
        for i in chosen:
            part = lax.slice(joined, (start,), (start + wide[i].size,))
            outs[i] = lax.reshape(part, wide[i].shape)
            start += wide[i].size
    return outs


def _widened(x: jax.Array) -> jax.Array:
    is_narrow = x.dtype in (jnp.bfloat16, jnp.float16)
    return lax.convert_element_type(x, jnp.float32) if is_narrow else x


def _reduce(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    axes = eqn.params["axes"]
    if dim not in axes:
        return same(eqn, [dim], [_remaining(axes, dim)])
    partial = eqn.primitive.name.removeprefix("reduce_")
    return same(eqn, [dim], [None])._replace(partial=partial)


def _position_of_extreme(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    """Find each slice's extreme, and the first of those."""
    axes, name = eqn.params["axes"], eqn.primitive.name
    if dim not in axes:
        return same(eqn, [dim], [_remaining(axes, dim)])
    (axis,) = axes
    find = lax.argmax if name == "argmax" else lax.argmin

    def run(operands: list[Any]) -> list[jax.Array]:
        (x,) = operands
        (own,) = jax_compat.bind(eqn, operands)
        at = jnp.expand_dims(own, axis)
        value = jnp.squeeze(jnp.take_along_axis(x, at, axis=axis), axis)
        values = lax.all_gather(checked_slice(value, ranks.axes), ranks.axes)
        start = lax.axis_index(ranks.axes).astype(own.dtype) * x.shape[axis]
        positions = lax.all_gather(lax.add(own, lax.full_like(own, 0) + start), ranks.axes)
        best = find(values, 0, jnp.int32)
        return [jnp.take_along_axis(positions, best[None], axis=0)[0]]

    return Plan([dim], [None], run)


def _remaining(axes: Sequence[int], dim: int) -> int:
    return dim - sum(axis < dim for axis in axes)


_REDUCING = {
    **dict.fromkeys(("reduce_sum", *(f"reduce_{name}" for name in _OVER_ROWS)), _reduce),
    "argmax": _position_of_extreme,
    "argmin": _position_of_extreme,
}


def _transpose(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    return same(eqn, [dim], [eqn.params["permutation"].index(dim)])


def _squeeze(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    removed = eqn.params["dimensions"]
    return None if dim in removed else same(eqn, [dim], [_remaining(removed, dim)])


def _expand_dims(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    added = eqn.params["dimensions"]
    kept = [i for i in range(len(eqn.outvars[0].aval.shape)) if i not in added]
    return same(eqn, [dim], [kept[dim]])


def _reshape(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    """Keep slices that stay contiguous; in a vector each rank keeps its elements."""
    before, after = eqn.invars[0].aval.shape, eqn.params["new_sizes"]
    if eqn.params["dimensions"] is not None:
        return None
    outside = math.prod(before[:dim])
    for i, size in enumerate(after):
        if math.prod(after[:i]) == outside and size > 1 and ranks.divide(size):
            return same(eqn, [dim], [i], new_sizes=ranks.local_shape(after, i))
    if len(after) == 1:
        layout = Ravel(before, dim)
        return same(eqn, [dim], [layout], new_sizes=ranks.local_shape(after, layout))
    return None


def _slice(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    starts, limits, strides = (
        eqn.params[name] for name in ("start_indices", "limit_indices", "strides")
    )
    size = eqn.invars[0].aval.shape[dim]
    if starts[dim] or limits[dim] != size or (strides is not None and strides[dim] != 1):
        return None
    return same(eqn, [dim], [dim], limit_indices=ranks.local_shape(limits, dim))


def _pad(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    if position or any(eqn.params["padding_config"][dim]):
        return None
    return same(eqn, [dim, None], [dim])


def _rev(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    return None if dim in eqn.params["dimensions"] else same(eqn, [dim], [dim])


def _stack(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    return same(eqn, [dim] * len(eqn.invars), [dim + (eqn.params["axis"] <= dim)])


def _unstack(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    removed = eqn.params["axis"]
    if dim == removed:
        return None
    return same(eqn, [dim], [_remaining([removed], dim)] * len(eqn.outvars))


def _dynamic_slice(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    sizes = eqn.params["slice_sizes"]
    # The index along a whole dim is clamped to 0, also on a slice.
    if position or sizes[dim] != eqn.invars[0].aval.shape[dim]:
        return None
    ins: list[Dim] = [dim, *[None] * (len(eqn.invars) - 1)]
    return same(eqn, ins, [dim], slice_sizes=ranks.local_shape(sizes, dim))


def _dynamic_update_slice(eqn: Any, position: int, dim: int, ranks: Ranks) -> Plan | None:
    operand, update = (atom.aval.shape for atom in eqn.invars[:2])
    if position > 1 or operand[dim] != update[dim]:
        return None
    ins: list[Dim] = [dim, dim, *[None] * (len(eqn.invars) - 2)]
    return same(eqn, ins, [dim])


_MOVING = {
    "concatenate": _along_axis,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "expand_dims": _expand_dims,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _rev,
    "slice": _slice,
    "split": _along_axis,
    "squeeze": _squeeze,
    "stack": _stack,
    "transpose": _transpose,
    "unstack": _unstack,
}


# Vectors in which a rank's elements are not contiguous.
RavelRule = Callable[[Any, int, Ravel, Ranks], Plan | None]


def _as_slices(rule: Callable[[Any, int, int, Ranks], Plan | None]) -> RavelRule:
    def plan(eqn: Any, position: int, layout: Ravel, ranks: Ranks) -> Plan | None:
        if any(len(atom.aval.shape) > 1 for atom in eqn.invars):
            return None
        found = rule(eqn, position, 0, ranks)
        if found is None:
            return None
        ins, outs = (
            [layout if dim == 0 else None for dim in dims] for dims in (found.ins, found.outs)
        )
        return found._replace(ins=ins, outs=outs)

    return plan


def _reshape_raveled(eqn: Any, position: int, layout: Ravel, ranks: Ranks) -> Plan | None:
    after = eqn.params["new_sizes"]
    if tuple(after) != layout.shape or eqn.params["dimensions"] is not None:
        return None
    shape = ranks.local_shape(after, layout.dim)
    return same(eqn, [layout], [layout.dim], new_sizes=shape)


_REDUCTIONS = [name for name in _REDUCING if name.startswith("reduce_")]

_RAVELED: dict[str, RavelRule] = {
    **{name: _as_slices(_REDUCING[name]) for name in _REDUCTIONS},
    "dot_general": _as_slices(_PRODUCTS["dot_general"]),
    "reshape": _reshape_raveled,
}
_RAVELED_UNKNOWN = _as_slices(elementwise_plan)


_RULES: dict[str, Rule] = {**_BATCHED, **_INDEXING, **_PRODUCTS, **_REDUCING, **_MOVING}


def plan(eqn: Any, position: int, dim: Dim, ranks: Ranks) -> Plan | None:
    """Return how to run an equation with a sliced operand."""
    name = eqn.primitive.name
    if isinstance(dim, Ravel):
        return _RAVELED.get(name, _RAVELED_UNKNOWN)(eqn, position, dim, ranks)
    return None if dim is None else _RULES.get(name, elementwise_plan)(eqn, position, dim, ranks)
