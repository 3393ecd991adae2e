"""Commits of a state that is split over processes: each writes its parts to its host's memory."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jdp.checkpoint import shards
from jdp.checkpoint.commit_memory import Commit, CommitMemory
from jdp.checkpoint.saved_leaves import is_split, padded_bytes
from jdp.distributed import agree, kv_store


class CommitPart(NamedTuple):
    """The parts of a commit that one process wrote."""

    memory: CommitMemory
    commit: Commit
    facts: dict[str, Any]


class Coverage(NamedTuple):
    """The parts of a commit in some records; a JSON list between processes."""

    held: list[tuple[int, int]]  # ranges of numbers of parts
    num_parts: int  # of the commit
    has_whole: bool  # whether they hold the leaves that are not split


def records(memory: CommitMemory) -> list[CommitPart]:
    """Return the records of the parts that processes of this host wrote."""
    intact = [(area, commit) for area in memory.areas() for commit in area.intact()]
    found = [CommitPart(area, commit, commit.facts) for area, commit in intact]
    return [each for each in found if is_split(each.facts)]


def coverage(found: Sequence[CommitPart]) -> Coverage:
    """Return the parts of one commit in some records."""
    facts = [record.facts for record in found]
    held = {n for each in facts for n in each["held"]}
    has_whole = any(each["has_whole"] for each in facts)
    return Coverage(shards.ranges([*held]), len(facts[0]["parts"]), has_whole)


def num_missing(coverages: Sequence[Coverage]) -> int:
    """Return how many parts a commit lacks, given what each host holds of it.

    The leaves that are not split count as one part.

    >>> num_missing([Coverage([(0, 2)], 6, True), Coverage([(3, 6)], 6, True)])
    1
    """
    held = {n for each in coverages for start, stop in each.held for n in range(start, stop)}
    return coverages[0].num_parts - len(held) + (not any(each.has_whole for each in coverages))


def is_whole(found: Sequence[CommitPart]) -> bool:
    """Whether the records of a host are a complete commit."""
    return not num_missing([coverage(found)])


def wait_for_all(facts: Mapping[str, Any]) -> None:
    """Wait until all processes have written their parts of a commit.

    Each then writes over the commit before. Without this, a death could leave two commits, both
    with parts missing.
    """
    name = f"jdp/committed/{facts['life']}/{facts['tag']}/{facts['step']}"
    kv_store.wait_for_all(name, timeout_s=agree.timeout_s())


class CommitReader:
    """The pieces (`shards.pieces`) that a process can read from the memory of its host."""

    def __init__(self, found: Sequence[CommitPart]) -> None:
        self._where: dict[int, tuple[CommitPart, int]] = {}
        for record in found:
            described, first = shards.described(record.facts), 0
            for n in shards.stored(record.facts):
                self._where.setdefault(n, (record, first))
                first += padded_bytes(described[n])
        self._described = shards.described(found[0].facts) if found else []

    def has(self, n: int) -> bool:
        """Whether a piece can be read."""
        return n in self._where

    def read(self, numbers: Sequence[int]) -> dict[int, np.ndarray]:
        """Copy pieces from the memory."""
        return {n: self._copied(n) for n in numbers}

    def _copied(self, n: int) -> np.ndarray:
        record, first = self._where[n]
        leaf = self._described[n]
        data = record.memory.read(record.commit, first, leaf.num_bytes)
        return data.view(jnp.dtype(leaf.dtype)).reshape(leaf.shape)
