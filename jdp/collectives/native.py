"""The compiled all-reduce: leaves are summed where they lie.

On CPUs the threads of the ranks do the work, in `jdp/csrc/cpu`; most of this file is the primitive
that stands for it in a traced program. On GPUs it is a pair of calls of `jdp/csrc/cuda`.
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
from jdp.collectives import call_order
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.collectives.cpu import shared_memory
from jdp.collectives.gpu import communicator
from jdp.collectives.gpu.start_done import pairs, split
from jdp.collectives.xla import Scale, scaled, xla

_SUMMED_DTYPES = frozenset(
    "float32 float64 bfloat16 float16 int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()
)

# In one call. MLIR compares each leaf with each other, which takes 1.5 s for 10,000.
_MAX_LEAVES = 512


def native(
    buckets: Sequence[Sequence[jax.Array]],
    axis_name: AxisName,
    *,
    scale: Scale = 1.0,
    mesh: Mesh | None = None,
    algorithm: str = "direct",
) -> list[list[jax.Array]]:
    """Sum every leaf over `axis_name` in compiled code of jdp's own, on CPUs or GPUs of one host.

    The code for GPUs was compiled and never run: before it is used for the first time it is
    compared with `lax.psum`. It has no derivatives, unlike that for CPUs.

    Args:
      buckets: lists of leaves, one dtype each; any shapes. bfloat16 and float16 are added up in
        float32 and rounded once. XLA sums dtypes that the code does not know.
      axis_name: a name, or a tuple of names, bound by `shard_map` or `pmap`.
      scale: multiplies the sum; a number, or `[]` float, the same on every rank.
      mesh: where the axis lies; needed where there are several processes, or GPUs. To compile
        for a mesh, its devices need not be there.
      algorithm: "direct": each part of a bucket is summed from all ranks by whichever rank is
        free; "ring": chunks go round. Between GPUs the size of a bucket decides.

    Returns:
      The same lists, summed and scaled, in the dtype of each leaf; equal bits on every rank.

    Raises:
      ValueError: if it cannot run here, saying why; `collectives.auto` takes XLA's sum instead.
    """
    axes = axis.in_mesh_order(axis_name)  # one communicator, whatever the order of the names
    _require(_why_unable(axes, mesh))
    if _platform(mesh) == "gpu":
        return _on_gpus(buckets, axes, scale, mesh)
    options = dict(
        axes=axes,
        num_ranks=axis.size(axes),
        algorithm=("direct", "ring").index(algorithm),
        communicator=shared_memory.communicator(mesh, axes),
    )
    rank, group = lax.axis_index(axes), _group(axes)
    token = call_order.token()
    token = np.zeros(1, np.float32) if token is None else token
    results = []
    for bucket in buckets:
        dtype = bucket[0].dtype
        if dtype.name not in _SUMMED_DTYPES:
            results += xla([bucket], axes, scale=scale)
            continue
        # A number is part of the one rounding; integers are scaled as XLA's sums are.
        is_fused = isinstance(scale, (int, float)) and jnp.issubdtype(dtype, jnp.floating)
        fused = np.asarray(scale if is_fused else 1, "float64" if dtype == "float64" else "float32")
        sums: list[jax.Array] = []
        for first in range(0, len(bucket), _MAX_LEAVES):
            part = bucket[first : first + _MAX_LEAVES]
            number = call_order.next_number(part)
            token, *leaves = _all_reduce_p.bind(
                rank, group, fused, token, *part, number=number, **options
            )
            sums += leaves
        results.append(sums if is_fused else [scaled(leaf, scale) for leaf in sums])
    if isinstance(token, jax.Array):
        call_order.passed(token)
    return results


def why_not(axes: tuple[str, ...], mesh: Mesh | None) -> str | None:
    """Return in a sentence why `auto` does not choose `native` where this is traced, or None.

    The answer depends on devices and hosts alone, so that it is the same in every process.

    Args:
      axes: names of the mesh axes that are reduced over.
      mesh: where they lie, None if that is not known.
    """
    if _platform(mesh) == "gpu":
        return (
            "the ranks are on GPUs, where it has not been measured yet; to try it, write "
            "all_reduce=jdp.collectives.native."
        )
    return _why_unable(axes, mesh)


def starts_when_ready(all_reduce: Any, mesh: Mesh | None) -> bool:
    """Whether an algorithm starts a bucket once it is complete, so that their order counts.

    Args:
      all_reduce: the algorithm.
      mesh: where it would run, None if that is not known.
    """
    return all_reduce is split or (all_reduce is native and _platform(mesh) == "gpu")


def _platform(mesh: Mesh | None) -> str:
    return axis.platform(mesh)


def _require(reason: str | None) -> None:
    if reason:
        raise ValueError(
            f"collectives.native cannot run here: {reason} Write all_reduce=jdp.collectives.auto, "
            "which then takes XLA's sum, or jdp.collectives.xla."
        )


def _why_unable(axes: tuple[str, ...], mesh: Mesh | None) -> str | None:
    platform = _platform(mesh)
    if platform not in ("cpu", "gpu"):
        return f"the ranks are on {platform!r}, and it is written for CPUs and GPUs."
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
    if platform == "cpu":
        # Processes first: one of them may have no library, and all must come to one answer.
        return shared_memory.why_apart(mesh, axes) or cpu_runtime.why_missing()
    if mesh is None:
        return (
            "which GPUs a shard_map runs on cannot be seen from inside: hand over "
            "sync_gradients(..., mesh=mesh)."
        )
    return communicator.communicator(mesh, axes).why_not


def _on_gpus(
    buckets: Sequence[Sequence[jax.Array]], axes: tuple[str, ...], scale: Scale, mesh: Mesh | None
) -> list[list[jax.Array]]:
    # Integers are scaled as XLA's sums are.
    ours = [
        bucket[0].dtype.name in _SUMMED_DTYPES and jnp.issubdtype(bucket[0].dtype, jnp.floating)
        for bucket in buckets
    ]
    sent = [bucket for bucket, is_ours in zip(buckets, ours, strict=True) if is_ours]
    numbers = [call_order.next_number(bucket) for bucket in sent]
    key = reserved(sent, numbers, axes, mesh)
    reduced = iter(pairs(sent, axes, scale=scale, numbers=numbers, communicator=key))
    return [
        next(reduced) if is_ours else xla([bucket], axes, scale=scale)[0]
        for bucket, is_ours in zip(buckets, ours, strict=True)
    ]


def reserved(
    buckets: Sequence[Sequence[jax.Array]],
    numbers: Sequence[int],
    axes: tuple[str, ...],
    mesh: Mesh | None,
) -> int:
    """Return the key of the communicator of these GPUs, once it has room for some more buckets.

    Args:
      buckets: lists of leaves.
      numbers: of the buckets in the program, see `call_order.next_number`.
      axes: the ranks.
      mesh: of GPUs.

    Raises:
      ValueError: if the communicator cannot be used, or has no room.
    """
    _require(_why_unable(axes, mesh))
    assert mesh is not None  # that would have been a reason
    here = communicator.communicator(mesh, axes)
    _require(here.why_not)
    try:
        here.reserve(dict(zip(numbers, map(communicator.room_of, buckets), strict=True)))
    except communicator.UnavailableError as error:
        _require(str(error))
    return here.key


def _group(axes: tuple[str, ...]) -> jax.Array:
    # Ranks that differ along another axis are in another reduction.
    around = jax.sharding.get_abstract_mesh()
    others = tuple(n for n in around.axis_names if n in around.manual_axes and n not in axes)
    return lax.axis_index(others) if others else jnp.int32(0)


# (rank, group, scale, token, *leaves) -> (token, *leaves)
_all_reduce_p = jax.extend.core.Primitive("jdp_all_reduce")
_all_reduce_p.multiple_results = True
_FIRST_LEAF = call_order.TOKEN + 1


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
    rule = jax.ffi.ffi_lowering(cpu_runtime.TARGET, operand_output_aliases=aliases)
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
    number = call_order.derived(number, "tangent")
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
        number = call_order.derived(number, "cotangent")
        _, *given = _all_reduce_p.bind(
            rank, group, scale, token, *given, axes=axes, number=number, **params
        )
    asked = map(ad.is_undefined_primal, leaves)
    given = [ct if is_asked else None for ct, is_asked in zip(given, asked, strict=True)]
    return [None] * _FIRST_LEAF + given


# Rows of an array and ranks are added up independently, unless a vmap gives its rows the name of an
# axis, which then means them.
def _batch(
    axis_data: Any, args: Sequence[Any], dims: Sequence[Any], *, axes: Any, **params: Any
) -> tuple[Any, Any]:
    if axis_data.name in axes:
        remaining = tuple(name for name in axes if name != axis_data.name)
        sums = [
            _sum_of_rows(x, dim, axis_data.size, remaining, scale=args[2])
            for x, dim in zip(args[_FIRST_LEAF:], dims[_FIRST_LEAF:], strict=True)
        ]
        return [args[_FIRST_LEAF - 1], *sums], [dims[_FIRST_LEAF - 1]] + [None] * len(sums)
    return _all_reduce_p.bind(*args, axes=axes, **params), dims[_FIRST_LEAF - 1 :]


def _sum_of_rows(x: Any, dim: Any, size: int, axes: tuple[str, ...], *, scale: Any) -> jax.Array:
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32)) if is_float else x
    total = wide * size if dim is None else wide.sum(dim, dtype=wide.dtype)
    total = lax.psum(total, axes) if axes else total
    return (total * scale).astype(x.dtype) if is_float else total


ad.primitive_jvps[_all_reduce_p] = _jvp
ad.primitive_transposes[_all_reduce_p] = _transpose
batching.fancy_primitive_batchers[_all_reduce_p] = _batch
mlir.register_lowering(_all_reduce_p, _lower, platform="cpu", cacheable=False)
