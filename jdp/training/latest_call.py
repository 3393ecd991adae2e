"""Whether a call of a step is like its last one, so that nothing has to be placed or looked up."""

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import jax

from jdp.distributed.checks import known_leaves


class LatestCall:
    """The last call of a step, of which it holds no array.

    Args:
      returned: references to the leaves of the state that the step returned last, which the step
        keeps up to date; None for one that returns no state.
    """

    def __init__(self, returned: list[weakref.ref] | None):
        self._is_given = returned is None
        self._state: list[weakref.ref] = [] if returned is None else returned
        self._program: Any = None
        self._tree: Any = None
        self._arrays: list[tuple] = []

    def program_for(self, args: tuple) -> Any:
        """Return the program of the last call for one like it, None for another.

        Such a call has the state that the last one returned, or the same state if none is returned.
        Its other arguments are arrays that lie as those of the last call, none of them donated.

        Args:
          args: of the call, all by position.
        """
        if self._program is None or not args:
            return None
        state = jax.tree.leaves(args[0])
        if not known_leaves.are(self._state, state):
            return None
        try:
            leaves, tree = jax.tree.flatten(args[1:])
        except ValueError:  # keys that cannot be sorted, which have an error of their own
            return None
        is_like = (
            tree == self._tree
            and all(map(_lies, leaves, self._arrays))
            and {*map(id, leaves)}.isdisjoint(map(id, state))
        )
        return self._program if is_like else None

    def remember(self, program: Any, given: tuple, taken: tuple) -> None:
        """Remember a call, if it took all arrays as they were given.

        Args:
          program: of the call.
          given: its arguments as the caller gave them; empty if some had names.
          taken: as the program took them.
        """
        self._program = None
        leaves, tree = jax.tree.flatten(given[1:])
        if not given or not _are_taken(leaves, jax.tree.leaves(taken[1:])):
            return
        if self._is_given:
            state = jax.tree.leaves(given[0])
            if not _are_taken(state, jax.tree.leaves(taken[0])):
                return
            self._state[:] = map(weakref.ref, state)
        self._program, self._tree, self._arrays = program, tree, [*map(_place, leaves)]


def _are_taken(given: Sequence[Any], taken: Sequence[Any]) -> bool:
    is_same = len(given) == len(taken) and all(map(operator.is_, given, taken))
    return is_same and all(isinstance(leaf, jax.Array) for leaf in given)


def _place(array: Any) -> tuple:
    return type(array), array.shape, array.sharding, array.committed


def _lies(leaf: Any, place: tuple) -> bool:
    kind, shape, sharding, committed = place
    return (
        type(leaf) is kind  # not a tracer
        and leaf.shape == shape
        and (leaf.sharding is sharding or leaf.sharding == sharding)
        and leaf.committed == committed
    )
