"""Whether a call of a step is like its last one, so that nothing has to be placed or looked up."""

import operator
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jdp import jax_compat
from jdp.distributed.checks import known_leaves


class LatestCall(NamedTuple):
    """A call of a step, whose arguments were taken as they were given. It holds none of them.

    It never changes, so that threads may call one step.

    Attributes:
      program: its `CompiledStep`.
      state: references to the leaves of a state that needs no placing: the one that was returned,
        or that of an `eval_step`.
      is_callers: whether that state is the caller's, who may donate it to another step.
      tree: the structure of the other arguments.
      places: how each of their arrays lies.
    """

    program: Any
    state: list[weakref.ref]
    is_callers: bool
    tree: Any
    places: Sequence[tuple]

    def is_like(self, args: tuple) -> bool:
        """Whether another call has this state, and further arrays that lie as those of this one.

        Args:
          args: of that call, all by position.
        """
        if not args:
            return False
        state = jax.tree.leaves(args[0])
        if not known_leaves.are(self.state, state):
            return False
        try:
            leaves, tree = jax.tree.flatten(args[1:])
        except ValueError:  # keys that cannot be sorted, which have an error of their own
            return False
        may_be_gone = state if self.is_callers else []
        if jax_compat.DELETED_ARRAY_CRASHES:
            may_be_gone = [*state, *leaves]
        return (
            tree == self.tree
            and all(map(_lies, leaves, self.places))
            and {*map(id, leaves)}.isdisjoint(map(id, state))  # a donated array is copied
            and not any(map(jax_compat.is_deleted, may_be_gone))
        )

    def after(self, returned: list[weakref.ref]) -> "LatestCall":
        """Return the record of a call like this one.

        Args:
          returned: references to the leaves of the state that it returned.
        """
        return self if self.is_callers else self._replace(state=returned)


def of(program: Any, given: tuple, taken: tuple, returned: Any) -> LatestCall | None:
    """Return the record of a call, None if an argument had to be placed.

    Args:
      program: its `CompiledStep`.
      given: its arguments as the caller gave them.
      taken: as the program took them.
      returned: the state that it returned, None for an `eval_step`.
    """
    placed = slice(0 if returned is None else 1, None)  # a returned state lies where it has to
    leaves = jax.tree.leaves(given[placed])
    if not _are_taken(leaves, jax.tree.leaves(taken[placed])):
        return None
    state = jax.tree.leaves(given[0] if returned is None else returned)
    if all(getattr(leaf.sharding, "mesh", None) != program.mesh for leaf in state):
        return None  # the mesh is that of `init`, which may change
    leaves, tree = jax.tree.flatten(given[1:])
    refs, places = [weakref.ref(leaf) for leaf in state], [_place(leaf) for leaf in leaves]
    return LatestCall(program, refs, returned is None, tree, places)


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
