"""Log the arrays that stay whole if `jdp.sharded` updates a state outside of a `TrainState`."""

import logging
from typing import Any

import jax
import jax.numpy as jnp

from jdp import axis, pytrees
from jdp.axis import AxisName
from jdp.reduction import step_context

_log = logging.getLogger("jdp")
_logged: set[str] = set()
# The file whose updates are of a `TrainState`, see `sharded_update.updated`.
UPDATE_OF_STATE = "jdp.reduction.sharded_update"


def log(sharding: Any, axis_name: AxisName, caller: str, state: Any, params: Any) -> None:
    """Log once, to the logger "jdp", the arrays that `jdp.sharded` finds whole on every rank."""
    is_in_step = step_context.current(axis_name) is not None
    if caller == UPDATE_OF_STATE and is_in_step:
        return
    num_ranks = axis.size(sharding.axes or axis_name)
    named = {"optimizer state": state, "parameters": params if sharding.stage == 3 else ()}
    whole = {name: _split_elsewhere(sharding, tree, num_ranks) for name, tree in named.items()}
    arrays = [x for found in whole.values() for x in found]
    if not arrays:
        return
    num_bytes = sum(x.size * x.dtype.itemsize for x in arrays)
    message = (
        f"jdp.sharded(stage={sharding.stage}) does not split {len(arrays)} arrays of "
        f"{' and '.join(name for name, found in whole.items() if found)} here, {num_bytes:,} bytes "
        f"on each of {num_ranks} ranks. In a jdp.train_step a jdp.TrainState is split, Flax's, and "
        "an nnx.Optimizer with its model. Write state = jdp.TrainState.create(params, tx) and, in "
        "the step, state.apply_gradients(grads)."
    )
    if message not in _logged:
        _logged.add(message)
        _log.warning(message)


def _split_elsewhere(sharding: Any, tree: Any, num_ranks: int) -> list[jax.Array]:
    """Return the arrays of a tree that would be split in a `TrainState`."""
    arrays = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if pytrees.is_array(leaf)]
    return [x for x in arrays if sharding.dim(x, num_ranks) is not None]
