"""Two linear operations, each the transpose of the other, between a rank's values and their mean.

Each rank differentiates its own loss l_r, and the loss of the step is sum(s_r l_r), with shares s_r
of 1. `as_local(p)` returns a uniform p for use by each rank alone: its cotangents differ between
ranks, and their mean is the cotangent of p. `as_mean(l)` returns the mean, the same on every rank,
and so is its cotangent, which is that of each l_r. Each is its own derivative, so that both may be
differentiated as often as one likes, forward and backward.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.extend.core
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir


class Average(Protocol):
    """Averages arrays over ranks. Part of a traced program: hashable, and equal to its like."""

    def means(self, values: list[jax.Array]) -> list[jax.Array]:
        """Return the means; may be an algorithm without a derivative."""
        ...

    def means_of_slopes(self, values: list[jax.Array]) -> list[jax.Array]:
        """Return the means of tangents, by operations that JAX can differentiate."""
        ...


def as_local(values: Sequence[Any], average: Average) -> list[jax.Array]:
    """Return `values`, and average their cotangents, all together."""
    if not values:
        return []
    return _local_p.bind(*map(jnp.asarray, values), average=average)


def as_mean(values: Sequence[jax.Array], average: Average) -> list[jax.Array]:
    """Return the means of `values`, and hand their cotangents on to them."""
    # The operands carry the derivative; the means beside them have none.
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
    # All or none: an average is one collective of all ranks.
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
