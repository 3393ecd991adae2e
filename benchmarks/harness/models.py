"""The models that are measured, beside those of `jdp.inspect.models`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdp.inspect.models import SmallModel as Problem
from jdp.inspect.models import attention as attention
from jdp.inspect.models import mlp as mlp
from jdp.inspect.models import mlp_loss as mlp_loss
from jdp.inspect.models import transformer as transformer
from jdp.inspect.models import transformer_loss as transformer_loss

# The optimizer of all contestants.
TX = optax.sgd(0.1, momentum=0.9)


def many_leaves(num_leaves: int) -> Problem:
    """Make a model of `num_leaves` parameters of one number each."""
    params = {f"w{i}": np.float32(i) / num_leaves for i in range(num_leaves)}
    return Problem(f"{num_leaves} leaves", params, {"x": np.ones((8, 1), np.float32)}, _sum_loss)


def _sum_loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean(batch["x"]) * sum(jax.tree.leaves(params))


# A step takes at least 20 ms on 2 cores; rows divide by 4 ranks times 8 micro-batches.
@functools.cache
def problem_of(name: str) -> Problem:
    """Return the model called "mlp" or "transformer", with its batch."""
    if name == "mlp":
        return mlp(width=512, num_layers=4, num_rows=512)
    return transformer(dim=128, num_layers=4, num_rows=32, length=32)
