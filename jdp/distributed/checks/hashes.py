"""Hashes of arrays on their devices, and checksums compared by a running step."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp import axis, jax_compat, pytrees

_ODD = [np.uint32(x) for x in (0x9E3779B1, 0x85EBCA77, 0x85EBCA6B, 0xC2B2AE35, 0x2C1B3C6D)]


def folded(
    where: Mesh, leaves: list[jax.Array], numbers: Sequence[int]
) -> tuple[list[jax.Array], jax.Array]:
    """Hash each device's shards; `numbers` (>= 0) let equal leaves contribute differently."""
    hashed, total = [], zero(where)
    for leaf, number in zip(leaves, numbers, strict=True):
        spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else P()
        each, total = _program(where, spec)(leaf, np.uint32(2 * number + 1), total)
        hashed.append(each)
    return hashed, total


@functools.cache
def zero(where: Mesh) -> jax.Array:
    """Return the combination of no hashes: `[*where.devices.shape, 2]` uint32."""
    zeros = np.zeros((*where.devices.shape, 2), np.uint32)
    sharding = NamedSharding(where, P(*where.axis_names))
    return jax.make_array_from_callback(zeros.shape, sharding, lambda index: zeros[index])


def parts(hashed: Sequence[jax.Array]) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Return (mesh position, hashes `[leaf, 2]`) of each local device."""
    found: dict[tuple[int, ...], list[np.ndarray]] = {}
    for each in hashed:
        for shard in each.addressable_shards:
            position = tuple(part.start or 0 for part in shard.index[:-1])
            found.setdefault(position, []).append(np.asarray(shard.data).reshape(2))
    return [(position, np.stack(values)) for position, values in found.items()]


# A program for each type of leaf: one for a whole model compiles for seconds.
@functools.cache
def _program(where: Mesh, spec: P) -> Any:
    device = P(*where.axis_names)

    def on_device(leaf: jax.Array, factor: jax.Array, total: jax.Array) -> Any:
        hashed = jnp.stack(of_part(leaf, _offsets(leaf, spec, where))).reshape(total.shape)
        return hashed, total + hashed * factor

    # No collective: it could deadlock with a step in flight.
    return jax.jit(
        jax_compat.shard_map(
            on_device,
            mesh=where,
            in_specs=(spec, P(), device),
            out_specs=(device, device),
            check_vma=False,
        )
    )


def _offsets(x: jax.Array, spec: P, where: Mesh) -> list[tuple[Any, int]]:
    """Return (offset of this device's shard, whole length) for each dim."""
    parts = [*spec, *[None] * (x.ndim - len(spec))]
    split = [() if part is None else axis.names(part) for part in parts]
    num_parts = [math.prod(where.shape[name] for name in names) for names in split]
    return [
        (lax.axis_index(names) * size if names else 0, num * size)
        for names, num, size in zip(split, num_parts, x.shape, strict=True)
    ]


def of_part(x: jax.Array, offsets: list[tuple[Any, int]]) -> tuple[Any, Any]:
    """Return two hashes of a shard: sums over its words and their positions, modulo 2**32.

    The hashes of all shards add up to that of the whole array. Each term is a bijection of its
    word, so a difference in one word always changes the hash.
    """
    zero = np.uint32(0)
    if not x.size:  # XLA of JAX 0.11.2 crashes on an empty sum
        return zero, zero
    words = words_of(x)
    offsets = offsets + [(0, size) for size in words.shape[x.ndim :]]
    position = jnp.zeros(words.shape, jnp.uint32)
    for dim, (offset, size) in enumerate(offsets):
        index = lax.broadcasted_iota(jnp.uint32, words.shape, dim) + jnp.uint32(offset)
        position = position * np.uint32(size % 2**32) + index
    mixed = words * _ODD[0] + position * _ODD[1]
    mixed = (mixed ^ (mixed >> 16)) * _ODD[2]
    mixed = (mixed ^ (mixed >> 13)) * _ODD[3]
    mixed = mixed ^ (mixed >> 16)
    other = (mixed ^ (mixed >> 15)) * _ODD[4]
    # XLA:CPU sums a pair many times faster than two arrays in turn.
    return lax.reduce(
        (mixed, other),
        (zero, zero),
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        tuple(range(words.ndim)),
    )


def words_of(x: jax.Array) -> jax.Array:
    """Return an array's bits as uint32, on the device; large elements add a dim."""
    x = pytrees.without_key(x)
    if jax.typeof(x).memory_space != jax.memory.Space.Device:
        x = jax.device_put(x, jax.memory.Space.Device)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if pytrees.is_not_compiled(x.dtype):
        raise TypeError(f"XLA cannot compute with {x.dtype}, so jdp cannot compare its bits.")
    num_bits = pytrees.num_bits(x.dtype)
    if num_bits >= 32:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{num_bits}")).astype(jnp.uint32)


# Elements and leaves of an argument hashed by the step itself. A separate program hashes a larger
# one, unless it is the previous call's.
_SMALL_SIZE, _SMALL_LEAVES = 1 << 14, 16

_PIECE_BITS = 8  # float32 sums of such numbers are exact on up to 65,536 ranks


def is_small(arg: Any) -> bool:
    """Whether the step itself hashes an argument."""
    # A tracer has no bytes.
    leaves = jax.tree.leaves(arg)
    return len(leaves) <= _SMALL_LEAVES and sum(map(np.size, leaves)) <= _SMALL_SIZE


def checksum_pieces(rest: Sequence[Any], checksums: Sequence[jax.Array]) -> jax.Array:
    """Hash a rank's arguments inside the step: `[4]` float32, small integers."""
    total = jnp.uint32(0)
    for i, checksum in enumerate(checksums):
        each = checksum.reshape(-1, 2).sum(0, dtype=jnp.uint32)
        total += (each[0] ^ (each[1] * np.uint32(0x9E3779B1))) * np.uint32(2 * i + 3)
    leaves = [jnp.asarray(leaf) for arg in rest if is_small(arg) for leaf in jax.tree.leaves(arg)]
    words = [words_of(leaf).reshape(-1) for leaf in leaves if leaf.size]
    if words:
        together = jnp.concatenate(words)
        total += of_part(together, [(0, together.size)])[0]
    shifts = np.arange(0, 32, _PIECE_BITS, dtype=np.uint32)
    return ((total >> shifts) & np.uint32(2**_PIECE_BITS - 1)).astype(jnp.float32)


def checksums_differ(mine: jax.Array, sums: jax.Array, num_ranks: int) -> jax.Array:
    """Whether this rank's checksum pieces, `[4]` float32, differ from the others': `[1]` bool."""
    return jnp.any(sums != mine.astype(sums.dtype) * num_ranks).reshape(1)
