"""The arrays among the leaves of a tree."""

from collections.abc import Sequence
from typing import Any

import jax


class TreeArrays:
    """The arrays of a tree, whose other leaves stay as they are.

    Args:
      tree: any tree.

    Attributes:
      arrays: the arrays, in the order of the leaves.
      places: their positions among all leaves.
    """

    def __init__(self, tree: Any):
        self._leaves, self._structure = jax.tree.flatten(tree)
        self.places: list[int] = [i for i, x in enumerate(self._leaves) if isinstance(x, jax.Array)]
        self.arrays: list[jax.Array] = [self._leaves[i] for i in self.places]

    def like(self, other: "TreeArrays") -> list[jax.Array | None]:
        """Return for each array of `other` the one at its place here, if both look alike."""
        here = dict(zip(self.places, self.arrays, strict=True))
        found = [here.get(i) for i in other.places]
        return [
            x if x is not None and (x.shape, x.dtype) == (new.shape, new.dtype) else None
            for x, new in zip(found, other.arrays, strict=True)
        ]

    def tree(self, arrays: Sequence[Any]) -> Any:
        """Return the tree with `arrays` in the places of its own."""
        leaves = list(self._leaves)
        for i, x in zip(self.places, arrays, strict=True):
            leaves[i] = x
        return self._structure.unflatten(leaves)
