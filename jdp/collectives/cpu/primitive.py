"""The JAX primitive of an all-reduce in compiled code, with its derivatives and batching."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir

from jdp import axis
from jdp.collectives import call_order
from jdp.collectives.cpu import dead_results
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.collectives.cpu.lowering import lowered
from jdp.collectives.cpu.operands import of_one_row
from jdp.collectives.xla import scaled

# (rank, group, scale, token, *leaves) -> (token, *leaves)
all_reduce_p = jax.extend.core.Primitive("jdp_all_reduce")
all_reduce_p.multiple_results = True
_FIRST_LEAF = call_order.TOKEN + 1


@all_reduce_p.def_impl
def _run(*args: Any, **params: Any) -> Any:
    return jax.jit(functools.partial(all_reduce_p.bind, **params))(*args)


# JAX types the results as uniform, so a typed shard_map may return them as P().
@all_reduce_p.def_abstract_eval
def _typed(rank: Any, group: Any, scale: Any, *rest: Any, **params: Any) -> list[Any]:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in rest]


def _lower(context: Any, *args: Any, axes: Any, algorithm: int, **params: Any) -> Any:
    # In place: gradients are usually not used later, and XLA copies leaves that are.
    places = range(call_order.TOKEN, len(args))
    kind = np.int32(algorithm)
    return lowered(cpu_runtime.TARGET, context, args, in_place=places, algorithm=kind, **params)


def _jvp(primals: tuple, tangents: tuple, *, number: int, **params: Any) -> tuple[Any, Any]:
    rank, group, scale, _, *_ = primals
    token, *sums = all_reduce_p.bind(*primals, number=number, **params)
    slopes = [ad.instantiate_zeros(t) for t in tangents[_FIRST_LEAF:]]
    number = call_order.derived(number, "tangent")
    _, *slopes = all_reduce_p.bind(rank, group, scale, token, *slopes, number=number, **params)
    return [token, *sums], [ad.Zero(jax.typeof(token).to_tangent_aval()), *slopes]


def _transpose(
    cotangents: Sequence[Any], rank: Any, group: Any, scale: Any, token: Any, *leaves: Any,
    axes: tuple[str, ...], number: int, **params: Any,
) -> list[Any]:  # fmt: skip
    # As for psum: the loss of each rank depends on the sum, so the cotangents add up. In a typed
    # shard_map they do not, where all ranks have the same cotangent.
    given = [ad.instantiate_zeros(ct) for ct in cotangents[1:]]
    if axis.is_typed(axes):
        given = [axis.as_varying(scaled(ct, scale), axes) for ct in given]
    else:
        number = call_order.derived(number, "cotangent")
        _, *given = all_reduce_p.bind(
            rank, group, scale, token, *given, axes=axes, number=number, **params
        )
    asked = map(ad.is_undefined_primal, leaves)
    given = [ct if is_asked else None for ct, is_asked in zip(given, asked, strict=True)]
    return [None] * _FIRST_LEAF + given


# A batch dim and the ranks are added up independently, unless vmap gives its rows the name of an
# axis. Then the call sums over these rows.
def _batch(
    axis_data: Any, args: Sequence[Any], dims: Sequence[Any], *, axes: Any, **params: Any
) -> tuple[Any, Any]:
    before, leaves = of_one_row(args, dims), args[_FIRST_LEAF:]
    if axis_data.name in axes:
        remaining = tuple(name for name in axes if name != axis_data.name)
        sums = [
            _sum_of_rows(x, dim, axis_data.size, remaining, scale=before[2])
            for x, dim in zip(leaves, dims[_FIRST_LEAF:], strict=True)
        ]
        return [before[-1], *sums], [None] * (1 + len(sums))
    out = all_reduce_p.bind(*before, *leaves, axes=axes, **params)
    return out, [None, *dims[_FIRST_LEAF:]]


def _sum_of_rows(x: Any, dim: Any, size: int, axes: tuple[str, ...], *, scale: Any) -> jax.Array:
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32)) if is_float else x
    total = wide * size if dim is None else wide.sum(dim, dtype=wide.dtype)
    total = lax.psum(total, axes) if axes else total
    return (total * scale).astype(x.dtype) if is_float else total


ad.primitive_jvps[all_reduce_p] = _jvp
ad.primitive_transposes[all_reduce_p] = _transpose
batching.fancy_primitive_batchers[all_reduce_p] = _batch
dead_results.drop(all_reduce_p)
mlir.register_lowering(all_reduce_p, _lower, platform="cpu", cacheable=False)
