"""How much rows count: which numbers are not a weight, and which rank gave one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def valid(given: Any) -> jax.Array:
    """Return a weight as it is used: NaN in place of a negative number.

    Rows that count less than nothing would train silently, since the sum of all weights may well
    be positive. NaN passes through that sum to every rank, where `why_invalid` finds it.

    Args:
      given: `[]`, what the author's function returned, or gave to one of jdp's.

    Raises:
      ValueError: if it is anything but one real number, or a constant that is negative or not
        finite.
    """
    weight = jnp.asarray(given)
    if weight.shape or jnp.issubdtype(weight.dtype, jnp.complexfloating):
        raise ValueError(
            f"weight= gave {weight.dtype}{list(weight.shape)}, but the weight of a batch is one "
            'real number. Write for instance weight=lambda batch: batch["mask"].sum(), or '
            "weight=mask.sum() where a function takes the weight itself."
        )
    if any(jnp.issubdtype(weight.dtype, kind) for kind in (jnp.bool_, jnp.unsignedinteger)):
        return weight
    if _is_constant(given) and not _is_weight(given):
        raise ValueError(f"weight= gave {np.asarray(given)}. {_WHY}")
    weight = weight.astype(jnp.promote_types(weight.dtype, jnp.float32))
    return jnp.where(weight >= 0, weight, jnp.nan)


def why_invalid(total: jax.Array, given: jax.Array) -> str | None:
    """Return which ranks gave something else than a weight, None if all gave one.

    Args:
      total: `[]`, the sum over ranks of what `valid` returned.
      given: `[ranks]`, what it was given on each rank; only this process's are read.
    """
    if np.isfinite(np.asarray(total.addressable_data(0))):
        return None
    found = {}
    for shard in given.addressable_shards:
        (value,) = np.asarray(shard.data)
        if not _is_weight(value):
            found[shard.index[0].start or 0] = value
    ranks = [f"{value} on rank {rank}" for rank, value in sorted(found.items())]
    shown = " and ".join(ranks[:3]) + (f" and on {len(ranks) - 3} more" if len(ranks) > 3 else "")
    return f"weight= gave {shown or 'no weight on a rank of another process'}. {_WHY}"


def _is_weight(value: Any) -> bool:
    return bool(np.isfinite(value) and value >= 0)


def _is_constant(given: Any) -> bool:
    if isinstance(given, jax.Array):
        return not isinstance(given, jax.core.Tracer) and given.is_fully_replicated
    return True


_WHY = (
    "Rows cannot count less than nothing: means are divided by the sum of all ranks' weights. A "
    "weight is a finite number >= 0, and 0 for a rank that does not count."
)
