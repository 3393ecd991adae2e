"""Which ranks share a host, and the memory through which their processes reduce."""

import functools
import json
import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.distributed import kv_store
from jdp.worker import progress


def why_apart(mesh: Mesh | None, axes: tuple[str, ...]) -> str | None:
    """Return in a sentence why the ranks of `axes` have no memory in common, or None if they have.

    The first call for a mesh of several processes of one host attaches that memory: all of them
    must make it.

    Args:
      mesh: where the axes lie, None if that is not known.
      axes: names of the mesh axes that are reduced over.
    """
    if jax.process_count() == 1:
        return None
    if mesh is None:
        return (
            f"there are {jax.process_count()} processes, and which of them a shard_map runs on "
            "cannot be seen from inside: hand over sync_gradients(..., mesh=mesh)."
        )
    return _shared(mesh, axes).why_not


def communicator(mesh: Mesh | None, axes: tuple[str, ...]) -> int:
    """Return the key of the shared memory of these ranks; 0 if they are all of this process.

    Args:
      mesh: where the axes lie, None if that is not known.
      axes: names of the mesh axes that are reduced over.
    """
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


NOT_JOINED = "the processes were not joined by jax.distributed.initialize."


def key_of(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """Return the key of the communicator of these ranks, > 0: the same in every process and run."""
    # It becomes part of the program, which the compilation cache keeps.
    ids = [device.id for device in mesh.devices.flat]
    return 1 + zlib.crc32(repr((ids, mesh.devices.shape, mesh.axis_names, axes)).encode())


def groups(mesh: Mesh, axes: tuple[str, ...]) -> np.ndarray:
    """Return the devices that reduce among themselves: `[group][rank]`, each device once."""
    names = list(mesh.axis_names)
    others = [i for i, name in enumerate(names) if name not in axes]
    devices = np.transpose(mesh.devices, others + [names.index(name) for name in axes])
    return devices.reshape(-1, int(np.prod([mesh.shape[name] for name in axes])))


def why_on_several(room: str, peers: list[int]) -> str | None:
    """Return in a sentence which process is on another host, or None.

    Args:
      room: where in the store the answers stand, once in a run.
      peers: all processes that call this.
    """
    me, host = jax.process_index(), _host()
    for process, theirs in exchanged(f"{room}/host", peers, host):
        if theirs != host:
            return f"process {process} is on another host than process {me}."
    return None


def exchanged(key: str, peers: list[int], value: Any) -> Iterator[tuple[int, Any]]:
    """Yield (process, value) of all processes, in one order: all come to the same answer.

    Args:
      key: where in the store the values stand, once in a run.
      peers: all processes that call this; the store is not needed for one alone.
      value: what JSON can hold.

    Raises:
      RuntimeError: if a process does not come within `library.timeout_s()`.
    """
    me = jax.process_index()
    if peers == [me]:
        yield me, value
        return
    kv_store.put(f"{key}/{me}", json.dumps(value))
    for process in peers:
        yield process, json.loads(_get(f"{key}/{process}", process))


def _attach(key: int, groups: list[list[int]]) -> str | None:
    me = jax.process_index()
    peers = sorted({process for group in groups for process in group})
    if reason := why_on_several(f"jdp/{key}", peers):
        return reason
    for process, theirs in exchanged(f"jdp/{key}/library", peers, cpu_runtime.why_missing()):
        if theirs:
            return f"process {process} has no native library: {theirs}"
    for number, group in enumerate(groups):
        if group[0] == me:
            kv_store.put(f"jdp/{key}/group/{number}", json.dumps(_made(len(group))))
    failure = None
    try:
        for number, group in enumerate(groups):
            if me in group:
                made = json.loads(_get(f"jdp/{key}/group/{number}", group[0]))
                if isinstance(made, str):
                    raise OSError(made)
                ranks = [rank for rank, process in enumerate(group) if process == me]
                cpu_runtime.attach(key, number, len(group), ranks, cpu_runtime.Segment(*made))
    except OSError as error:
        failure = str(error)
    for process, theirs in exchanged(f"jdp/{key}/attached", peers, failure):
        if theirs:
            return f"process {process} cannot share memory with the others ({theirs})."
    if not math.isinf(progress.longest_wait_s()):
        # A process that saves or compiles meanwhile has that long; the watch sees who hangs.
        cpu_runtime.wait_at_least(progress.longest_wait_s())
    return None


def _made(num_ranks: int) -> cpu_runtime.Segment | str:
    """Make memory, or say why there is none: the others must not wait for it."""
    try:
        return cpu_runtime.create_segment(num_ranks)
    except OSError as error:
        return str(error)


def _get(key: str, process: int) -> str:
    timeout_s = 300.0 if cpu_runtime.why_missing() else cpu_runtime.timeout_s()
    value = kv_store.get(key, timeout_s=timeout_s)
    if value is None:
        raise RuntimeError(
            f"process {process} did not come within {timeout_s:g} s to agree on how gradients are "
            f"reduced; process {jax.process_index()} waits for it. All processes must trace the "
            "same steps in the same order."
        )
    return value


# Processes that see each other in /proc. Another network is another host, also on one machine.
def _host() -> str:
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid")]
    return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces])
