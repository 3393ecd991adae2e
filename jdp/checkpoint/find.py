"""Gather the states that each process could restore, and begin a new life of the run."""

import secrets
from typing import Any, NamedTuple

import jax

from jdp.checkpoint.commit_memory import CommitMemory
from jdp.checkpoint.directory import Folder
from jdp.checkpoint.shared_checkpoint import require_shared
from jdp.checkpoint.sources import Latest, Sources, latest
from jdp.distributed import agree, kv_store


class Found(NamedTuple):
    """The states that the processes of a run found, and the number of its next life."""

    sources: Sources  # of this process
    latest: Latest | None  # equal on all processes, as are life and tag
    life: int
    tag: str
    hosts: tuple[int, ...]  # the number of the host of each process
    sees_directory: bool  # whether this process sees the directory of process 0


def all_processes() -> tuple[int, ...]:
    """Return the numbers of all processes, which restore together.

    Raises:
      RuntimeError: if they have no store.
    """
    if jax.process_count() > 1 and not kv_store.is_open():
        raise RuntimeError(
            f"there are {jax.process_count()} processes, and this JAX gives no store in which they "
            "could agree on what to restore. Use a version of JAX that jdp was tested with."
        )
    return tuple(range(jax.process_count()))


def find(
    group: tuple[int, ...],
    folder: Folder,
    memory: CommitMemory | None,
    *,
    resumes: bool,
    is_later: bool,
    host: int,
    splits: bool,
) -> Found:
    """Return the states that all processes of `group` found.

    Args:
      group: all processes.
      folder: of the checkpoints, which process 0 locks.
      memory: for the commits of this host, if there are any.
      resumes: whether the run may continue from a state that it finds.
      is_later: whether processes of this run have died, or stopped at SIGTERM.
      host: number of the host of this process.
      splits: whether the state of this process is split over processes.

    Raises:
      RuntimeError: as from `latest`, or if another process failed.
      OSError: if the state is split, and a process does not see the directory of process 0.
    """
    is_first = jax.process_index() == 0
    with agree.propagating_errors(group, "while it looked for what to restore"):
        if is_first:
            folder.lock(resumes=is_later)
        sources = Sources(folder, memory)
    mine: dict[str, Any] = sources.offer() | {"resumes": resumes, "splits": splits, "host": host}
    mine |= {"tag": secrets.token_hex(4), "owner": folder.owner() if is_first else ""}
    offers = agree.all_gather(group, mine, what="what there is to restore")
    owner = offers[0]["owner"]
    if any(each["splits"] for each in offers.values()):
        with agree.propagating_errors(group, "while it looked for the directory"):
            require_shared(folder, owner)
        agree.all_gather(group, None, what="whether all see the directory")
    life = 1 + max(each["life"] for each in offers.values())
    found = latest(offers, str(folder.path))
    hosts = tuple(offers[process]["host"] for process in group)
    return Found(sources, found, life, offers[0]["tag"], hosts, folder.owner() == owner)
