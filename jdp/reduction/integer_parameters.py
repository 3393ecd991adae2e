"""Losses whose parameters include integers, which have no gradient."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def left_out(
    loss_fn: Callable[..., Any], value_and_grad: Callable[[Any], Callable[..., tuple[Any, Any]]]
) -> Callable[..., tuple[Any, Any]]:
    """Return `value_and_grad(loss_fn)` in the float leaves of the first argument alone.

    The gradient of another leaf is what `jax.grad(allow_int=True)` gives: zeros of the same shape,
    in the dtype float0.
    """

    @functools.wraps(loss_fn)
    def fn(params: Any, *rest: Any) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(params)
        is_float = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]

        def filled(floats: Any, others: list[Any]) -> Any:
            left = iter(jax.tree.leaves(floats))
            pairs = zip(others, is_float, strict=True)
            return tree.unflatten([next(left) if flag else other for other, flag in pairs])

        def loss(floats: Any, *rest: Any) -> Any:
            return loss_fn(filled(floats, leaves), *rest)

        pairs = zip(leaves, is_float, strict=True)
        floats = tree.unflatten([leaf if flag else None for leaf, flag in pairs])
        value, grads = value_and_grad(loss)(floats, *rest)
        zeros = [np.zeros(np.shape(leaf), jax.dtypes.float0) for leaf in leaves]
        return value, filled(grads, zeros)

    return fn
