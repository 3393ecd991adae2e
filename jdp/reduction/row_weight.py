"""Weights of rows, and their checks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdp import axis, pytrees
from jdp.axis import AxisName
from jdp.error_codes import with_code


def number(given: Any) -> jax.Array:
    """Return a weight as `[]` float."""
    if callable(convert := getattr(given, "__jax_array__", None)):
        given = convert()
    if (other := _not_a_number(given)) is not None:
        text = (
            f"weight= gave {other}, but a weight is one real number. For example weight=lambda "
            'batch: batch["mask"].sum() for a step, or weight=mask.sum() for a function that '
            "takes the number."
        )
        raise ValueError(with_code("JDP126", text))
    if not _is_constant(given):
        return given.astype(float)
    with np.errstate(over="ignore"):  # more than float32 holds
        constant = np.asarray(given).astype(jnp.result_type(float))
    if not _is_weight(constant):
        raise ValueError(with_code("JDP126", f"weight= gave {np.asarray(given)}. {_WHY}"))
    return jnp.asarray(constant)


def valid(given: Any) -> jax.Array:
    """Return a weight, NaN if invalid; NaN reaches every rank, see `why_invalid`."""
    weight = number(given)
    return jnp.where((weight >= 0) & (weight < jnp.inf), weight, jnp.nan)


def total_weight(weight: jax.Array, axis_name: AxisName) -> jax.Array:
    """Sum a weight, `[]` float, over the ranks."""
    # float64 if enabled, for float64 gradients.
    weight = jnp.asarray(weight, float)
    return lax.psum(weight, axis.names(axis_name)) if axis.is_bound(axis_name) else weight


def weighed(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply by a weight, `[]`, in at least float32; 0 gives 0, even for NaN."""
    # lax traces faster than jnp.
    dtype = jnp.promote_types(jnp.promote_types(x.dtype, jnp.float32), weight.dtype)
    if weight.ndim:  # under vmap
        weight = jnp.broadcast_to(weight, x.shape)
    wide = lax.convert_element_type(x, dtype)
    factor = lax.convert_element_type(weight, dtype)
    product = lax.mul(wide, factor if weight.ndim else lax.broadcast(factor, x.shape))
    return lax.select(lax.eq(weight, 0.0), lax.full_like(product, 0), product)


def divisor(total: jax.Array) -> jax.Array:
    """Return the divisor of means: 1 if no row counts, NaN after an overflow."""
    return jnp.where(total == 0, 1, jnp.where(total < jnp.inf, total, jnp.nan))


def why_invalid(total: jax.Array, given: jax.Array) -> str | None:
    """Return which ranks have an invalid weight: `given` is `[ranks]`, `total` sums `valid`."""
    sum_of_all = np.asarray(total.addressable_data(0))
    if np.isfinite(sum_of_all):
        return None
    values = {x.index[0].start or 0: np.asarray(x.data)[0] for x in given.addressable_shards}
    if np.isinf(sum_of_all):  # another invalid value would become NaN
        return (
            f"weight= gave {_shown(values)}. Their sum over the ranks, the divisor of means, "
            f"overflows {sum_of_all.dtype}. Divide the weights by a constant: only their ratios "
            "count."
        )
    found = {rank: value for rank, value in values.items() if not _is_weight(value)}
    return (
        f"weight= gave {_shown(found) or 'an invalid weight on a rank of another process'}. {_WHY}"
    )


def _shown(values: dict[int, Any]) -> str:
    ranks = [f"{value!s} on rank {rank}" for rank, value in sorted(values.items())]
    return " and ".join(ranks[:3]) + (f" and on {len(ranks) - 3} more" if len(ranks) > 3 else "")


def _not_a_number(given: Any) -> str | None:
    if not pytrees.is_array(given):
        return "None" if given is None else f"a {type(given).__name__}"
    dtype = given.dtype if hasattr(given, "dtype") else jnp.result_type(given)
    is_real = jnp.issubdtype(dtype, jnp.bool_) or (
        jnp.issubdtype(dtype, np.number) and not jnp.issubdtype(dtype, jnp.complexfloating)
    )
    return None if is_real and not jnp.shape(given) else f"{dtype}{list(jnp.shape(given))}"


def _is_weight(value: Any) -> bool:
    return bool(np.isfinite(value) and value >= 0)


def _is_constant(given: Any) -> bool:
    if isinstance(given, jax.Array):
        return not isinstance(given, jax.core.Tracer) and given.is_fully_replicated
    return True


_WHY = (
    "Means are divided by the sum of all ranks' weights, so each weight must be finite and >= 0. "
    "Use 0 for a rank that does not count."
)
