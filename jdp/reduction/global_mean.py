"""`global_mean`: a loss that is a mean over all ranks."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.extend.core
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir

from jdp import axis
from jdp.axis import AxisName
from jdp.reduction.gradients import sync_gradients
from jdp.reduction.local_gradients import local_value_and_grad
from jdp.reduction.metrics import mean_over_ranks

# Two linear operations, each the other's transpose. Each rank differentiates its own loss l_r; the
# step's loss is sum(s_r l_r), with shares s_r of 1.


class Average(Protocol):
    """Averages arrays over ranks; hashable for traced programs."""

    def means(self, values: list[jax.Array]) -> list[jax.Array]:
        """Return the means; the algorithm may have no derivative."""
        ...

    def means_of_slopes(self, values: list[jax.Array]) -> list[jax.Array]:
        """Return the means of tangents by differentiable operations."""
        ...


def as_local(values: Sequence[Any], average: Average) -> list[jax.Array]:
    """Return `values`, and average their cotangents."""
    if not values:
        return []
    return _local_p.bind(*map(jnp.asarray, values), average=average)


def as_mean(values: Sequence[jax.Array], average: Average) -> list[jax.Array]:
    """Return the means of `values`, and pass on cotangents."""
    # The operands carry the derivative.
    means = average.means([lax.stop_gradient(x) for x in values])
    return _mean_p.bind(*means, *values, average=average)


_local_p = jax.extend.core.Primitive("jdp_local")
_mean_p = jax.extend.core.Primitive("jdp_mean")
_local_p.multiple_results = _mean_p.multiple_results = True


def _means(*values: Any, average: Average) -> list[Any]:
    return list(values[: len(values) // 2])


def _local_jvp(primals: tuple, tangents: tuple, *, average: Average) -> tuple[Any, Any]:
    out = _local_p.bind(*primals, average=average)
    return out, as_local(_instantiated(primals, tangents), average)


def _mean_jvp(primals: tuple, tangents: tuple, *, average: Average) -> tuple[Any, Any]:
    half = len(primals) // 2
    out = _mean_p.bind(*primals, average=average)
    slopes = _instantiated(primals[half:], tangents[half:])
    return out, _mean_p.bind(*average.means_of_slopes(slopes), *slopes, average=average)


def _instantiated(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    # All or none: an average is one collective.
    pairs = zip(primals, tangents, strict=True)
    return [jnp.zeros_like(x) if type(slope) is ad.Zero else slope for x, slope in pairs]


def _local_transpose(cotangents: Sequence[Any], *values: Any, average: Average) -> list[Any]:
    return as_mean([ad.instantiate_zeros(cotangent) for cotangent in cotangents], average)


def _mean_transpose(cotangents: Sequence[Any], *values: Any, average: Average) -> list[Any]:
    own = as_local([ad.instantiate_zeros(cotangent) for cotangent in cotangents], average)
    return [None] * len(own) + own


def _batched(primitive: Any) -> Callable[..., tuple[Any, Any]]:
    def batch(values: tuple, dims: tuple, *, average: Average) -> tuple[Any, Any]:
        size = next(x.shape[d] for x, d in zip(values, dims, strict=True) if d is not None)
        mapped = [
            jnp.moveaxis(x, d, 0) if d is not None else jnp.broadcast_to(x, (size, *x.shape))
            for x, d in zip(values, dims, strict=True)
        ]
        outs = primitive.bind(*mapped, average=average)
        return outs, [0] * len(outs)

    return batch


for _primitive, _run, _jvp, _transpose in (
    (_local_p, lambda *values, average: list(values), _local_jvp, _local_transpose),
    (_mean_p, _means, _mean_jvp, _mean_transpose),
):
    _primitive.def_impl(_run)
    _primitive.def_abstract_eval(_run)
    ad.primitive_jvps[_primitive] = _jvp
    ad.primitive_transposes[_primitive] = _transpose
    batching.primitive_batchers[_primitive] = _batched(_primitive)
mlir.register_lowering(_local_p, lambda context, *values, average: list(values))
mlir.register_lowering(_mean_p, lambda context, *values, average: _means(*values, average=average))


def global_mean(
    loss_fn: Callable[..., jax.Array], *, axis_name: AxisName = "data"
) -> Callable[..., jax.Array]:
    """Make a loss whose value and gradient are means over all ranks.

    For library code that differentiates or compares losses: line searches (L-BFGS), opaque SAM,
    Hessian products (Sophia, Hutchinson). `jax.lax.pmean(loss)` averages only the value there, so
    ranks would search along their own gradients.

    Args:
      loss_fn: `loss_fn(params, *rest) -> loss`, the mean over this rank's rows.
      axis_name: the data axis.

    Returns:
      `fn(params, *rest) -> loss`, equal on every rank, as are its derivatives in `params`:
      `jax.grad`, `jax.jvp`, `jax.hessian` and compositions (in your own `shard_map` with
      check_vma=True only `jax.grad`). Its gradient is already a mean:
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
        local = iter(as_local(floats, average))
        leaves = [next(local) if chosen else x for x, chosen in zip(leaves, is_float, strict=True)]
        loss = jnp.asarray(loss_fn(jax.tree.unflatten(treedef, leaves), *rest))
        (mean,) = as_mean([loss], _Loss(axis_name))
        return mean

    return fn


class _Gradients(NamedTuple):
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
    axis_name: AxisName

    def means(self, values: list[jax.Array]) -> list[jax.Array]:
        return mean_over_ranks(values, axis_name=self.axis_name)

    means_of_slopes = means


def _typed(loss_fn: Callable[..., Any], axis_name: AxisName, params: Any, rest: tuple) -> jax.Array:
    """Compute the mean in a typed `shard_map`, with a first derivative only."""

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
