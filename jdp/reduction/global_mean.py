"""`global_mean`: a loss that is a mean over all ranks, with derivatives of every order."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdp import axis
from jdp.axis import AxisName
from jdp.reduction import shared_values
from jdp.reduction.gradients import sync_gradients
from jdp.reduction.local_gradients import local_value_and_grad
from jdp.reduction.metrics import mean_over_ranks


def global_mean(
    loss_fn: Callable[..., jax.Array], *, axis_name: AxisName = "data"
) -> Callable[..., jax.Array]:
    """Make a loss whose value and whose gradient are both means over all ranks.

    For library code that differentiates or compares losses by itself: line searches (L-BFGS),
    opaque SAM, products with the Hessian (Sophia, Hutchinson). `jax.lax.pmean(loss)` would not do
    there: it averages the value, and leaves each rank with its own gradient, so that ranks search
    in different directions.

    Args:
      loss_fn: `loss_fn(params, *rest) -> loss`, the mean over this rank's rows.
      axis_name: the data axis.

    Returns:
      `fn(params, *rest) -> loss`, the same on every rank, as are all its derivatives in `params`:
      `jax.grad`, `jax.jvp`, `jax.hessian` and their compositions (a `shard_map` of your own with
      check_vma=True has only `jax.grad`). Its gradient is a mean already:
      `state.apply_gradients(grads, synced=True, value_fn=fn, ...)`.

    >>> import jax, jax.numpy as jnp
    >>> fn = global_mean(lambda w, x: w**2 * x)
    >>> jax.vmap(lambda x: jax.grad(fn)(2.0, x), axis_name="data")(jnp.arange(4.0))
    Array([6., 6., 6., 6.], dtype=float32)
    >>> jax.vmap(lambda x: jax.hessian(fn)(jnp.float32(2), x), axis_name="data")(jnp.arange(4.0))
    Array([3., 3., 3., 3.], dtype=float32)
    """

    @functools.wraps(loss_fn)
    def fn(params: Any, *rest: Any) -> jax.Array:
        if not axis.is_bound(axis_name):
            return loss_fn(params, *rest)
        if axis.is_typed(axis_name):
            return _typed(loss_fn, axis_name, params, rest)
        leaves, treedef = jax.tree.flatten(params)
        is_float = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]
        floats = [leaf for leaf, chosen in zip(leaves, is_float, strict=True) if chosen]
        average = _Gradients(axis_name, treedef, tuple(is_float))
        local = iter(shared_values.as_local(floats, average))
        leaves = [next(local) if chosen else x for x, chosen in zip(leaves, is_float, strict=True)]
        loss = jnp.asarray(loss_fn(jax.tree.unflatten(treedef, leaves), *rest))
        (mean,) = shared_values.as_mean([loss], _Loss(axis_name))
        return mean

    return fn


class _Gradients(NamedTuple):
    """Averages cotangents of the float leaves of a tree as gradients, in buckets."""

    axis_name: AxisName
    treedef: Any
    is_float: tuple[bool, ...]

    def means(self, values: list[jax.Array]) -> list[jax.Array]:
        given = iter(values)
        tree = self.treedef.unflatten(next(given) if each else None for each in self.is_float)
        return jax.tree.leaves(sync_gradients(tree, axis_name=self.axis_name))

    def means_of_slopes(self, values: list[jax.Array]) -> list[jax.Array]:
        return mean_over_ranks(values, axis_name=self.axis_name)


class _Loss(NamedTuple):
    """Averages a loss."""

    axis_name: AxisName

    def means(self, values: list[jax.Array]) -> list[jax.Array]:
        return mean_over_ranks(values, axis_name=self.axis_name)

    means_of_slopes = means


def _typed(loss_fn: Callable[..., Any], axis_name: AxisName, params: Any, rest: tuple) -> jax.Array:
    """Compute the mean in a typed `shard_map`, where only a first derivative is defined."""

    @jax.custom_vjp
    def value(p: Any) -> jax.Array:
        return mean_over_ranks(loss_fn(p, *rest), axis_name=axis_name)

    def forward(p: Any) -> tuple[jax.Array, Any]:
        loss, grads = local_value_and_grad(loss_fn, False, axis_name)(p, *rest)
        loss = mean_over_ranks(loss, axis_name=axis_name)
        return loss, sync_gradients(grads, axis_name=axis_name)

    def backward(grads: Any, cotangent: jax.Array) -> tuple[Any]:
        grads = jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), grads)
        return (axis.as_typed_like(grads, params),)

    value.defvjp(forward, backward)
    return value(params)
