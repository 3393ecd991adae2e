"""One `Checkpointer` with commits at a time: a host has room for the commits of one."""

import weakref
from typing import Protocol


class Committing(Protocol):
    """A session of a `Checkpointer` with commits, as far as others must know it."""

    is_over: bool


_committing: weakref.WeakSet[Committing] = weakref.WeakSet()


def require_alone(session: Committing) -> None:
    """Record a session that commits.

    Raises:
      RuntimeError: if another one is not over.
    """
    if not all(other.is_over for other in _committing):
        raise RuntimeError(
            "another Checkpointer is at work in this process, and the launcher keeps the commits "
            "of one. Keep all states in one tree, ckpt.restore((state, other)), or close() the "
            "other one first."
        )
    _committing.add(session)
