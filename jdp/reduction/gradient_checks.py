"""Refuse values that are not gradients, or are reduced already."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdp import axis
from jdp.axis import AxisName
from jdp.reduction import known_shards


def require_float(path: str, leaf: Any) -> jax.Array:
    """Return a gradient as an array, and refuse one that cannot be averaged.

    Args:
      path: of the gradient in its tree, for the error.
      leaf: an array or a number.

    Raises:
      TypeError: if it is not a real float of at least 16 bits.
    """
    dtype = leaf.dtype if isinstance(leaf, jax.Array) else jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16:
        return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    name = "float0" if dtype == jax.dtypes.float0 else dtype
    found = f"the gradient `grads{path}` is {name}{list(jnp.shape(leaf))}"
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"{found}, and JAX's gradient of a complex parameter is the conjugate of the direction "
            "of descent, which is easy to get wrong. Keep the real and imaginary parts as two "
            "float parameters."
        )
    if jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{found}, and a sum over ranks in fewer than 16 bits would round small gradients to "
            f"0. Keep the parameter in float32 or bfloat16, and cast it to {dtype} in the loss."
        )
    raise TypeError(
        f"{found}, but only floats have gradients that can be averaged. Differentiate with respect "
        "to float leaves only; TrainState leaves integer parameters as they are."
    )


def require_local(paths: Sequence[str], leaves: Sequence[jax.Array], axis_name: AxisName) -> None:
    """Refuse gradients that JAX has summed over the ranks already.

    Args:
      paths: of the gradients, for the error.
      leaves: the gradients.
      axis_name: that they are to be averaged over.

    Raises:
      ValueError: naming the first one.
    """
    if not axis.is_typed(axis_name):
        return
    for path, leaf in zip(paths, leaves, strict=True):
        if not set(axis.names(axis_name)) <= axis.varying_axes(leaf):
            raise ValueError(
                f"the gradient `grads{path}` {leaf.dtype}{list(leaf.shape)} was already summed "
                f"over {axis_name!r} by JAX, as shard_map(check_vma=True) does for parameters that "
                f"do not vary. Averaged now it would be {axis.size(axis_name)} times too large. "
                "Write jdp.value_and_grad(loss_fn)(params, batch), which keeps it local."
            )


def require_unreduced(paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Refuse gradients that jdp knows to be means over the ranks.

    Args:
      paths: of the gradients, for the error.
      leaves: the gradients.

    Raises:
      ValueError: naming the first one.
    """
    for path, leaf in zip(paths, leaves, strict=True):
        found = known_shards.known(leaf)
        if found is not None and found.is_mean:
            raise ValueError(
                f"the gradient `grads{path}` is the mean over the ranks already: with "
                "jdp.sharded(stage=2) or stage=3, jdp.value_and_grad averages where it "
                "differentiates, by the weight of the step. Another weight=, or mean=False, would "
                "not apply to it. Write jdp.train_step(weight=...), or jax.value_and_grad, which "
                "keeps gradients local."
            )
