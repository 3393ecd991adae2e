"""One `Checkpointer` with commits at a time: a host has room for the commits of one."""

import weakref
from typing import Protocol

from jdp.checkpoint.host_commits import HostCommits
from jdp.checkpoint.shares import Share
from jdp.worker.launcher_client import Assignment, LauncherClient


class Committing(Protocol):
    """A session of a `Checkpointer` with commits, as far as others must know it."""

    is_over: bool


_committing: weakref.WeakSet[Committing] = weakref.WeakSet()


def require_alone(session: Committing) -> None:
    """Record a session that commits."""
    if not all(other.is_over for other in _committing):
        raise RuntimeError(
            "another Checkpointer is at work in this process, and the launcher keeps the commits "
            "of one. Keep all states in one tree, ckpt.restore((state, other)), or close() the "
            "other one first."
        )
    _committing.add(session)


def commits_of(
    session: Committing, launcher: LauncherClient, assigned: Assignment, num_processes: int
) -> HostCommits | None:
    """Return the commit memory of the launcher for this process; None if it may not use it."""
    require_alone(session)
    num_shares = assigned.num_local if num_processes > 1 else 1
    if assigned.local_id >= num_shares:
        return None
    return HostCommits(launcher.commit_file, Share(assigned.local_id, num_shares))
