"""Kinds of leaves; a step passes other leaves than arrays through."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp import jax_compat

_ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex, jax.ShapeDtypeStruct)


def is_array(leaf: Any) -> bool:
    """Whether JAX can compute with a leaf."""
    return isinstance(leaf, _ARRAYS)


def kind_of(value: Any) -> str:
    """Return what a value is, with an article.

    >>> kind_of(jnp.ones(2)), kind_of({})
    ('an array', 'a dict')
    """
    if isinstance(value, jax.Array):  # also a tracer
        return "an array"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed random key."""
    is_described = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    return is_described and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def without_key(leaf: Any) -> Any:
    """Return a typed random key's data, other leaves as they are."""
    if not is_key(leaf):
        return leaf
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    data = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def key_impl(key: Any) -> str:
    """Return the generator's name of a typed random key, or of its shape."""
    found: list[str] = []
    jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), key)
    return found[0]


@functools.cache
def num_bits(dtype: Any) -> int:
    """Return an element's bits: 6 for a float6, 1 for a bool."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return 1
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.finfo(dtype).bits
    return jnp.iinfo(dtype).bits


@functools.cache
def is_tiny_float(dtype: Any) -> bool:
    """Whether a dtype is a float of at most 8 bits, which JAX does not promote."""
    return jnp.issubdtype(dtype, jnp.floating) and num_bits(dtype) < 16


@functools.cache
def is_not_compiled(dtype: Any) -> bool:
    """Whether XLA cannot compute with a dtype: int1, uint1, 6-bit floats."""
    if jnp.issubdtype(dtype, jnp.integer):
        return num_bits(dtype) == 1
    return jnp.issubdtype(dtype, jnp.floating) and num_bits(dtype) == 6


def is_deleted(leaf: Any) -> bool:
    """Whether a leaf was donated or deleted."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return False
    return jax_compat.is_deleted(leaf)


def any_deleted(tree: Any) -> bool:
    """Whether any leaf was donated or deleted."""
    leaves = jax.tree.leaves(tree)
    try:
        return jax_compat.any_deleted(leaves)
    except (AttributeError, TypeError):  # of a number, a tracer
        return any(map(is_deleted, leaves))


def any_first_deleted(tree: Any) -> bool:
    """Whether the first shard of any leaf was donated; making all shards of new arrays is slow."""
    leaves = jax.tree.leaves(tree)
    try:
        return any(map(jax_compat.is_first_deleted, leaves))
    except (AttributeError, TypeError):
        return any_deleted(tree)


def require_alive(name: str, tree: Any, advice: str) -> None:
    """Refuse a tree with a donated leaf."""
    if not any_deleted(tree):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if is_deleted(leaf):
            raise ValueError(
                f"`{name}{jax.tree_util.keystr(path)}` was donated to an earlier step and is "
                "deleted. " + advice
            )


@dataclass(frozen=True)
class Held:
    """A tree whose leaves are its arrays alone; other leaves are part of its structure."""

    arrays: list[Any]
    treedef: Any
    others: tuple[tuple[int, Any], ...]  # (position among all leaves, leaf)


@dataclass(frozen=True)
class _Keys:
    """An array's path in the held tree, as one key."""

    keys: tuple[Any, ...]

    def __str__(self) -> str:
        return jax.tree_util.keystr(self.keys)


def _flatten_with_keys(held: Held) -> tuple[list[tuple[_Keys, Any]], Any]:
    others = {i for i, _ in held.others}
    whole = held.treedef.unflatten(range(held.treedef.num_leaves))
    named = jax.tree_util.tree_leaves_with_path(whole)
    keys = [_Keys(path) for path, i in named if i not in others]
    return list(zip(keys, held.arrays, strict=True)), (held.treedef, held.others)


jax.tree_util.register_pytree_with_keys(
    Held,
    _flatten_with_keys,
    lambda aux, arrays: Held(list(arrays), *aux),
    lambda held: (held.arrays, (held.treedef, held.others)),
)


def hold(tree: Any) -> Any:
    """Make every leaf an array: return `tree` itself, or a `Held`."""
    leaves, treedef = jax.tree.flatten(tree)
    others = tuple((i, x) for i, x in enumerate(leaves) if not is_array(x))
    if not others:
        return tree
    for _, leaf in others:
        try:
            hash(leaf)
        except TypeError as error:
            raise TypeError(
                f"the state holds a {type(leaf).__name__}, which is neither an array nor "
                "hashable, so JAX could not tell when to recompile. Keep it outside the state."
            ) from error
    positions = {i for i, _ in others}
    return Held([x for i, x in enumerate(leaves) if i not in positions], treedef, others)


def restore(tree: Any) -> Any:
    """Invert `hold`."""
    if not isinstance(tree, Held):
        return tree
    leaves = list(tree.arrays)
    for i, leaf in tree.others:  # so each index is the original one
        leaves.insert(i, leaf)
    return jax.tree.unflatten(tree.treedef, leaves)


@jax.tree_util.register_static
class _TakenNode:
    def __init__(self, treedef: Any):
        self.treedef = treedef

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TakenNode) and self.treedef == other.treedef

    def __hash__(self) -> int:
        return hash(self.treedef)


def take_nodes(tree: Any, is_taken: Callable[[Any], bool]) -> tuple[Any, list[Any]]:
    """Split a tree into a tree without the leaves of some nodes, and these leaves.

    >>> rest, leaves = take_nodes({"a": 1, "b": (2, 3)}, lambda node: isinstance(node, tuple))
    >>> jax.tree.leaves(rest), leaves
    ([1], [2, 3])
    >>> put_nodes(rest, [20, 30])
    {'a': 1, 'b': (20, 30)}
    """
    taken: list[Any] = []

    def visit(node: Any) -> Any:
        if not is_taken(node):
            return node
        leaves, treedef = jax.tree.flatten(node)
        taken.extend(leaves)
        return _TakenNode(treedef)

    return jax.tree.map(visit, tree, is_leaf=is_taken), taken


def put_nodes(tree: Any, leaves: Sequence[Any]) -> Any:
    """Invert `take_nodes`."""
    left = iter(leaves)

    def visit(node: Any) -> Any:
        if not _is_taken_node(node):
            return node
        return node.treedef.unflatten([next(left) for _ in range(node.treedef.num_leaves)])

    return jax.tree.map(visit, tree, is_leaf=_is_taken_node)


def _is_taken_node(node: Any) -> bool:
    return isinstance(node, _TakenNode)


# Flax's collection of statistics whose gradient is their next value.
OVERWRITTEN = "_overwrite_with_gradient"


def is_overwritten(path: tuple) -> bool:
    """Whether a leaf is a Flax statistic that its gradient overwrites."""
    return OVERWRITTEN in keys(path)


def keys(path: tuple) -> list[Any]:
    """Return keys and attribute names; None for a sequence index."""
    return [getattr(key, "key", None) or getattr(key, "name", None) for key in path]
