"""Replaces the leaves of a state by saved values, matched by name."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp import rank_state
from jdp.checkpoint.saved_leaves import SavedLeaf, describe
from jdp.checkpoint.shards import SplitValue
from jdp.distributed.host_copies import copied
from jdp.pytrees import is_array, is_key

_log = logging.getLogger("jdp")

# Maximum number of leaves of a kind that one message names.
_NUM_NAMED = 8

_INSTEAD = (
    "Build the one that was saved, or give Checkpointer a new directory to begin anew. "
    'ckpt.restore(..., missing="keep") takes the leaves of the same name, shape and dtype.'
)


def fill(
    state: Any,
    saved: Sequence[SavedLeaf],
    values: Sequence[np.ndarray | SplitValue],
    where: str,
    *,
    keeps_missing: bool = False,
    copies: bool = False,
    instead: str = _INSTEAD,
) -> tuple[Any, list[Any]]:
    """Return the state with saved values, and its leaves that were restored.

    Types, shardings and non-array leaves are kept. A Python number or a 64-bit NumPy array also
    accepts a saved value of JAX's canonical dtype. `per_rank` state is resized by its rule.

    Args:
      values: values of `saved`. Nobody must write to them afterwards, unless they are copied.
    """
    left = defaultdict(list)
    for old, value in zip(saved, values, strict=True):
        left[old.name].append((old, value))
    leaves, treedef = jax.tree.flatten(state)
    positions = [i for i, x in enumerate(leaves) if is_array(x)]
    owners, found = rank_state.owners(state), {}
    changed, missing = [], []
    for i, new in zip(positions, describe(state), strict=True):
        if not left[new.name]:
            missing.append(f"{_shown(new.name)} {new}")
            continue
        old, value = left[new.name].pop(0)
        if (owner := owners[i]) is not None:
            value = rank_state.resized(owner, leaves[i], value[...], new.name, where)
            old = old._replace(shape=value.shape)
        if not _fits(old, new):
            changed.append(f"{_shown(new.name)} is {old} there and {new} in the given state")
        found[i] = value
    unused = [f"{_shown(old.name)} {old}" for pairs in left.values() for old, _ in pairs]
    differences = _listed("", changed) + _listed("only there: ", unused)
    differences += _listed("only in the given state: ", missing)
    if changed or (differences and not (keeps_missing and found)):
        raise _of_another_model(where, differences, instead)
    if differences and jax.process_index() == 0:
        text = "jdp: took %d leaves from %s; %s."
        _log.warning(text, len(found), where, "; ".join(differences))
    for i, value in found.items():
        leaves[i] = _placed_split(leaves[i], value, copies)
    return treedef.unflatten(leaves), [leaves[i] for i in found]


def _of_another_model(where: str, differences: Sequence[str], instead: str) -> ValueError:
    return ValueError(
        f"{where} does not have the leaves of the given state: {'; '.join(differences)}. That "
        f"is another model or optimizer, and its values would mean something else. {instead}"
    )


def _shown(name: str) -> str:
    return f"`{name}`" if name else "the only leaf"


def _listed(title: str, texts: list[str]) -> list[str]:
    if len(texts) > _NUM_NAMED:
        texts = [*texts[:_NUM_NAMED], f"and {len(texts) - _NUM_NAMED} more"]
    return [title + ", ".join(texts)] if texts else []


# All processes take part in fetching a leaf, also those that need nothing of it.
def _placed_split(x: Any, value: np.ndarray | SplitValue, copies: bool) -> Any:
    if not isinstance(value, SplitValue):
        return placed(x, value, copies=copies)
    value.fetch()
    is_placed = isinstance(x, jax.Array) and x.committed and (is_key(x) or not x.weak_type)
    new = placed(x, value if is_placed else value[...])
    value.release()
    return new


def placed(x: Any, value: Any, *, copies: bool = False) -> Any:
    """Return a saved value with the type and sharding of `x`.

    Args:
      copies: whether the result must not share the memory of `value`.
    """
    if not isinstance(x, jax.Array):
        if isinstance(x, np.ndarray | jax.ShapeDtypeStruct):
            return np.array(value)
        return type(x)(value[()]) if isinstance(x, np.generic) else type(x)(value.item())
    if is_key(x):
        data = placed(jax.random.key_data(x), value, copies=copies)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if x.weak_type and not x.shape and x.is_fully_addressable:
        # Only a Python number produces a weakly typed array, as jnp.asarray(1.0) does.
        number = jnp.asarray(value.item())
        return jax.device_put(number, x.sharding) if x.committed else number
    if not x.committed:
        return jnp.asarray(np.array(value) if copies else value)
    if copies:
        return copied(value, x.sharding)
    # A process that holds no part of it has nothing to take the dtype from.
    get = value.__getitem__
    return jax.make_array_from_callback(x.shape, x.sharding, get, dtype=x.dtype)


def _fits(saved: SavedLeaf, given: SavedLeaf) -> bool:
    if saved.dtype != given.dtype:
        given = given._replace(dtype=str(jax.dtypes.canonicalize_dtype(given.dtype)))
    return saved._replace(name=given.name) == given
