"""The compiled all-reduce: `jdp/csrc/cpu` sums leaves in place on CPUs, `jdp/csrc/cuda` on GPUs."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jdp import axis
from jdp.axis import AxisName
from jdp.collectives import call_order
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.collectives.cpu import shared_memory
from jdp.collectives.cpu.primitive import all_reduce_p
from jdp.collectives.gpu import communicator
from jdp.collectives.gpu.start_done import pairs, split
from jdp.collectives.xla import Scale, scaled, xla

_SUMMED_DTYPES = frozenset(
    "float32 float64 bfloat16 float16 int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()
)

# MLIR compares each leaf of a call with each other, which takes 1.5 s for 10,000.
_MAX_LEAVES = 512

_platform = axis.platform


def native(
    buckets: Sequence[Sequence[jax.Array]],
    axis_name: AxisName,
    *,
    scale: Scale = 1.0,
    mesh: Mesh | None = None,
    algorithm: str = "direct",
) -> list[list[jax.Array]]:
    """Sum every leaf over `axis_name` in compiled code of jdp's own, on CPUs or GPUs of one host.

    The GPU code was compiled but has never been run, so before its first use it is compared with
    `lax.psum`. It has no derivatives, unlike that for CPUs.

    Args:
      buckets: lists of leaves, one dtype each; any shapes. bfloat16 and float16 are added up in
        float32 and rounded once. XLA sums dtypes that this code does not support.
      axis_name: a name, or a tuple of names, bound by `shard_map` or `pmap`.
      scale: multiplies the sum; a number, or `[]` float, the same on every rank.
      mesh: of the ranks; needed for several processes, or GPUs. To compile for a mesh, its devices
        need not exist.
      algorithm: "direct": a rank that is free sums a part of a bucket from all ranks; "ring":
        chunks go round. Between GPUs the size of a bucket decides.

    Returns:
      The same lists, summed and scaled, in the dtype of each leaf; equal bits on every rank.

    Raises:
      ValueError: if it cannot run here, with the reason; `collectives.auto` uses XLA instead.
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
            token, *leaves = all_reduce_p.bind(
                rank, group, fused, token, *part, number=number, **options
            )
            sums += leaves
        results.append(sums if is_fused else [scaled(leaf, scale) for leaf in sums])
    if isinstance(token, jax.Array):
        call_order.passed(token)
    return results


def why_not(axes: tuple[str, ...], mesh: Mesh | None) -> str | None:
    """Return in a sentence why `auto` does not choose `native` in the code being traced, or None.

    It depends on devices and hosts alone, so that it is the same in every process.
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
      mesh: of the ranks, None if it is not known.
    """
    return all_reduce is split or (all_reduce is native and _platform(mesh) == "gpu")


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
        return f"the axis {axes} is the axis of a vmap, and not of a mesh of ranks."
    automatic = [
        name for name, size in around.shape.items() if size > 1 and name not in around.manual_axes
    ]
    if automatic:
        return (
            f"the mesh axis {automatic[0]!r} is left to the compiler, which would gather arrays "
            "that are split over it before a call of foreign code."
        )
    if platform == "cpu":
        # Processes first: one of them may have no library, and all must come to one answer.
        return shared_memory.why_apart(mesh, axes) or cpu_runtime.why_missing()
    if mesh is None:
        return (
            "code inside a shard_map cannot know which GPUs run it: write "
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
    """Return the key of the communicator of these GPUs, with room for further buckets.

    The buckets have the `numbers` of `call_order.next_number`.

    Raises:
      ValueError: if the communicator cannot be used, or has no room.
    """
    _require(_why_unable(axes, mesh))
    assert mesh is not None  # None would have raised above
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
