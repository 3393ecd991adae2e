"""Which ranks share a host, and the memory through which their processes reduce."""

import functools
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jdp import store
from jdp.collectives import library


def why_apart(mesh: Mesh | None, axes: tuple[str, ...]) -> str | None:
    """Say in a sentence why the ranks of `axes` have no memory in common, or None if they have.

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
    """Give the key of the shared memory of these ranks; 0 if they are all of this process."""
    if mesh is None or jax.process_count() == 1:
        return 0
    return _shared(mesh, axes).communicator


class _Shared(NamedTuple):
    communicator: int
    why_not: str | None


@functools.cache
def _shared(mesh: Mesh, axes: tuple[str, ...]) -> _Shared:
    groups = _groups(mesh, axes)
    if all(len(set(group)) == 1 for group in groups):
        return _Shared(0, None)
    if not store.is_open():
        return _Shared(0, "the processes were not joined by jax.distributed.initialize.")
    # The same in every run: it becomes part of the program, which the compilation cache keeps.
    ids = [device.id for device in mesh.devices.flat]
    key = 1 + zlib.crc32(repr((ids, mesh.devices.shape, mesh.axis_names, axes)).encode())
    return _Shared(key, _attach(key, groups))


# [group][rank] -> process. A group: the ranks that reduce among themselves.
def _groups(mesh: Mesh, axes: tuple[str, ...]) -> list[list[int]]:
    names = list(mesh.axis_names)
    others = [i for i, name in enumerate(names) if name not in axes]
    devices = np.transpose(mesh.devices, others + [names.index(name) for name in axes])
    num_ranks = int(np.prod([mesh.shape[name] for name in axes]))
    return [[d.process_index for d in group] for group in devices.reshape(-1, num_ranks)]


def _attach(key: int, groups: list[list[int]]) -> str | None:
    me = jax.process_index()
    peers = sorted({process for group in groups for process in group})
    host = _host()
    for process, theirs in _exchanged(f"jdp/{key}/host", peers, host):
        if theirs != host:
            return f"process {process} is on another host than process {me}."
    failure = ""
    try:
        for number, group in enumerate(groups):
            if group[0] == me:
                segment = library.create_segment(len(group))
                store.put(f"jdp/{key}/group/{number}", json.dumps(segment))
        for number, group in enumerate(groups):
            if me in group:
                segment = library.Segment(*json.loads(_get(f"jdp/{key}/group/{number}", group[0])))
                ranks = [rank for rank, process in enumerate(group) if process == me]
                library.attach(key, number, len(group), ranks, segment)
    except OSError as error:
        failure = str(error)
    for process, theirs in _exchanged(f"jdp/{key}/attached", peers, failure):
        if theirs:
            return f"process {process} cannot share memory with the others ({theirs})."
    return None


# Yields (process, value), process 0 first, so that all come to the same answer.
def _exchanged(key: str, peers: list[int], value: str) -> Iterator[tuple[int, str]]:
    store.put(f"{key}/{jax.process_index()}", json.dumps(value))
    for process in peers:
        yield process, json.loads(_get(f"{key}/{process}", process))


def _get(key: str, process: int) -> str:
    timeout_s = library.timeout_s()
    value = store.get(key, timeout_s=timeout_s)
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
