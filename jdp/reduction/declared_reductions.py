"""Statistics returned as gradients, as in Flax's fp8 layers."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jdp import pytrees
from jdp.axis import AxisName
from jdp.reduction import metrics, shard_registry

_OF_FLAX = {pytrees.OVERWRITTEN: "max"}

_OVER_RANKS: dict[str, Callable[..., Any]] = {
    "max": metrics.max_over_ranks,
    "min": metrics.min_over_ranks,
    "sum": metrics.sum_over_ranks,
}
_OVER_ROUNDS: dict[str, Callable[..., Any]] = {"max": jnp.max, "min": jnp.min, "sum": jnp.sum}


def operations(params: Any, declared: Mapping[str, str] | None) -> dict[int, str]:
    """Return each statistic's operation, by position."""
    declared = declared or {}
    for key, name in declared.items():
        if name not in _OVER_RANKS:
            raise ValueError(
                f"reductions={{{key!r}: {name!r}}} must be one of "
                f"{', '.join(map(repr, _OVER_RANKS))}. To average a gradient, omit its leaf from "
                "reductions=."
            )
    known = {**_OF_FLAX, **declared}
    found, used = {}, set()
    for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
        for name in pytrees.keys(path):
            if name in known:
                found[i] = known[name]
                used.add(name)
    for key in declared:
        if key not in used:
            raise ValueError(
                f"reductions= has {key!r}, which is not a key of the parameters, so their "
                "gradients would be averaged. Write a key of the differentiated tree."
            )
    return found


def require_none(params: Any, name: str) -> None:
    """Refuse Flax's statistics among parameters with averaged gradients."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    if any(map(pytrees.is_overwritten, paths)):
        raise ValueError(
            f"the parameters of {name} have {pytrees.OVERWRITTEN!r}, whose gradients are maxima, "
            "but layers average gradients. Pass that collection as xs=."
        )


def over_ranks(grads: Any, chosen: Mapping[int, str], axis_name: AxisName) -> Any:
    """Combine statistics over the ranks."""
    if not chosen:
        return grads
    named, tree = jax.tree_util.tree_flatten_with_path(grads)
    found = [leaf for _, leaf in named]
    for name in sorted({*chosen.values()}):
        places = [i for i in chosen if chosen[i] == name]
        combined = _OVER_RANKS[name]([found[i] for i in places], axis_name=axis_name)
        for i, value in zip(places, combined, strict=True):
            found[i] = shard_registry.remember_mean(value, jax.tree_util.keystr(named[i][0]))
    return tree.unflatten(found)


def over_rounds(stacked: jax.Array, operation: str) -> jax.Array:
    """Combine statistics `[k, ...]` of k micro-batches."""
    return _OVER_ROUNDS[operation](stacked, axis=0)


def overwrite(params: Any, grads: Any, axis_name: AxisName, *, synced: bool) -> Any:
    """Overwrite Flax's statistics by their gradients' maxima."""
    named, tree = jax.tree_util.tree_flatten_with_path(params)
    flags = [pytrees.is_overwritten(path) for path, _ in named]
    if not any(flags) or jax.tree.structure(grads) != tree:
        return params
    leaves, known = jax.tree.leaves(grads), shard_registry.means()
    left = [i for i, flag in enumerate(flags) if flag and id(leaves[i]) not in known]
    maxima = {} if synced else dict.fromkeys(left, "max")
    new = jax.tree.leaves(over_ranks(grads, maxima, axis_name))
    return tree.unflatten([new[i] if flags[i] else leaf for i, (_, leaf) in enumerate(named)])
