"""`check_replicas`: do all ranks still hold the same bits?"""

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp import axis, exchange, mesh, rank_state, statics
from jdp.axis import AxisName

# (structure of a state, axes, every) -> how often it was to be checked.
_num_calls: Counter[Any] = Counter()

_ODD = [np.uint32(x) for x in (0x9E3779B1, 0x85EBCA77, 0x85EBCA6B, 0xC2B2AE35, 0x2C1B3C6D)]


def check_replicas(state: Any, *, every: int = 1, axis_name: AxisName = "data") -> str | None:
    """Make sure that every rank holds the same bits of the state, and give their hash.

    jdp proves that a step leaves equal states; what it cannot see are callbacks that are not
    pure, kernels that round differently from device to device, and memory that fails. Ranks then
    drift apart, which averaged metrics do not show.

    Every rank hashes its own copy, which reads it once, and only hashes are compared. The call
    waits for the steps that make the state. All processes must make it.

    Args:
      state: any tree; leaves that are no arrays are left out.
      every: of the calls with this number, for trees of this structure, look at the first and at
        each `every`-th after it, >= 1; the calls between do nothing.
      axis_name: the data axis of the mesh: a name, or a tuple of names.

    Returns:
      16 hexadecimal digits, the same for equal bits on any number of ranks, so that runs can be
      compared; None from a call that does nothing.

    Raises:
      RuntimeError: on every process, naming the rank that differs from most and the first leaf,
        or a process that does not come.
      ValueError: if `every` is not positive, or a leaf is split over `axis_name`.

    >>> import jax.numpy as jnp, jdp
    >>> mesh = jdp.init(cpu_ranks=2)
    >>> [jdp.check_replicas({"w": jnp.arange(3.0)}, every=2) for _ in range(3)]
    ['e8570daa370b0cbe', None, 'e8570daa370b0cbe']
    """
    if every < 1:
        raise ValueError(f"every={every} would never check: write every=1 for each call.")
    axes = axis.names(axis_name)
    key = jax.tree.structure(state), axes, every
    _num_calls[key] += 1
    if (_num_calls[key] - 1) % every:
        return None
    found = zip(jax.tree_util.tree_leaves_with_path(state), rank_state.flags(state), strict=True)
    named = [
        (path, rank_state.per_rank(leaf) if is_own else leaf)
        for (path, leaf), is_own in found
        if statics.is_array(leaf) and getattr(leaf, "dtype", None) != jax.dtypes.float0
    ]
    leaves = [leaf for _, leaf in named]
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(leaves)):
        raise TypeError("check_replicas looks at arrays: call it between steps, not inside one.")
    where = mesh.mesh_of(jax.tree.leaves(leaves), axes)
    leaves = jax.tree.leaves(mesh.placed(leaves, axes, where))
    paths = [jax.tree_util.keystr(path) for path, _ in named]
    hashes = _gathered(where, leaves)
    _require_equal(where, axes, paths, leaves, hashes)
    return _hash_of_state(where, paths, leaves, hashes)


def _gathered(where: Mesh, leaves: list[jax.Array]) -> np.ndarray:
    """Hash every device's part of every leaf: `[device, leaf, 2]` uint32, on all processes."""
    shardings = (leaf.sharding for leaf in leaves)
    specs = tuple(each.spec for each in shardings if isinstance(each, NamedSharding))  # all are
    hashed = _hashes(where, specs)(leaves)
    mine = {
        shard.index[0].start or 0: np.asarray(shard.data).tobytes().hex()
        for shard in hashed.addressable_shards
    }
    # Mostly one, the same on all devices.
    rows = list(dict.fromkeys(mine.values()))
    value = rows, {position: rows.index(row) for position, row in mine.items()}
    table = np.zeros((where.size, len(leaves), 2), np.uint32)
    told = exchange.told(exchange.peers(where), value, what="the state's hashes")
    for rows, row_of in told.values():
        for position, row in row_of.items():
            found = np.frombuffer(bytes.fromhex(rows[row]), np.uint32)
            table[int(position)] = found.reshape(len(leaves), 2)
    return table


@functools.cache
def _hashes(where: Mesh, specs: tuple[P, ...]) -> Any:
    def on_device(leaves: list[jax.Array]) -> jax.Array:
        pairs = [_hash(x, _offsets(x, spec, where)) for x, spec in zip(leaves, specs, strict=True)]
        return jnp.asarray(pairs, jnp.uint32).reshape(1, len(leaves), 2)

    # No collective, which could meet those of a step in flight.
    return jax.jit(
        jax.shard_map(
            on_device,
            mesh=where,
            in_specs=([*specs],),
            out_specs=P(where.axis_names),
            check_vma=False,
        )
    )


