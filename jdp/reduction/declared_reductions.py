"""Leaves whose gradient is a statistic: it is combined over rows by an operation, not averaged.

A `custom_vjp` may return the next value of a statistic in place of a gradient. Flax's fp8 layers
do so for maxima, in a collection of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdp.axis import AxisName
from jdp.reduction import known_shards, metrics

# Flax's collection of statistics whose gradient is their next value.
OVERWRITTEN = "_overwrite_with_gradient"
_OF_FLAX = {OVERWRITTEN: "max"}

_OVER_RANKS: dict[str, Callable[..., Any]] = {
    "max": metrics.max_over_ranks,
    "min": metrics.min_over_ranks,
    "sum": metrics.sum_over_ranks,
}
_OVER_ROUNDS: dict[str, Callable[..., Any]] = {"max": jnp.max, "min": jnp.min, "sum": jnp.sum}


def operations(params: Any, declared: Mapping[str, str] | None) -> dict[int, str]:
    """Return the operation of each leaf that has one, by its position.

    Args:
      params: tree of parameters.
      declared: key in `params` -> "max", "min" or "sum".

    Raises:
      ValueError: if an operation is another one, or no leaf is below a key.
    """
    declared = declared or {}
    for key, name in declared.items():
        if name not in _OVER_RANKS:
            raise ValueError(
                f"reductions={{{key!r}: {name!r}}} is none of {', '.join(map(repr, _OVER_RANKS))}. "
                "Leave a leaf out of reductions= to average its gradient."
            )
    known = {**_OF_FLAX, **declared}
    found, used = {}, set()
    for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
        for name in _names(path):
            if name in known:
                found[i] = known[name]
                used.add(name)
    for key in declared:
        if key not in used:
            raise ValueError(
                f"reductions= has {key!r}, which is no key of the parameters: their gradients "
                "would be averaged. Write a key of the tree that is differentiated."
            )
    return found


def is_overwritten(tree: Any) -> list[bool]:
    """Return for each leaf whether it is a statistic of Flax, which its gradient overwrites."""
    return [OVERWRITTEN in _names(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def require_none(params: Any, name: str) -> None:
    """Refuse Flax's statistics among parameters whose gradients a function averages."""
    if any(is_overwritten(params)):
        raise ValueError(
            f"the parameters of {name} have {OVERWRITTEN!r}, whose gradients are maxima: layers "
            "average gradients. Pass that collection as xs=."
        )


def over_ranks(leaves: Sequence[Any], chosen: Mapping[int, str], axis_name: AxisName) -> list[Any]:
    """Return leaves, of which those that are chosen are combined over the ranks."""
    found = list(leaves)
    for name in sorted({*chosen.values()}):
        places = [i for i in chosen if chosen[i] == name]
        combined = _OVER_RANKS[name]([leaves[i] for i in places], axis_name=axis_name)
        for i, value in zip(places, combined, strict=True):
            found[i] = known_shards.remember_mean(value, "")
    return found


def over_rounds(stacked: Mapping[int, jax.Array], chosen: Mapping[int, str]) -> dict[int, Any]:
    """Return statistics `[k, ...]` of k micro-batches, by position, combined over these."""
    return {i: _OVER_ROUNDS[chosen[i]](value, axis=0) for i, value in stacked.items()}


def overwrite(params: Any, grads: Any, axis_name: AxisName, *, synced: bool) -> Any:
    """Return parameters with Flax's statistics overwritten by the maxima of their gradients.

    Args:
      params: tree of parameters.
      grads: tree of gradients like it; of another structure, nothing is overwritten.
      axis_name: the data axis.
      synced: whether the gradients are combined over the ranks already.
    """
    flags = is_overwritten(params)
    if not any(flags) or jax.tree.structure(grads) != jax.tree.structure(params):
        return params
    leaves, tree = jax.tree.flatten(params)
    new = jax.tree.leaves(grads)
    known = known_shards.means()
    local = [i for i, flag in enumerate(flags) if flag and not synced and id(new[i]) not in known]
    new = over_ranks(new, dict.fromkeys(local, "max"), axis_name)
    return tree.unflatten(
        [value if flag else leaf for leaf, value, flag in zip(leaves, new, flags, strict=True)]
    )


def _names(path: Sequence[Any]) -> list[Any]:
    return [getattr(key, "key", None) or getattr(key, "name", None) for key in path]
