"""Whether a call of a step is like its last one, so that nothing has to be placed or looked up."""

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jdp import jax_compat
from jdp.distributed.checks import known_leaves

_is_deleted = operator.methodcaller("is_deleted")
_flatten = jax.tree_util.tree_flatten  # without the frame of `jax.tree.flatten`


class KnownState:
    """A state that a step takes as it is, by its leaves. It holds none of them.

    The containers of a state may be new, as after `replace`, and the author may have exchanged a
    leaf within a dict, so the leaves are compared. Another thread may call the step, too: the call
    of one then finds the state of the other, and is prepared.

    Args:
      state: the state.
      mesh: where it is.
      is_callers: whether it is the caller's, who may donate it to another step.

    Attributes:
      leaves: references to its leaves.
    """

    __slots__ = ("_any_deleted", "leaves")

    def __init__(self, state: Any, mesh: Mesh, *, is_callers: bool = False) -> None:
        self._any_deleted: Any = None
        if is_callers or jax_compat.DELETED_ARRAY_CRASHES:
            # On one device an array has one shard, and JAX's own method tells all.
            self._any_deleted = _any_deleted_of_one if mesh.size == 1 else _any_deleted
        self.is_followed_by(state)

    def is_followed_by(self, state: Any) -> None:
        """Record that the step has returned another state."""
        self.leaves = [*map(weakref.ref, jax.tree.leaves(state))]

    def are_leaves(self, leaves: Sequence[Any]) -> bool:
        """Whether the leaves of another state are those of this one, and alive."""
        if not known_leaves.are(self.leaves, leaves):
            return False
        return self._any_deleted is None or not self._any_deleted(leaves)


class LatestCall:
    """A call of a step, whose arguments were taken as they were given. It holds none of them.

    Args:
      program: its `CompiledStep`.
      known: the state of the next call: the one that was returned, or that of an `eval_step`.
      rest: the other arguments.
    """

    __slots__ = ("_places", "_tree", "known", "program")

    def __init__(self, program: Any, known: KnownState, rest: tuple) -> None:
        self.program, self.known = program, known
        leaves, self._tree = jax.tree.flatten(rest)
        self._places = [_place(leaf) for leaf in leaves]

    def is_like(self, args: tuple) -> bool:
        """Whether another call has this state, and further arrays that lie as those of this one."""
        if not args:
            return False
        state = _flatten(args[0])[0]
        if not self.known.are_leaves(state):
            return False
        try:
            leaves, tree = _flatten(args[1:])
        except ValueError:  # keys that cannot be sorted, which have an error of their own
            return False
        if tree != self._tree or not {*map(id, leaves)}.isdisjoint(map(id, state)):
            return False  # a donated array is copied for another argument
        for leaf, (kind, shape, sharding, committed) in zip(leaves, self._places, strict=True):
            if not (
                type(leaf) is kind  # not a tracer
                and leaf.shape == shape
                and (leaf.sharding is sharding or leaf.sharding == sharding)
                and leaf.committed == committed
            ):
                return False
        return not (jax_compat.DELETED_ARRAY_CRASHES and any(map(jax_compat.is_deleted, leaves)))


def record_call(
    program: Any, given: tuple, taken: tuple, returned: Any, known: KnownState | None
) -> LatestCall | None:
    """Return the record of a call, None if an argument had to be placed."""
    placed = slice(0 if returned is None else 1, None)  # a returned state lies where it has to
    leaves = jax.tree.leaves(given[placed])
    if not _are_taken(leaves, jax.tree.leaves(taken[placed])):
        return None
    state = given[0] if returned is None else returned
    if all(getattr(leaf.sharding, "mesh", None) != program.mesh for leaf in jax.tree.leaves(state)):
        return None  # the mesh is that of `init`, which may change
    known = KnownState(state, program.mesh, is_callers=True) if known is None else known
    return LatestCall(program, known, given[1:])


def _any_deleted(leaves: Sequence[Any]) -> bool:
    return any(map(jax_compat.is_deleted, leaves))


def _any_deleted_of_one(leaves: Sequence[Any]) -> bool:
    return any(map(_is_deleted, leaves))


def _are_taken(given: Sequence[Any], taken: Sequence[Any]) -> bool:
    is_same = len(given) == len(taken) and all(map(operator.is_, given, taken))
    return is_same and all(isinstance(leaf, jax.Array) for leaf in given)


def _place(array: Any) -> tuple:
    return type(array), array.shape, array.sharding, array.committed
