"""The gradient of a batch in micro-batches, as every JAX program without jdp computes it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def mean_gradient(loss_fn: Callable[[Any, Any], jax.Array], params: Any, parts: Any) -> Any:
    """Return the loss and the gradient, each the mean over the micro-batches.

    Args:
      loss_fn: `(params, batch) -> []`, the mean over rows.
      params: the parameters.
      parts: the batch, `[k, rows, ...]`.
    """
    differentiate = jax.value_and_grad(loss_fn)
    num_parts = jax.tree.leaves(parts)[0].shape[0]
    first = jax.tree.map(lambda x: x[0], parts)
    if num_parts == 1:
        return differentiate(params, first)
    like = jax.eval_shape(differentiate, params, first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

    def add(sums: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, differentiate(params, part)), None

    sums, _ = lax.scan(add, zeros, parts)
    return jax.tree.map(lambda x: x / num_parts, sums)
