"""The compiled all-reduce: `jdp/csrc/cpu` in place on CPUs, `jdp/csrc/cuda` on GPUs."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jdp import axis
from jdp.axis import AxisName
from jdp.collectives import call_order
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.collectives.cpu import shared_memory
from jdp.collectives.cpu.primitives import SUMMED_DTYPES, Calls, all_reduce_p
from jdp.collectives.gpu import communicator
from jdp.collectives.gpu.start_done import pairs, split
from jdp.collectives.xla import Scale, xla

_ALGORITHMS = ("direct", "ring")

_platform = axis.platform


def native(
    buckets: Sequence[Sequence[jax.Array]],
    axis_name: AxisName,
    *,
    scale: Scale = 1.0,
    mesh: Mesh | None = None,
    algorithm: str = "direct",
) -> list[list[jax.Array]]:
    """Sum every leaf over `axis_name` in jdp's compiled code, on CPUs or GPUs of one host.

    The GPU code ran with all ranks on one GPU, and never between GPUs. So before the first use its
    results are compared with those of `lax.psum`. Unlike the CPU code, it has no derivatives.

    Args:
      buckets: lists of leaves, one dtype each; any shapes. bfloat16 and float16 are summed in
        float32 and rounded once. XLA sums unsupported dtypes.
      axis_name: a name, or a tuple of names, bound by `shard_map` or `pmap`.
      scale: multiplies the sum; a number, or `[]` float, equal on all ranks.
      mesh: the ranks' mesh, needed for several processes or GPUs. To compile for a mesh, its
        devices need not exist.
      algorithm: "direct": each free rank sums a part of a bucket from all ranks; "ring": chunks
        move around a ring. Between GPUs the size of a bucket selects the algorithm.

    Returns:
      The same lists, summed and scaled, in each leaf's dtype; equal bits on every rank.

    Raises:
      ValueError: it cannot run here, with the reason; `collectives.auto` uses XLA instead.
    """
    axes = axis.in_mesh_order(axis_name)  # one communicator for any order of the names
    _require(_why_unable(axes, mesh))
    if _platform(mesh) == "gpu":
        return _on_gpus(buckets, axes, scale, mesh)
    calls = Calls(axes, mesh)
    results = []
    for bucket in buckets:
        if bucket[0].dtype.name in SUMMED_DTYPES:
            kind = _ALGORITHMS.index(algorithm)
            results.append(calls.summed(all_reduce_p, bucket, scale, algorithm=kind))
        else:
            results += xla([bucket], axes, scale=scale)
    calls.end()
    return results


def require_cpu(axes: tuple[str, ...], mesh: Mesh | None) -> None:
    """Raise a ValueError if native calls cannot run on CPUs."""
    platform = _platform(mesh)
    _require(
        _why_unable(axes, mesh)
        if platform == "cpu"
        else f"the ranks are on {platform!r}, but the other native collectives support only CPUs."
    )


def why_not(axes: tuple[str, ...], mesh: Mesh | None) -> str | None:
    """Return why `auto` does not choose `native`; equal in every process."""
    if _platform(mesh) == "gpu":
        return (
            "the ranks are on GPUs, where it is not benchmarked yet; to try it, write "
            "all_reduce=jdp.collectives.native."
        )
    return _why_unable(axes, mesh)


def starts_when_ready(all_reduce: Any, mesh: Mesh | None) -> bool:
    """Whether an algorithm starts each bucket when it is complete, so their order matters.

    Args:
      all_reduce: the algorithm.
      mesh: the ranks' mesh; None if unknown.
    """
    return all_reduce is split or (all_reduce is native and _platform(mesh) == "gpu")


def _require(reason: str | None) -> None:
    if reason:
        raise ValueError(
            f"collectives.native cannot run here: {reason} Write "
            "all_reduce=jdp.collectives.auto, which falls back to XLA's sum, or "
            "jdp.collectives.xla."
        )


def _why_unable(axes: tuple[str, ...], mesh: Mesh | None) -> str | None:
    platform = _platform(mesh)
    if platform not in ("cpu", "gpu"):
        return f"the ranks are on {platform!r}, but it supports only CPUs and GPUs."
    around = axis.enclosing_mesh()
    if not set(axes) <= set(around.manual_axes):
        return f"the axis {axes} is the axis of a vmap, not of a mesh of ranks."
    automatic = [
        name for name, size in around.shape.items() if size > 1 and name not in around.manual_axes
    ]
    if automatic:
        return (
            f"the mesh axis {automatic[0]!r} is left to the compiler, which would gather arrays "
            "split over it before a native call."
        )
    if platform == "cpu":
        # Ask the processes first: one may have no library, and all need the same answer.
        return shared_memory.why_apart(mesh, axes) or cpu_runtime.why_missing()
    if mesh is None:
        return (
            "code inside a shard_map cannot know which GPUs run it. Write sync_gradients(..., "
            "mesh=mesh)."
        )
    return communicator.communicator(mesh, axes).why_not


def _on_gpus(
    buckets: Sequence[Sequence[jax.Array]], axes: tuple[str, ...], scale: Scale, mesh: Mesh | None
) -> list[list[jax.Array]]:
    # Integers are scaled as XLA's sums are.
    ours = [
        bucket[0].dtype.name in SUMMED_DTYPES and jnp.issubdtype(bucket[0].dtype, jnp.floating)
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
    """Return the key of the GPUs' communicator, with memory for the buckets."""
    _require(_why_unable(axes, mesh))
    assert mesh is not None  # None would have raised above
    here = communicator.communicator(mesh, axes)
    _require(here.why_not)
    try:
        here.reserve(dict(zip(numbers, map(communicator.room_of, buckets), strict=True)))
    except communicator.UnavailableError as error:
        _require(str(error))
    return here.key
