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
_UPDATE_OF_STATE = "jdp.reduction.sharded_update"


def log(sharding: Any, axis_name: AxisName, caller: str, state: Any, params: Any) -> None:
    """Log once, to the logger "jdp", the arrays that `jdp.sharded` finds whole on every rank.

    Args:
      sharding: `sharded.Sharding` of the optimizer.
      axis_name: its data axis.
      caller: the module that called its update.
      state: of the optimizer.
      params: the parameters, or None.
    """
    is_in_step = step_context.current(axis_name) is not None
    if caller == _UPDATE_OF_STATE and is_in_step:
        return
    num_ranks = axis.size(sharding.axes or axis_name)
    leaves = [*jax.tree.leaves(state), *(jax.tree.leaves(params) if sharding.stage == 3 else ())]
    arrays = [jnp.asarray(leaf) for leaf in leaves if pytrees.is_array(leaf)]
    whole = [x for x in arrays if sharding.dim(x, num_ranks) is not None]
    if not whole:
        return
    num_bytes = sum(x.size * x.dtype.itemsize for x in whole)
    what = "optimizer state and parameters" if sharding.stage == 3 else "optimizer state"
    message = (
        f"jdp.sharded(stage={sharding.stage}) does not split {len(whole)} arrays of {what} here, "
        f"{num_bytes:,} bytes on each of {num_ranks} ranks: only what lies in a jdp.TrainState is "
        "split, in a jdp.train_step. Write state = jdp.TrainState.create(params, tx) and, in the "
        "step, state.apply_gradients(grads)."
    )
    if message not in _logged:
        _logged.add(message)
        _log.warning(message)
