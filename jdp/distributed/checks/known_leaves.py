"""Leaves of states that are known to be equal on all processes, since steps returned them."""

import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax

Refs = list[weakref.ref]

# Leaves of the last state of each step over several processes. They are not kept by the steps:
# processes collect a step at different times, while another step goes on with its state.
_returned: list[Refs] = []
# Further leaves that are known to be equal on all processes.
_vouched: Refs = []


def vouch(leaves: Iterable[Any]) -> None:
    """Record that these leaves are the same on all processes; replaces those recorded before."""
    _vouched[:] = [weakref.ref(leaf) for leaf in leaves if isinstance(leaf, jax.Array)]


def keep(own: Refs) -> None:
    """Record the list of the leaves of a step's last state, which the step goes on to change."""
    if not any(refs is own for refs in _returned):
        _returned.append(own)


def unknown(leaves: Sequence[Any], own: Refs) -> Sequence[int]:
    """Return the positions of leaves of a state that no step returned and nothing vouched for.

    `own` is the list that the called step handed to `keep`.
    """
    _returned[:] = [refs for refs in _returned if refs is own or _any_alive(refs)]
    if any(are(refs, leaves) for refs in _returned):
        return ()
    known = {id(ref()) for refs in (*_returned, _vouched) for ref in refs}
    return [i for i, leaf in enumerate(leaves) if id(leaf) not in known]


def are(refs: Refs, leaves: Sequence[Any]) -> bool:
    """Whether these are references to these leaves, in this order."""
    # In every call, for every leaf, so without a line of Python for each.
    return len(leaves) == len(refs) and all(map(operator.is_, map(operator.call, refs), leaves))


def _any_alive(refs: Refs) -> bool:
    return any(ref() is not None for ref in refs)
