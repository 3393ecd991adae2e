"""Which ranks share a host, and their shared memory."""

import functools
import math
import zlib
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.distributed import agree, kv_store
from jdp.distributed.this_process import own_host
from jdp.worker import progress


def why_apart(mesh: Mesh | None, axes: tuple[str, ...]) -> str | None:
    """Return why ranks share no memory; all processes attach it in a mesh's first call."""
    if jax.process_count() == 1:
        return None
    if mesh is None:
        return (
            f"there are {jax.process_count()} processes, and code inside a shard_map cannot know "
            "which of them run it. Write sync_gradients(..., mesh=mesh)."
        )
    return _shared(mesh, axes).why_not


def communicator(mesh: Mesh | None, axes: tuple[str, ...]) -> int:
    """Return the memory's key for ranks along `axes`, 0 within one process."""
    if mesh is None or jax.process_count() == 1:
        return 0
    return _shared(mesh, axes).communicator


class _Shared(NamedTuple):
    communicator: int
    why_not: str | None


@functools.cache
def _shared(mesh: Mesh, axes: tuple[str, ...]) -> _Shared:
    processes = [[device.process_index for device in group] for group in groups(mesh, axes)]
    if all(len(set(group)) == 1 for group in processes):
        return _Shared(0, None)
    if not kv_store.is_open():
        return _Shared(0, NOT_JOINED)
    key = key_of(mesh, axes)
    return _Shared(key, _attach(key, processes))


NOT_JOINED = "jax.distributed.initialize did not join the processes."


def key_of(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """Return the key of the ranks' communicator, > 0, equal in every process and run."""
    ids = [device.id for device in mesh.devices.flat]
    return 1 + zlib.crc32(repr((ids, mesh.devices.shape, mesh.axis_names, axes)).encode())


def groups(mesh: Mesh, axes: tuple[str, ...]) -> np.ndarray:
    """Return the devices that reduce together, `[group][rank]`."""
    names = list(mesh.axis_names)
    others = [i for i, name in enumerate(names) if name not in axes]
    devices = np.transpose(mesh.devices, others + [names.index(name) for name in axes])
    return devices.reshape(-1, int(np.prod([mesh.shape[name] for name in axes])))


def why_on_several(peers: tuple[int, ...]) -> str | None:
    """Return why `peers` are on several hosts; a collective call."""
    me, host = jax.process_index(), own_host()
    for process, theirs in agree.all_gather(peers, host, what="hosts").items():
        if theirs != host:
            return f"process {process} is on another host than process {me}."
    return None


def _attach(key: int, groups: list[list[int]]) -> str | None:
    me = jax.process_index()
    peers = tuple(sorted({process for group in groups for process in group}))
    with agree.propagating_errors(peers, "while it opened memory for gradient reductions"):
        if reason := why_on_several(peers):
            return reason
        missing = agree.all_gather(peers, cpu_runtime.why_missing(), what="native libraries")
        for process, theirs in missing.items():
            if theirs:
                return f"process {process} has no native library: {theirs}"
        mine = [_made(len(group)) if group[0] == me else None for group in groups]
        made = agree.all_gather(peers, mine, what="memory for gradient reductions")
        failure = _why_not_open(key, groups, [made[group[0]][i] for i, group in enumerate(groups)])
        failures = agree.all_gather(peers, failure, what="whether memory is open")
    for process, theirs in failures.items():
        if theirs:
            return f"process {process} cannot share memory with the others ({theirs})."
    if not math.isinf(progress.own.longest_wait_s):
        # A process may save or compile for that long.
        cpu_runtime.wait_at_least(progress.own.longest_wait_s)
    return None


def _made(num_ranks: int) -> cpu_runtime.Segment | str:
    """Create memory, or return why not: the other processes wait for an answer."""
    try:
        return cpu_runtime.create_segment(num_ranks)
    except OSError as error:
        return str(error)


def _why_not_open(key: int, groups: list[list[int]], made: list[list[int] | str]) -> str | None:
    me = jax.process_index()
    try:
        for number, (group, segment) in enumerate(zip(groups, made, strict=True)):
            if me in group:
                if isinstance(segment, str):
                    raise OSError(segment)
                ranks = [rank for rank, process in enumerate(group) if process == me]
                cpu_runtime.attach(key, number, len(group), ranks, cpu_runtime.Segment(*segment))
    except OSError as error:
        return str(error)
    return None
