"""Shards of a state at both ends of a step: gathered where it begins, and found where it ends."""

from collections.abc import Sequence
from typing import Any

import jax

from jdp.reduction import shard_registry
from jdp.training import shard_layout


def whole(lists: Sequence[Sequence[Any]], axes: tuple[str, ...]) -> list[list[Any]]:
    """Return the arrays of a state as the author's function sees them."""
    own, *by_dim = lists
    parts = [
        shard_registry.entering(value, dim, axes)
        for dim, values in enumerate(by_dim)
        for value in values
    ]
    left = iter(shard_registry.gathered(parts))
    return [[*own], *([next(left) for _ in values] for values in by_dim)]


def claim(state: Any, *, trains: bool = True) -> None:
    """Record for parameters whose gradients are split which optimizer updates them."""
    for params, flags, tx in shard_layout.with_split_gradients(state):
        shard_registry.claim(params, [flag and trains for flag in flags], tx)


def parts(lists: Sequence[Sequence[jax.Array]], axes: tuple[str, ...]) -> list[list[jax.Array]]:
    """Return the arrays of a new state as they leave the step, shards for those that are split."""
    uniform, own, *by_dim = lists
    shards = [
        [shard_registry.own(leaf, dim, axes) for leaf in leaves]
        for dim, leaves in enumerate(by_dim)
    ]
    return [[*uniform], [*own], *shards]
