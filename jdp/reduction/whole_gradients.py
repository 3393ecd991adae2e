"""Log the cost of gradients that a step handles whole, though its parameters are sharded."""

import logging
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

_log = logging.getLogger("jdp")
_logged: set[str] = set()


def log(leaves: Sequence[Any]) -> None:
    """Log once, to the logger "jdp", that whole gradients of split parameters cost memory."""
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in map(jnp.asarray, leaves))
    if not num_bytes:
        return
    arrays = "1 array" if len(leaves) == 1 else f"{len(leaves)} arrays"
    message = (
        f"gradients come to the optimizer as whole arrays ({arrays} of {num_bytes:,} bytes), "
        "so that stage=3 saves no memory inside of this step: their parameters are gathered at its "
        f"start, another {num_bytes:,} bytes. Write loss, grads = jdp.value_and_grad(loss_fn)("
        "state.params, batch), and hand on grads as they are: parameters are then gathered where "
        "they are used, and gradients are averaged where they are computed. With a model of nnx, "
        "differentiate in weights: graph, weights = nnx.split(model), and in the loss "
        "nnx.merge(graph, weights, copy=True)."
    )
    if message not in _logged:
        _logged.add(message)
        _log.warning(message)
