"""Updates of a sharded optimizer that other code adds to parameters: Flax's TrainState, nnx."""

from typing import Any

import jax

from jdp.reduction import mixed_precision, shard_registry, unsplit_state
from jdp.reduction.optimizer import require_shapes
from jdp.reduction.sharded_update import Update, shard_axes
from jdp.reduction.sharding import Sharded


def updated(
    update: Any,
    caller: str,
    grads: Any,
    opt_state: Any,
    params: Any,
    *,
    synced: bool,
    **extra: Any,
) -> tuple[Any, Any] | None:
    """Return the updates and the new state of an optimizer, None if its state is not split here.

    Each rank computes its part of the updates, which are then gathered. The log names the arrays
    that would be split in a `TrainState`, and are not here.
    """
    tx = Sharded(update.wrapped.init, update)
    axes = shard_axes(tx)
    if caller != unsplit_state.UPDATE_OF_STATE:
        mixed_precision.mark_gradients(grads, tx)
    is_split = axes is not None and any(map(shard_registry.known, jax.tree.leaves(opt_state)))
    has_parts = shard_registry.are_of(tx) or any(map(shard_registry.known, jax.tree.leaves(params)))
    whole = () if is_split else opt_state, () if has_parts else params
    unsplit_state.log(tx.sharding, tx.axis_name, caller, *whole)
    if axes is None or not is_split:
        return None
    if not synced and params is not None:
        require_shapes(grads, params)
    parts = Update(tx, axes, jax.tree.structure(grads), applies=False)
    return parts.run(parts.means(grads, synced), opt_state, params, extra)
