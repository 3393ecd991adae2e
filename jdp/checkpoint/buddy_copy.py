"""Copies the parts of a split state to the devices of the next host, which commits them too."""

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp import jax_compat
from jdp.checkpoint import shards

Rounds = tuple[tuple[tuple[int, int], ...], ...]  # pairs of positions in a mesh: source, target


def copies(
    arrays: Sequence[jax.Array], parts: Sequence[shards.LeafPart], hosts: tuple[int, ...]
) -> dict[int, jax.Array]:
    """Return the parts of the host before this one that this process keeps, by their numbers.

    All processes make this call.
    """
    found: dict[int, jax.Array] = {}
    for mesh, pairs, leaves in _exchanges(arrays, parts, hosts):
        specs = tuple(_spec(arrays[leaf]) for leaf in leaves)
        moved = _mover(mesh, specs, pairs)(*(arrays[leaf] for leaf in leaves))
        for (leaf, numbers), x in zip(leaves.items(), moved, strict=True):
            here = {shard.device: shard.data for shard in x.addressable_shards}
            targets = _targets(arrays[leaf], mesh, pairs)
            for n in numbers:
                if (target := targets.get(parts[n][1:])) in here:
                    found[n] = here[target]
    return found


def kept(
    arrays: Sequence[jax.Array], parts: Sequence[shards.LeafPart], hosts: tuple[int, ...]
) -> list[int]:
    """Return the numbers of the parts that `copies` returns, without communication."""
    found = set()
    for mesh, pairs, leaves in _exchanges(arrays, parts, hosts):
        for leaf, numbers in leaves.items():
            targets = _targets(arrays[leaf], mesh, pairs)
            for n in numbers:
                target = targets.get(parts[n][1:])
                if target is not None and target.process_index == jax.process_index():
                    found.add(n)
    return sorted(found)


# Yields a mesh, a round, and the leaves on that mesh with the numbers of their parts.
def _exchanges(
    arrays: Sequence[jax.Array], parts: Sequence[shards.LeafPart], hosts: tuple[int, ...]
) -> Iterator[tuple[Mesh, tuple[tuple[int, int], ...], dict[int, list[int]]]]:
    meshes: dict[Mesh, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for n, part in enumerate(parts):
        sharding = arrays[part.leaf].sharding
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            meshes[sharding.mesh][part.leaf].append(n)
    for mesh, leaves in meshes.items():
        for pairs in rounds([hosts[device.process_index] for device in mesh.devices.flat]):
            yield mesh, pairs, leaves


def rounds(hosts: Sequence[int]) -> Rounds:
    """Return which device sends to which, in rounds in which each sends and receives once.

    >>> rounds([0, 0, 1, 1, 2, 2])
    (((0, 2), (1, 3), (2, 4), (3, 5), (4, 0), (5, 1)),)
    >>> rounds([0, 0, 1])
    (((0, 2), (2, 0)), ((1, 2),))
    >>> rounds([0, 0])
    ()
    """
    devices: dict[int, list[int]] = defaultdict(list)
    for position, host in enumerate(hosts):
        devices[host].append(position)
    if len(devices) == 1:
        return ()
    order = sorted(devices)
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for host, following in zip(order, [*order[1:], order[0]], strict=True):
        targets = devices[following]
        for i, source in enumerate(devices[host]):
            found[i // len(targets)].append((source, targets[i % len(targets)]))
    return tuple(tuple(found[number]) for number in sorted(found))


def _spec(x: jax.Array) -> PartitionSpec:
    assert isinstance(x.sharding, NamedSharding)
    return x.sharding.spec


@functools.lru_cache(maxsize=16)
def _mover(mesh: Mesh, specs: tuple[PartitionSpec, ...], pairs: tuple[tuple[int, int], ...]) -> Any:
    def move(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.lax.ppermute(x, mesh.axis_names, pairs) for x in arrays)

    moved = jax_compat.shard_map(move, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    return jax.jit(moved)


# The device that a part is sent to in a round, by its box and writer.
def _targets(
    x: jax.Array, mesh: Mesh, pairs: tuple[tuple[int, int], ...]
) -> dict[tuple[shards.Box, int], jax.Device]:
    devices, index_of = mesh.devices.flat, x.sharding.devices_indices_map(x.shape)
    first: dict[tuple[shards.Box, int], jax.Device] = {}
    for device, index in index_of.items():
        first.setdefault((shards.box_of(index, x.shape), device.process_index), device)
    target = {devices[source]: devices[to] for source, to in pairs}
    return {part: target[device] for part, device in first.items() if device in target}
