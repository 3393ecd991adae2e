"""An identity that `vmap` applies to all of its operands or to none."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir


def together(values: Sequence[Any]) -> list[jax.Array]:
    """Return `values` unchanged. Where `vmap` maps one of them, it maps all.

    A `jax.custom_vjp` function under `vmap` has one cotangent for an output that is not mapped:
    the sum over all rows, where its backward pass may need that of each.

    Args:
      values: arrays.

    >>> import jax, jax.numpy as jnp
    >>> jax.vmap(lambda x: together([x, jnp.float32(1)]))(jnp.arange(2.0))
    [Array([0., 1.], dtype=float32), Array([1., 1.], dtype=float32)]
    """
    return _together_p.bind(*map(jnp.asarray, values)) if values else []


_together_p = jax.extend.core.Primitive("jdp_together")
_together_p.multiple_results = True


def _jvp(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    # The tangents as they are: one of zeros stays one.
    return _together_p.bind(*primals), list(tangents)


def _batch(values: tuple, dims: tuple) -> tuple[Any, Any]:
    size = next(x.shape[d] for x, d in zip(values, dims, strict=True) if d is not None)
    mapped = [
        jnp.moveaxis(x, d, 0) if d is not None else jnp.broadcast_to(x, (size, *x.shape))
        for x, d in zip(values, dims, strict=True)
    ]
    return _together_p.bind(*mapped), [0] * len(values)


_together_p.def_impl(lambda *values: list(values))
_together_p.def_abstract_eval(lambda *values: list(values))
ad.primitive_jvps[_together_p] = _jvp
batching.primitive_batchers[_together_p] = _batch
mlir.register_lowering(_together_p, lambda context, *values: list(values))
