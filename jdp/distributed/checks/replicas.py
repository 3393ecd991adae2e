"""`check_replicas`: checks that all ranks hold the same bits."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jdp import axis, pytrees, rank_state
from jdp.axis import AxisName
from jdp.distributed import agree, in_flight, mesh, placement
from jdp.distributed.checks import hashes
from jdp.error_codes import with_code
from jdp.validation import int_at_least


class RanksDifferError(RuntimeError):
    """Ranks hold different bits of a state."""


# (state structure, axes, every) -> calls.
_num_calls: Counter[Any] = Counter()


def check_replicas(state: Any, *, every: int = 1, axis_name: AxisName = "data") -> str | None:
    """Check that every rank holds the same bits of the state, and return their hash.

    jdp proves that a step leaves equal states. It cannot see impure callbacks, kernels that round
    differently from device to device, and faulty memory. The ranks' states then drift apart, unseen
    in averaged metrics.

    Every rank hashes its own copy, reading it once, and only hashes are compared. Each shard of an
    array sharded over the ranks, as by `jdp.sharded`, is compared with its copies. The call waits
    for the steps that compute the state. All processes must make it.

    Args:
      state: any tree; other leaves than arrays are ignored.
      every: of the calls for trees of this structure, check the first and every `every`-th after
        it, >= 1. Others do nothing.
      axis_name: the mesh's data axis: a name, or a tuple of names.

    Returns:
      16 hexadecimal digits, equal for equal bits on any number of ranks, to compare runs; None from
      a call that does nothing.

    Raises:
      RuntimeError: on every process, naming the rank that differs from most and the first leaf, or
        a process that does not make the call.
      TypeError: `every` is not an integer.
      ValueError: `every` is not positive, or a leaf was donated.

    >>> import jax.numpy as jnp, jdp
    >>> mesh = jdp.init(cpu_ranks=2)
    >>> [jdp.check_replicas({"w": jnp.arange(3.0)}, every=2) for _ in range(3)]
    ['e8570daa370b0cbe', None, 'e8570daa370b0cbe']
    """
    every = int_at_least("every", every, least=1)
    axes = axis.names(axis_name)
    key = jax.tree.structure(state), axes, every
    _num_calls[key] += 1
    if (_num_calls[key] - 1) % every:
        return None
    found = zip(jax.tree_util.tree_leaves_with_path(state), rank_state.flags(state), strict=True)
    named = [
        (path, rank_state.per_rank(leaf) if is_own else leaf)
        for (path, leaf), is_own in found
        if pytrees.is_array(leaf) and getattr(leaf, "dtype", None) != jax.dtypes.float0
    ]
    pytrees.require_alive("state", state, "Pass the state returned by the last step.")
    leaves = [leaf for _, leaf in named]
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(leaves)):
        raise TypeError("check_replicas reads arrays. Call it between steps, not inside one.")
    in_flight.drain()
    where = mesh.mesh_of(jax.tree.leaves(leaves), axes)
    leaves = jax.tree.leaves(placement.placed(leaves, axes, where, may_be_split=True))
    paths = [jax.tree_util.keystr(path) for path, _ in named]
    table = _gathered(where, leaves)
    _require_equal(where, axes, paths, leaves, table)
    return _hash_of_state(where, paths, leaves, table)


def require_equal_copies(state: Any) -> None:
    """Raise an error unless all devices with the same shard of an array hold the same bits."""
    in_flight.drain()
    on: dict[Mesh, list[tuple[Any, jax.Array]]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            if sharding.mesh.size > 1 and leaf.dtype != jax.dtypes.float0:
                on.setdefault(sharding.mesh, []).append((jax.tree_util.keystr(path), leaf))
    for where, named in on.items():
        paths, leaves = [path for path, _ in named], [leaf for _, leaf in named]
        axes = ("data",) if "data" in where.axis_names else where.axis_names
        _require_equal(where, axes, paths, leaves, _gathered(where, leaves))


def _gathered(where: Mesh, leaves: list[jax.Array]) -> np.ndarray:
    """Return the hashes of every device's shards: `[device, leaf, 2]` uint32."""
    hashed, _ = hashes.folded(where, leaves, range(len(leaves)))
    mine = {
        int(np.ravel_multi_index(position, where.devices.shape)): values.tobytes().hex()
        for position, values in hashes.parts(hashed)
    }
    rows = list(dict.fromkeys(mine.values()))  # usually one row
    value = rows, {position: rows.index(row) for position, row in mine.items()}
    table = np.zeros((where.size, len(leaves), 2), np.uint32)
    gathered = agree.all_gather(agree.peers(where), value, what="the state's hashes")
    for rows, row_of in gathered.values():
        for position, row in row_of.items():
            found = np.frombuffer(bytes.fromhex(rows[row]), np.uint32)
            table[int(position)] = found.reshape(len(leaves), 2)
    return table


def _holders(where: Mesh, leaf: jax.Array) -> list[list[int]]:
    """Return the mesh positions of each shard of a leaf."""
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
    table: np.ndarray,
) -> None:
    found: list[tuple[int, int, int]] = []  # (leaf, differing device, usual device)
    for i, leaf in enumerate(leaves):
        for holders in _holders(where, leaf):
            bits = {position: table[position, i].tobytes() for position in holders}
            if pair := agree.odd_one(bits):
                usual = pair[1]
                found += [(i, odd, usual) for odd in holders if bits[odd] != bits[usual]]
    if not found:
        return
    worst = Counter(odd for _, odd, _ in found).most_common(1)[0][0]
    leaf, odd, usual = next(each for each in found if each[1] == worst)
    num = len({i for i, _, _ in found})
    ranks = sorted({_rank(where, axes, position) for _, position, _ in found})
    text = (
        f"`{paths[leaf] or 'state'}` {leaves[leaf].dtype}{[*leaves[leaf].shape]} holds other "
        f"bits on {_called(where, axes, odd)} than on {_called(where, axes, usual)}: {num} of "
        f"{len(leaves)} leaves differ, on rank(s) {ranks}, so these ranks train different "
        "models. Restore the last checkpoint. Then look for impure callbacks, non-deterministic "
        "kernels (XLA_FLAGS=--xla_gpu_deterministic_ops=true), a device with faulty memory."
    )
    raise RanksDifferError(with_code("JDP213", text))


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
    where: Mesh, paths: Sequence[str], leaves: list[jax.Array], table: np.ndarray
) -> str:
    digest = hashlib.sha256()
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        firsts = [holders[0] for holders in _holders(where, leaf)]
        whole = table[firsts, i].sum(0, dtype=np.uint32).tolist()
        digest.update(repr((path, str(leaf.dtype), leaf.shape, whole)).encode())
    return digest.hexdigest()[:16]
