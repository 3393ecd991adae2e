"""Checks that all processes hold the same state before they train it."""

import hashlib
import operator
import weakref
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jdp.distributed import agree, kv_store
from jdp.distributed.agree import broadcast_bytes
from jdp.error_codes import with_code
from jdp.pytrees import is_array, is_key, without_key
from jdp.worker.local_devices import num_cpus

Refs = list[weakref.ref]

# Leaves of each step's last state over several processes. Not owned by the steps: processes delete
# a step at different times, while another step continues with its state.
_returned: list[Refs] = []
# Other leaves known to be equal on all processes.
_vouched: Refs = []


def vouch_for(leaves: Iterable[Any]) -> None:
    """Record that only these leaves are known to be equal everywhere."""
    _vouched[:] = [weakref.ref(leaf) for leaf in leaves if isinstance(leaf, jax.Array)]


def keep_known(own: Refs) -> None:
    """Record a step's own list of its last state's leaves."""
    if not any(refs is own for refs in _returned):
        _returned.append(own)


def unknown_leaves(leaves: Sequence[Any], own: Refs) -> Sequence[int]:
    """Return the indices of unknown leaves; `own` was passed to `keep_known`."""
    _returned[:] = [
        refs for refs in _returned if refs is own or any(ref() is not None for ref in refs)
    ]
    if any(are_known(refs, leaves) for refs in _returned):
        return ()
    known = {id(ref()) for refs in (*_returned, _vouched) for ref in refs}
    return [i for i, leaf in enumerate(leaves) if id(leaf) not in known]


def are_known(refs: Refs, leaves: Sequence[Any]) -> bool:
    """Whether `refs` are references to `leaves`, in order."""
    # This runs for every leaf in every call, so it has no Python loop.
    return len(leaves) == len(refs) and all(map(operator.is_, map(operator.call, refs), leaves))


_PIECE_BYTES = 1 << 20


def agreed(tree: Any, mesh: Mesh | None = None, *, broadcast: bool = False) -> Any:
    """Return the tree, after a check that every process holds the same one."""
    if jax.process_count() == 1:
        return tree
    group = tuple(range(jax.process_count()))
    if mesh is not None and kv_store.is_open():
        group = agree.peers(mesh)
    named, treedef = jax.tree_util.tree_flatten_with_path(tree)
    local = [i for i, (_, leaf) in enumerate(named) if _is_local(leaf)]
    leaves = [leaf for _, leaf in named]
    shapes = [_described(path, leaf) for path, leaf in named]
    if pair := _odd_ones(group, [_digest(repr(shapes).encode())])[0]:
        odd, usual = pair
        text = (
            f"the state has other leaves, shapes or dtypes on process {odd} than on process {usual}"
            f"{_first_difference(group, pair, shapes)}. All processes must build the same model."
        )
        raise ValueError(with_code("JDP202", text))
    if broadcast:
        received = _of_the_first(group, [leaves[i] for i in local])
        for i, leaf in zip(local, received, strict=True):
            leaves[i] = leaf
        return jax.tree.unflatten(treedef, leaves)
    pairs = _odd_ones(group, digests([_numbers(leaves[i]) for i in local]))
    for i, pair in zip(local, pairs, strict=True):
        if pair is not None:
            odd, usual = pair
            text = (
                f"`{jax.tree_util.keystr(named[i][0])}` has other values on process {odd} than "
                f"on process {usual}, so ranks would train different models. Use the same seed "
                "on every process, or write TrainState.create(..., broadcast=True) to copy the "
                f"values of process {group[0]}."
            )
            raise ValueError(with_code("JDP203", text))
    return tree


def _of_the_first(group: tuple[int, ...], leaves: list[Any]) -> list[Any]:
    values = [_numbers(leaf) for leaf in leaves]
    ends = np.cumsum([0, *(value.nbytes for value in values)])
    data = None
    if jax.process_index() == group[0]:
        words = [np.ascontiguousarray(value).reshape(-1).view(np.uint8) for value in values]
        data = np.concatenate([np.zeros(0, np.uint8), *words])
    data = broadcast_bytes(data, int(ends[-1]), group)
    found: list[Any] = []
    for leaf, value, start, end in zip(leaves, values, ends, ends[1:], strict=False):
        new: Any = data[start:end].view(value.dtype).reshape(value.shape)
        if is_key(leaf):
            new = jax.random.wrap_key_data(new, impl=jax.random.key_impl(leaf))
        found.append(new)
    return found


def _is_local(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array):
        return leaf.is_fully_addressable
    return is_array(leaf)


def _numbers(leaf: Any) -> np.ndarray:
    return np.asarray(without_key(leaf))


def _described(path: tuple, leaf: Any) -> str:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else type(leaf).__name__
    is_shared = isinstance(leaf, jax.Array) and not _is_local(leaf)
    what = f"{dtype}{[*np.shape(leaf)]}{' on devices of several processes' if is_shared else ''}"
    return f"`{jax.tree_util.keystr(path)}` {what}"


# The first difference between two processes' leaves; "" without a store.
def _first_difference(group: tuple[int, ...], pair: tuple[int, int], shapes: list[str]) -> str:
    if not kv_store.is_open():
        return ""
    index = agree.first_difference(pair, group, shapes)
    mine = shapes[index] if index < len(shapes) else "no more"
    gathered = agree.all_gather(group, mine, what="leaves")
    odd, usual = pair
    one, other = gathered[odd], gathered[usual]
    return f": leaf {index + 1} is {one} on process {odd}, {other} on process {usual}"


def digests(values: Sequence[np.ndarray]) -> list[str]:
    """Return text digests; a large array's miss a difference in one MiB once in 2**32 times."""
    with ThreadPoolExecutor(num_cpus()) as pool:
        return [_digest(_to_hash(value, pool)) for value in values]


def _to_hash(value: np.ndarray, pool: Executor) -> Any:
    """Return what to hash of an array: its bytes, or checksums of them."""
    words = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    if words.size <= _PIECE_BYTES:
        return words
    pieces = [words[i : i + _PIECE_BYTES] for i in range(0, words.size, _PIECE_BYTES)]
    return np.array([*pool.map(zlib.crc32, pieces)], np.uint32)


def _digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


# Return the `odd_one` of each digest.
def _odd_ones(group: tuple[int, ...], digests: list[str]) -> list[tuple[int, int] | None]:
    gathered = _all_gather(group, digests) if digests else {}
    each = [{process: its[n] for process, its in gathered.items()} for n in range(len(digests))]
    return [agree.odd_one(its) for its in each]


# The store compiles no program; without it, JAX may still know the other processes.
def _all_gather(group: tuple[int, ...], digests: list[str]) -> dict[int, list[str]]:
    if kv_store.is_open():
        return agree.all_gather(group, digests, what="the state")
    numbers = [np.frombuffer(bytes.fromhex(digest), np.uint32) for digest in digests]
    gathered = np.asarray(multihost_utils.process_allgather(np.stack(numbers)))
    return dict(enumerate([[number.tobytes().hex() for number in each] for each in gathered]))
