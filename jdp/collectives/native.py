"""The compiled all-reduce: leaves are summed where they lie, by the threads of the ranks.

`jdp/csrc/cpu` does the work; this file is the primitive that stands for it in a traced program.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh

from jdp import axis
from jdp.axis import AxisName
from jdp.collectives import hosts, library, order
from jdp.collectives.xla import Scale, scaled, xla

_DTYPES = frozenset(
    "float32 float64 bfloat16 float16 int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()
)


def native(
    buckets: Sequence[Sequence[jax.Array]],
    axis_name: AxisName,
    *,
    scale: Scale = 1.0,
    mesh: Mesh | None = None,
    algorithm: str = "direct",
) -> list[list[jax.Array]]:
    """Sum every leaf over `axis_name` in compiled code of jdp's own, on CPUs of one host.

    Args:
      buckets: lists of leaves, one dtype each; any shapes. bfloat16 and float16 are added up in
        float32 and rounded once. Of dtypes that the code does not know XLA takes the sum.
      axis_name: a name, or a tuple of names, bound by `shard_map` or `pmap`.
      scale: multiplies the sum; a number, or `[]` float, the same on every rank.
      mesh: where the axis lies; needed where there are several processes.
      algorithm: "direct": each part of a bucket is summed from all ranks by whichever rank is
        free; "ring": chunks go round, as between GPUs.

    Returns:
      The same lists, summed and scaled, in the dtype of each leaf; equal bits on every rank.

    Raises:
      ValueError: if it cannot run here, saying why; `collectives.auto` takes XLA's sum instead.
    """
    axes = axis.names(axis_name)
    reason = why_not(axes, mesh)
    if reason:
        raise ValueError(
            f"collectives.native cannot run here: {reason} Write all_reduce=jdp.collectives.auto, "
            "which then takes XLA's sum, or jdp.collectives.xla."
        )
    rank, group = lax.axis_index(axes), _group(axes)
    communicator = hosts.communicator(mesh, axes)
    token = order.token()
    token = jnp.zeros(1, jnp.float32) if token is None else token
    results = []
    for bucket in buckets:
        dtype = bucket[0].dtype
        if dtype.name not in _DTYPES:
            results += xla([bucket], axes, scale=scale)
            continue
        # A number is part of the one rounding; integers are scaled as XLA's sums are.
        is_fused = isinstance(scale, (int, float)) and jnp.issubdtype(dtype, jnp.floating)
        wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
        token, *leaves = _all_reduce_p.bind(
            rank,
            group,
            jnp.asarray(scale if is_fused else 1.0, wide),
            token,
            *bucket,
            axes=axes,
            num_ranks=axis.size(axes),
            number=order.next_number(bucket),
            algorithm=("direct", "ring").index(algorithm),
            communicator=communicator,
        )
        results.append(leaves if is_fused else [scaled(leaf, scale) for leaf in leaves])
    order.passed(token)
    return results


def why_not(axes: tuple[str, ...], mesh: Mesh | None) -> str | None:
    """Say in a sentence why `native` cannot run where this is traced, or None.

    The answer depends on devices and hosts alone, so that it is the same in every process.
    """
    platform = mesh.devices.flat[0].platform if mesh is not None else jax.default_backend()
    if platform != "cpu":
        return f"the ranks are on {platform!r}, where a split pair of calls does its work."
    around = jax.sharding.get_abstract_mesh()
    if not set(axes) <= set(around.manual_axes):
        return f"the axis {axes} is that of a vmap, which is one array and no ranks."
    automatic = [
        name for name, size in around.shape.items() if size > 1 and name not in around.manual_axes
    ]
    if automatic:
        return (
            f"the mesh axis {automatic[0]!r} is left to the compiler, which would gather what is "
            "split over it before a call of foreign code."
        )
    return library.why_missing() or hosts.why_apart(mesh, axes)


def _group(axes: tuple[str, ...]) -> jax.Array:
    # Ranks that differ along another axis are in another reduction.
    around = jax.sharding.get_abstract_mesh()
    others = tuple(n for n in around.axis_names if n in around.manual_axes and n not in axes)
    return lax.axis_index(others) if others else jnp.int32(0)


# (rank, group, scale, token, *leaves) -> (token, *leaves)
_all_reduce_p = jax.extend.core.Primitive("jdp_all_reduce")
_all_reduce_p.multiple_results = True
_FIRST_LEAF = order.TOKEN + 1


@_all_reduce_p.def_impl
def _run(*args: Any, **params: Any) -> Any:
    return jax.jit(functools.partial(_all_reduce_p.bind, **params))(*args)


# JAX types what leaves as the same on every rank, so that a typed shard_map gives it away as P().
@_all_reduce_p.def_abstract_eval
def _typed(rank: Any, group: Any, scale: Any, *rest: Any, **params: Any) -> list[Any]:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in rest]


def _lower(context: Any, *args: Any, axes: Any, number: int, **params: int) -> Any:
    # In place: a gradient is needed no more, and XLA copies what is.
    aliases = {i: i - _FIRST_LEAF + 1 for i in range(_FIRST_LEAF - 1, len(args))}
    rule = jax.ffi.ffi_lowering(library.TARGET, operand_output_aliases=aliases)
    return rule(
        context,
        *args,
        num_ranks=np.int32(params["num_ranks"]),
        bucket=np.int32(number),
        algorithm=np.int32(params["algorithm"]),
        communicator=np.int64(params["communicator"]),
    )


def _jvp(primals: tuple, tangents: tuple, *, number: int, **params: Any) -> tuple[Any, Any]:
    rank, group, scale, _, *_ = primals
    token, *sums = _all_reduce_p.bind(*primals, number=number, **params)
    slopes = [ad.instantiate_zeros(t) for t in tangents[_FIRST_LEAF:]]
    number = order.derived(number, "tangent")
    _, *slopes = _all_reduce_p.bind(rank, group, scale, token, *slopes, number=number, **params)
    return [token, *sums], [ad.Zero(jax.typeof(token).to_tangent_aval()), *slopes]


def _transpose(
    cotangents: Sequence[Any], rank: Any, group: Any, scale: Any, token: Any, *leaves: Any,
    axes: tuple[str, ...], number: int, **params: Any,
) -> list[Any]:  # fmt: skip
    # As for psum: the loss of each rank depends on the sum, so that their cotangents add up,
    # except where a typed shard_map has the same cotangent everywhere.
    given = [ad.instantiate_zeros(ct) for ct in cotangents[1:]]
    if axis.is_typed(axes):
        given = [axis.as_varying(scaled(ct, scale), axes) for ct in given]
    else:
        number = order.derived(number, "cotangent")
        _, *given = _all_reduce_p.bind(
            rank, group, scale, token, *given, axes=axes, number=number, **params
        )
    asked = map(ad.is_undefined_primal, leaves)
    given = [ct if is_asked else None for ct, is_asked in zip(given, asked, strict=True)]
    return [None] * _FIRST_LEAF + given


# Rows of an array and ranks are added up independently.
def _batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    return _all_reduce_p.bind(*args, **params), dims[_FIRST_LEAF - 1 :]


ad.primitive_jvps[_all_reduce_p] = _jvp
ad.primitive_transposes[_all_reduce_p] = _transpose
batching.primitive_batchers[_all_reduce_p] = _batch
mlir.register_lowering(_all_reduce_p, _lower, platform="cpu", cacheable=False)
