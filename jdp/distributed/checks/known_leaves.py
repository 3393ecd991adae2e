"""Leaves of states that are known to be equal on all processes, because steps returned them."""

import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax

Refs = list[weakref.ref]

# Leaves of the last state of each step over several processes. The steps do not own the lists,
# since processes delete a step at different times, while another step continues with its state.
_returned: list[Refs] = []
# Further leaves that are known to be equal on all processes.
_vouched: Refs = []


def vouch(leaves: Iterable[Any]) -> None:
    """Record that these leaves are equal on all processes, in place of those recorded before."""
    _vouched[:] = [weakref.ref(leaf) for leaf in leaves if isinstance(leaf, jax.Array)]


def keep(own: Refs) -> None:
    """Record a step's own list of its last state's leaves, which the step keeps up to date."""
    if not any(refs is own for refs in _returned):
        _returned.append(own)


def unknown(leaves: Sequence[Any], own: Refs) -> Sequence[int]:
    """Return the positions of leaves that are not known to be equal on all processes.

    Args:
      own: the list that the called step passed to `keep`.
    """
    _returned[:] = [refs for refs in _returned if refs is own or _any_alive(refs)]
    if any(are(refs, leaves) for refs in _returned):
        return ()
    known = {id(ref()) for refs in (*_returned, _vouched) for ref in refs}
    return [i for i, leaf in enumerate(leaves) if id(leaf) not in known]


def are(refs: Refs, leaves: Sequence[Any]) -> bool:
    """Whether `refs` are references to `leaves`, in this order."""
    # This runs in every call for every leaf, so avoid a Python loop.
    return len(leaves) == len(refs) and all(map(operator.is_, map(operator.call, refs), leaves))


def _any_alive(refs: Refs) -> bool:
    return any(ref() is not None for ref in refs)
