"""Agreement between processes about what they are about to train."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jdp import exchange, store
from jdp.statics import is_array


def agreed(tree: Any, *, broadcast: bool = False) -> Any:
    """Make sure that every process holds the same tree.

    Args:
      tree: tree of arrays; leaves that several processes share already are not looked at.
      broadcast: take the values of process 0 instead of comparing.

    Returns:
      The tree, that of process 0 with `broadcast`. With one process, `tree` itself.

    Raises:
      ValueError: on every process, naming the first leaf and the processes that differ.
    """
    if jax.process_count() == 1:
        return tree
    named, treedef = jax.tree_util.tree_flatten_with_path(tree)
    local = [i for i, (_, leaf) in enumerate(named) if _is_local(leaf)]
    leaves = [leaf for _, leaf in named]
    shapes = [(jax.tree_util.keystr(path), np.shape(leaf), _dtype(leaf)) for path, leaf in named]
    [odd] = _odd_processes([_digest(repr((shapes, local)).encode())])
    if odd:
        raise ValueError(
            f"the state has other leaves, shapes or dtypes on process {odd} than on process 0; "
            f"here (process {jax.process_index()}) it has {len(shapes)} leaves, the first "
            f"{shapes[0] if shapes else 'none'}. All processes must build the same model."
        )
    if broadcast:
        values = multihost_utils.broadcast_one_to_all([_numbers(leaves[i]) for i in local])
        for i, value in zip(local, values, strict=True):
            is_key = _is_key(leaves[i])
            impl = jax.random.key_impl(leaves[i]) if is_key else None
            leaves[i] = jax.random.wrap_key_data(value, impl=impl) if is_key else value
        return jax.tree.unflatten(treedef, leaves)
    odd_leaves = _odd_processes([_digest(_numbers(leaves[i]).tobytes()) for i in local])
    for i, odd in zip(local, odd_leaves, strict=True):
        if odd:
            raise ValueError(
                f"`{jax.tree_util.keystr(named[i][0])}` has other values on process {odd} than on "
                "process 0, so the ranks would train different models. Use the same seed on every "
                "process, or write TrainState.create(..., broadcast=True) to take process 0's."
            )
    return tree


def _is_local(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array):
        return leaf.is_fully_addressable
    return is_array(leaf)


def _numbers(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _dtype(leaf: Any) -> str:
    return str(leaf.dtype) if hasattr(leaf, "dtype") else type(leaf).__name__


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


# For each digest the processes whose differs from that of process 0.
def _odd_processes(digests: list[str]) -> list[list[int]]:
    told = _told(digests) if digests else {}
    return [[i for i, its in told.items() if its[n] != told[0][n]] for n in range(len(digests))]


# Through the store, where nothing has to be compiled; JAX may have found the processes without one.
def _told(digests: list[str]) -> dict[int, list[str]]:
    if store.is_open():
        everyone = tuple(range(jax.process_count()))
        return exchange.told(everyone, digests, what="the state")
    numbers = [np.frombuffer(bytes.fromhex(digest), np.uint32) for digest in digests]
    gathered = np.asarray(multihost_utils.process_allgather(np.stack(numbers)))
    return dict(enumerate([[number.tobytes().hex() for number in each] for each in gathered]))
