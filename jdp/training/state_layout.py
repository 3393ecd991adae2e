"""`StateLayout`: a state as lists of arrays, one list for each way to split over the ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from jdp import pytrees, rank_state
from jdp.training import shard_layout


@jax.tree_util.register_static
@dataclass(frozen=True)
class StateLayout:
    """How a state is put together from its arrays.

    Attributes:
      treedef: of the state, as `pytrees.hold` returns it.
      groups: for each array how it is split over the ranks, see `shard_layout`.
      adds_whole_updates: see `shard_layout`.
    """

    treedef: Any
    groups: tuple[int, ...]
    adds_whole_updates: bool

    def joined(self, lists: Sequence[Sequence[Any]]) -> Any:
        """Return the state whose leaves `parted` sorted into lists."""
        left = [iter(leaves) for leaves in lists]
        return self.treedef.unflatten([next(left[group]) for group in self.groups])

    def parted(self, leaves: Sequence[Any]) -> list[list[Any]]:
        """Sort a list with one entry for each array into one list for each group."""
        lists: list[list[Any]] = [[] for _ in range(shard_layout.NUM_GROUPS)]
        for leaf, group in zip(leaves, self.groups, strict=True):
            lists[group].append(leaf)
        return lists


def parted(state: Any, mesh: Mesh) -> tuple[list[list[Any]], StateLayout, tuple[str, ...]]:
    """Return the arrays of a state by group, its layout, and the axes of its shards."""
    rank_state.require_dims(pytrees.restore(state))
    held = pytrees.hold(state)
    leaves, treedef = jax.tree.flatten(held)
    groups, axes = shard_layout.groups(held, mesh)
    adds = shard_layout.adds_whole_updates(pytrees.restore(held))
    layout = StateLayout(treedef, tuple(groups), adds)
    return layout.parted(leaves), layout, axes
