"""Sums of integers over ranks that their type cannot hold: found in a step, raised after it."""

import traceback
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdp import axis, jax_compat, pytrees
from jdp.analysis import source_lines
from jdp.axis import AxisName
from jdp.reduction import step_context
from jdp.reduction.scope import Scope


def checking_step(axis_name: AxisName) -> Scope | None:
    """Return the step that can report an overflow of sums over the ranks of `axis_name`, if any."""
    step = step_context.around(axis_name)
    return None if step is None or step.is_part or step.batch_trace is None else step


def is_checked(step: Scope, term: Any) -> bool:
    """Whether a term may overflow, and is not of a trace in the step, as under a vmap or scan."""
    dtype = jnp.result_type(term)
    is_integer = jnp.issubdtype(dtype, jnp.integer) and pytrees.num_bits(dtype) >= 32
    return is_integer and jax_compat.trace_of(term) is step.batch_trace


def upper_half(term: jax.Array) -> jax.Array:
    """Return the upper half of the bits of integers: their sum over ranks has room."""
    return lax.shift_right_arithmetic(term, lax.full_like(term, pytrees.num_bits(term.dtype) // 2))


def report(
    step: Scope, totals: Sequence[jax.Array], uppers: Sequence[jax.Array], axis_name: AxisName
) -> None:
    """Let a step report whether one of some sums has overflowed, with the author's line."""
    others = tuple(name for name in step.axis_name if name not in axis.names(axis_name))
    frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
    line = source_lines.innermost(frames)
    for total, upper in zip(totals, uppers, strict=True):
        bits = pytrees.num_bits(total.dtype)
        # Without an overflow the difference is the sum of the lower halves.
        difference = upper.astype(float) * 2.0 ** (bits // 2) - total.astype(float)
        overflows = jnp.any(jnp.abs(difference) > 2.0 ** (bits - 1))
        if others:  # ranks along other axes have other sums
            overflows = lax.pmax(overflows.astype(jnp.int32), others) > 0
        step.integer_sums.append((overflows, line))


def marked(weight: jax.Array, step: Scope) -> jax.Array:
    """Return the weight of a batch, -inf if a sum in its step has overflowed."""
    if not step.integer_sums:
        return weight
    overflows = jnp.stack([flag for flag, _ in step.integer_sums])
    return jnp.where(overflows.any(), -jnp.inf, weight)
