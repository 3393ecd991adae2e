"""Saved values put in the place of a state's leaves, which are found by their names."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp import rank_state
from jdp.checkpoint.saved_leaves import SavedLeaf, describe
from jdp.pytrees import is_array, is_key

_ADVICE = (
    "That is another model or optimizer, and its values would mean something else. Build the "
    "one that this run began with, or give Checkpointer a new directory to begin anew."
)


def fill(
    state: Any, saved: Sequence[SavedLeaf], values: Sequence[np.ndarray], where: str
) -> tuple[Any, list[Any]]:
    """Return a state with saved values, and those of its leaves that are saved.

    Types, shardings and leaves that are not arrays stay. A number of Python or a NumPy array of 64
    bits may have become what JAX computes with; `per_rank` is resized by its rule.

    Args:
      state: the state.
      saved: leaves that were written.
      values: of `saved`. Not to be written to afterwards.
      where: name of the source of `saved`, for errors.

    Raises:
      ValueError: if the state is of another model, naming the first leaf that differs.
    """
    left = defaultdict(list)
    for old, value in zip(saved, values, strict=True):
        left[old.name].append((old, value))
    leaves, treedef = jax.tree.flatten(state)
    positions = [i for i, x in enumerate(leaves) if is_array(x)]
    owners, found, absent = rank_state.owners(state), {}, []
    for i, new in zip(positions, describe(state), strict=True):
        if not left[new.name]:
            absent.append(new)
            continue
        old, value = left[new.name].pop(0)
        if (owner := owners[i]) is not None:
            value = rank_state.resized(owner, leaves[i], value, new.name, where)
            old = old._replace(shape=value.shape)
        if not _fits(old, new):
            raise ValueError(
                f"`{new.name}` is {old} in {where}, and {new} in the state given to restore. "
                + _ADVICE
            )
        found[i] = value
    for old in (old for pairs in left.values() for old, _ in pairs):
        raise ValueError(f"`{old.name}` {old} is in {where}, not in the state. {_ADVICE}")
    for new in absent:
        raise ValueError(f"`{new.name}` {new} is not in {where}. {_ADVICE}")
    for i, value in found.items():
        leaves[i] = placed(leaves[i], value)
    return treedef.unflatten(leaves), [leaves[i] for i in found]


def placed(x: Any, value: np.ndarray) -> Any:
    """Return a saved value as `x` is: of its type, and where it lies."""
    if not isinstance(x, jax.Array):
        if isinstance(x, np.ndarray):
            return np.array(value)
        return type(x)(value[()]) if isinstance(x, np.generic) else type(x)(value.item())
    if is_key(x):
        data = placed(jax.random.key_data(x), value)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if x.weak_type and not x.shape and x.is_fully_addressable:
        # Only a Python number gives the type that jnp.asarray(1.0) has.
        number = jnp.asarray(value.item())
        return jax.device_put(number, x.sharding) if x.committed else number
    if not x.committed:
        return jnp.asarray(value)
    return jax.make_array_from_callback(x.shape, x.sharding, lambda index: value[index])


def _fits(saved: SavedLeaf, given: SavedLeaf) -> bool:
    if saved.dtype != given.dtype:
        given = given._replace(dtype=str(jax.dtypes.canonicalize_dtype(given.dtype)))
    return saved._replace(name=given.name) == given
