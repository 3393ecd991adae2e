"""Hashes of arrays on their devices: two words for each leaf, which read it once."""

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

from jdp import axis, statics

_ODD = [np.uint32(x) for x in (0x9E3779B1, 0x85EBCA77, 0x85EBCA6B, 0xC2B2AE35, 0x2C1B3C6D)]


def of_leaves(where: Mesh, leaves: list[jax.Array]) -> jax.Array:
    """Hash every device's part of every leaf, in one program without a collective.

    Args:
      where: the mesh that all leaves lie on.
      leaves: arrays, replicated or split.

    Returns:
      `[*where.devices.shape, leaf, 2]` uint32: each device holds the hashes of its own parts.
      Nothing is waited for.
    """
    return folded(where, leaves, range(len(leaves)))[0]


def folded(
    where: Mesh, leaves: list[jax.Array], numbers: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """Hash as `of_leaves`, and fold the hashes of a device's parts into one.

    Args:
      where: the mesh that all leaves lie on.
      leaves: arrays, replicated or split.
      numbers: of each leaf, which tell it from others where the hashes are folded.

    Returns:
      The hashes, and `[*where.devices.shape, 2]` uint32.
    """
    shardings = (leaf.sharding for leaf in leaves)
    specs = tuple(x.spec for x in shardings if isinstance(x, NamedSharding))
    return _program(where, specs, tuple(numbers))(leaves)


def of_this_process(hashed: jax.Array) -> dict[int, str]:
    """Fetch what `of_leaves` returned: position of a device in the mesh -> its hashes in hex."""
    return {
        int(np.ravel_multi_index(position, hashed.shape[:-2])): values.tobytes().hex()
        for position, values in parts(hashed)
    }


def parts(hashed: jax.Array) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Fetch what `of_leaves` returned for the devices of this process: where, and `[leaf, 2]`."""
    return [
        (tuple(each.start or 0 for each in shard.index[:-2]), np.asarray(shard.data).reshape(-1, 2))
        for shard in hashed.addressable_shards
    ]


@functools.cache
def _program(where: Mesh, specs: tuple[P, ...], numbers: tuple[int, ...]) -> Any:
    factors = np.array([2 * number + 1 for number in numbers], np.uint32).reshape(-1, 1)

    def on_device(leaves: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        each, both = (*[1] * where.devices.ndim, len(leaves), 2), (*[1] * where.devices.ndim, 2)
        if not leaves:  # XLA of JAX 0.12 refuses to multiply nothing.
            return jnp.zeros(each, jnp.uint32), jnp.zeros(both, jnp.uint32)
        pairs = [
            of_part(x, _offsets(x, spec, where)) for x, spec in zip(leaves, specs, strict=True)
        ]
        hashed = jnp.asarray(pairs, jnp.uint32)
        total = (hashed * factors).sum(0, dtype=jnp.uint32)
        return hashed.reshape(each), total.reshape(both)

    # A collective could meet those of a step in flight.
    return jax.jit(
        jax.shard_map(
            on_device,
            mesh=where,
            in_specs=([*specs],),
            out_specs=P(*where.axis_names),
            check_vma=False,
        )
    )


def _offsets(x: jax.Array, spec: P, where: Mesh) -> list[tuple[Any, int]]:
    """Return, for each dim of this device's part, where it begins and how long the whole is."""
    parts = [*spec, *[None] * (x.ndim - len(spec))]
    split = [() if part is None else axis.names(part) for part in parts]
    num_parts = [math.prod(where.shape[name] for name in names) for names in split]
    return [
        (lax.axis_index(names) * size if names else 0, num * size)
        for names, num, size in zip(split, num_parts, x.shape, strict=True)
    ]


def of_part(x: jax.Array, offsets: list[tuple[Any, int]]) -> tuple[Any, Any]:
    """Sum two hashes of each word and its position in the whole array, modulo 2**32.

    A sum, so that the hashes of parts add up to that of the whole. What is summed is a bijection
    of the word, so that one word that differs always shows.

    Args:
      x: this device's part of an array.
      offsets: for each dim, where the part begins and how long the whole is.
    """
    zero = np.uint32(0)
    if not x.size:  # XLA of JAX 0.11.2 crashes on the sum of nothing.
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
    # XLA's CPU backend sums a pair many times faster than it sums one array after the other.
    return lax.reduce(
        (mixed, other),
        (zero, zero),
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        tuple(range(words.ndim)),
    )


def words_of(x: jax.Array) -> jax.Array:
    """Return the bits of an array as uint32, in further dims where there are more of them."""
    x = statics.without_key(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    num_bits = jnp.finfo(x.dtype).bits if is_float else jnp.iinfo(x.dtype).bits
    if num_bits >= 32:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{num_bits}")).astype(jnp.uint32)
