"""Rules for reductions, and how the partial results of ranks are combined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdp import jax_compat
from jdp.reduction.partition.ranks import Ranks
from jdp.reduction.partition.rules.plans import Plan, same
from jdp.reduction.shard_ops import checked, combined
from jdp.reduction.shard_ops import joined as gathered

# Combine the rows of ranks. Not pmax: XLA does not promise that a NaN of one rank reaches all.
_OVER_ROWS = {
    "and": lax.reduce_and,
    "max": lax.reduce_max,
    "min": lax.reduce_min,
    "or": lax.reduce_or,
    "prod": lax.reduce_prod,
    "xor": lax.reduce_xor,
}


def combine(parts: Sequence[jax.Array], partial: str, ranks: Ranks) -> list[jax.Array]:
    """Combine the ranks' partial results, in one collective for all of the same dtype."""
    outs: list[Any] = [None] * len(parts)
    # XLA's CPU backend may abort on an all-reduce of bfloat16, and sums in float32 lose less.
    wide = [_widened(part) for part in parts] if partial == "sum" else parts
    for dtype in dict.fromkeys(part.dtype for part in wide):
        chosen = [i for i, part in enumerate(wide) if part.dtype == dtype]
        flat = [lax.reshape(wide[i], (wide[i].size,)) for i in chosen]
        joined = flat[0] if len(flat) == 1 else lax.concatenate(flat, 0)
        joined = checked(joined, ranks.axes)
        if partial == "sum":
            joined = combined(lax.psum(joined, ranks.axes), ranks.axes)
        else:
            rows = gathered(lax.all_gather(joined, ranks.axes), ranks.axes)
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
    """Find the extreme of each slice, and of those the first one."""
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
        values = lax.all_gather(checked(value, ranks.axes), ranks.axes)
        start = lax.axis_index(ranks.axes).astype(own.dtype) * x.shape[axis]
        positions = lax.all_gather(lax.add(own, lax.full_like(own, 0) + start), ranks.axes)
        best = find(values, 0, jnp.int32)
        return [jnp.take_along_axis(positions, best[None], axis=0)[0]]

    return Plan([dim], [None], run)


def _remaining(axes: Sequence[int], dim: int) -> int:
    return dim - sum(axis < dim for axis in axes)


RULES = {
    **dict.fromkeys(("reduce_sum", *(f"reduce_{name}" for name in _OVER_ROWS)), _reduce),
    "argmax": _position_of_extreme,
    "argmin": _position_of_extreme,
}
