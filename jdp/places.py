"""Nodes of a tree taken out of it, and put back: their places stay behind without a leaf."""

from collections.abc import Callable, Sequence
from typing import Any

import jax


@jax.tree_util.register_static
class _Place:
    """What stays behind of a node: its structure."""

    def __init__(self, treedef: Any):
        self.treedef = treedef

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place) and self.treedef == other.treedef

    def __hash__(self) -> int:
        return hash(self.treedef)


def take(tree: Any, is_taken: Callable[[Any], bool]) -> tuple[Any, list[Any]]:
    """Return a tree without the leaves of some of its nodes, and these leaves.

    Args:
      tree: any tree.
      is_taken: whether a node is taken out.

    >>> rest, leaves = take({"a": 1, "b": (2, 3)}, lambda node: isinstance(node, tuple))
    >>> jax.tree.leaves(rest), leaves
    ([1], [2, 3])
    >>> put(rest, [20, 30])
    {'a': 1, 'b': (20, 30)}
    """
    taken: list[Any] = []

    def visit(node: Any) -> Any:
        if not is_taken(node):
            return node
        leaves, treedef = jax.tree.flatten(node)
        taken.extend(leaves)
        return _Place(treedef)

    return jax.tree.map(visit, tree, is_leaf=is_taken), taken


def put(tree: Any, leaves: Sequence[Any]) -> Any:
    """Invert `take`."""
    left = iter(leaves)

    def visit(node: Any) -> Any:
        if not _is_place(node):
            return node
        return node.treedef.unflatten([next(left) for _ in range(node.treedef.num_leaves)])

    return jax.tree.map(visit, tree, is_leaf=_is_place)


def _is_place(node: Any) -> bool:
    return isinstance(node, _Place)