def _offsets(x: jax.Array, spec: P, where: Mesh) -> list[tuple[Any, int]]:
    """Give, for each dim of this device's part, where it begins and how long the whole is."""
    parts = [*spec, *[None] * (x.ndim - len(spec))]
    split = [() if part is None else axis.names(part) for part in parts]
    num_parts = [math.prod(where.shape[name] for name in names) for names in split]
    return [
        (lax.axis_index(names) * size if names else 0, num * size)
        for names, num, size in zip(split, num_parts, x.shape, strict=True)
    ]


def _hash(x: jax.Array, offsets: list[tuple[Any, int]]) -> tuple[Any, Any]:
    """Sum two hashes of each word and its position in the whole array, modulo 2**32.

    A sum, so that the hashes of parts add up to that of the whole. What is summed is a bijection
    of the word, so that one word that differs always shows.
    """
    zero = np.uint32(0)
    if not x.size:  # XLA of JAX 0.11.2 crashes on the sum of nothing.
        return zero, zero
    words = _words(x)
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


def _words(x: jax.Array) -> jax.Array:
    """Give the bits of an array as uint32, in further dims where there are more of them."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    num_bits = jnp.finfo(x.dtype).bits if is_float else jnp.iinfo(x.dtype).bits
    if num_bits >= 32:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{num_bits}")).astype(jnp.uint32)


def _holders(where: Mesh, leaf: jax.Array) -> list[list[int]]:
    """Give the positions in the mesh of the devices that hold the same part, part by part."""
    if leaf.sharding.is_fully_replicated:
        return [[*range(where.size)]]
    parts: dict[str, list[int]] = {}
    index_of = leaf.sharding.devices_indices_map(leaf.shape)
    for position, device in enumerate(where.devices.flat):
        parts.setdefault(repr(index_of[device]), []).append(position)
    return list(parts.values())


def _require_equal(
    where: Mesh,
    axes: tuple[str, ...],
    paths: Sequence[str],
    leaves: list[jax.Array],
    hashes: np.ndarray,
) -> None:
    found: list[tuple[int, int, int]] = []  # (leaf, device that differs, one that does not)
    for i, leaf in enumerate(leaves):
        for holders in _holders(where, leaf):
            bits = {position: hashes[position, i].tobytes() for position in holders}
            if len(set(bits.values())) > 1:
                _, usual = exchange.odd_one(bits)
                found += [(i, odd, usual) for odd in holders if bits[odd] != bits[usual]]
    if not found:
        return
    worst = Counter(odd for _, odd, _ in found).most_common(1)[0][0]
    leaf, odd, usual = next(each for each in found if each[1] == worst)
    num = len({i for i, _, _ in found})
    ranks = sorted({_rank(where, axes, position) for _, position, _ in found})
    raise RuntimeError(
        f"`{paths[leaf] or 'state'}` {leaves[leaf].dtype}{[*leaves[leaf].shape]} holds other bits "
        f"on {_called(where, axes, odd)} than on {_called(where, axes, usual)}: {num} of "
        f"{len(leaves)} leaves differ, on rank(s) {ranks}, and ranks that differ train different "
        "models. Restore the last checkpoint. Then look at what each rank does by itself: "
        "callbacks that are not pure, kernels that add in no fixed order "
        "(XLA_FLAGS=--xla_gpu_deterministic_ops=true), a device whose memory fails."
    )


def _rank(where: Mesh, axes: tuple[str, ...], position: int) -> int:
    at = np.unravel_index(position, where.devices.shape)
    index = dict(zip(where.axis_names, at, strict=True))
    sizes = [where.shape[name] for name in axes]
    return int(np.ravel_multi_index([index[name] for name in axes], sizes))


def _called(where: Mesh, axes: tuple[str, ...], position: int) -> str:
    device = where.devices.flat[position]
    process = f"process {device.process_index}, " if where.is_multi_process else ""
    return f"rank {_rank(where, axes, position)} ({process}{device})"


def _hash_of_state(
    where: Mesh, paths: Sequence[str], leaves: list[jax.Array], hashes: np.ndarray
) -> str:
    digest = hashlib.sha256()
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        firsts = [holders[0] for holders in _holders(where, leaf)]
        whole = hashes[firsts, i].sum(0, dtype=np.uint32).tolist()
        digest.update(repr((path, str(leaf.dtype), leaf.shape, whole)).encode())
    return digest.hexdigest()[:16]
