"""The commits and checkpoints that one process can restore."""

import functools
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jdp.checkpoint import split_commit, split_disk
from jdp.checkpoint.commit_memory import Commit, CommitMemory
from jdp.checkpoint.directory import Checkpoint, Folder
from jdp.checkpoint.manifest import TornError
from jdp.checkpoint.restore_split import Readable
from jdp.checkpoint.saved_leaves import disk_names, from_disk, is_split, leaves_of, unpack
from jdp.checkpoint.split_commit import CommitPart

_log = logging.getLogger("jdp")

Saved = tuple[dict[str, Any], list[np.ndarray]]  # facts, values


class Key(NamedTuple):
    """Identifies a written state of a run; a later state compares greater.

    All commits of one life and step are equal, unless both sides of a network partition began
    that life. The tag tells them apart.
    """

    life: int
    step: int
    is_commit: bool = False
    tag: str = ""


class Sources:
    """The states this process can restore: its host's commits or, on process 0, a later checkpoint.

    Attributes:
      keys: keys of these states, without commits of which the host may have only parts.
      records: the parts of commits that processes of this host wrote.
      is_split: whether the checkpoint was written in parts.
      life: the last life of the run known to this process.
      torn: the damaged checkpoints, if all are damaged.
    """

    def __init__(self, folder: Folder, memory: CommitMemory | None) -> None:
        self._folder, self._memory = folder, memory
        self._found: dict[Key, tuple[dict[str, Any], Callable[[], list[np.ndarray]]]] = {}
        self._commit: Commit | None = None
        self.records: dict[Key, list[CommitPart]] = defaultdict(list)
        self.torn: list[str] = []
        self.is_split = False
        if memory:
            self._find_commits(memory)
        self.life = max((key.life for key in [*self._found, *self.records]), default=0)
        if jax.process_index() == 0:
            self._find_checkpoint(folder)
        self.keys = [*self._found]

    def offer(self) -> dict[str, Any]:
        """Return the facts about this process for `latest`, as JSON."""
        split = [[key, split_commit.coverage(found)] for key, found in self.records.items()]
        offer = {"keys": self.keys, "split": split, "is_split": self.is_split}
        return {**offer, "life": self.life, "torn": self.torn}

    def read(self, key: Key) -> Saved:
        """Read one of these states; the values of a commit stay in its memory, to be copied."""
        facts, read = self._found[key]
        return facts, read()

    def facts(self, key: Key) -> dict[str, Any] | None:
        """Return the facts of a state; None if this process has none of it."""
        if key in self.records:
            return self.records[key][0].facts
        return self._found[key][0] if key in self._found else None

    def readable(self, key: Key, facts: dict[str, Any], *, sees_directory: bool) -> Readable:
        """Return the pieces of a state that this process can read."""
        if not key.is_commit:
            checkpoint = self._folder.checkpoint(key.life, key.step)
            return split_disk.CheckpointReader(
                self._folder, checkpoint, facts, is_here=sees_directory
            )
        if key in self._found and self._memory and self._commit:
            return split_commit.CommitReader([CommitPart(self._memory, self._commit, facts)])
        return split_commit.CommitReader(self.records.get(key, []))

    def forget_later(self, key: Key, own: CommitMemory) -> None:
        """Clear commits with missing parts from this process's area; the next ones replace them."""
        own.forget(lambda facts: is_split(facts) and _key_of(facts) > key)

    def _find_commits(self, memory: CommitMemory) -> None:
        directory = str(self._folder.path)
        for record in split_commit.records(memory):
            # Another Checkpointer may have written it, if a script trains several models in turn.
            if record.facts["directory"] == directory:
                self.records[_key_of(record.facts)].append(record)
        commit = memory.latest(lambda facts: not is_split(facts))
        facts = commit.facts if commit else {}
        if commit and facts["directory"] == directory:
            self._commit = commit
            read = functools.partial(_view_commit, memory, commit, facts)
            self._found[_key_of(facts)] = facts, read

    def _find_checkpoint(self, folder: Folder) -> None:
        torn = []
        whole = [key for key, each in self.records.items() if split_commit.is_whole(each)]
        for checkpoint in folder.checkpoints():
            self.life = max(self.life, checkpoint.life)
            key = Key(checkpoint.life, checkpoint.step)
            if any(key < commit for commit in [*self._found, *whole]):
                return
            try:
                facts = folder.facts(checkpoint)
            except TornError as error:
                torn.append(f"{checkpoint.path}: {error}")
                _log.warning("jdp: a checkpoint is damaged and is passed over: %s.", torn[-1])
                continue
            self._found[key] = facts, functools.partial(_read_checkpoint, folder, checkpoint, facts)
            self.is_split = is_split(facts)
            return
        self.torn = torn


def _key_of(facts: dict[str, Any]) -> Key:
    return Key(facts["life"], facts["step"], True, facts["tag"])


def _view_commit(memory: CommitMemory, commit: Commit, facts: dict[str, Any]) -> list[np.ndarray]:
    return unpack(memory.view(commit), leaves_of(facts))


def _read_checkpoint(
    folder: Folder, checkpoint: Checkpoint, facts: dict[str, Any]
) -> list[np.ndarray]:
    return from_disk(disk_names(leaves_of(facts)), functools.partial(folder.read, checkpoint))
