"""Finds the commits and checkpoints of all processes, and selects the latest."""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jdp.checkpoint.commit_memory import CommitMemory
from jdp.checkpoint.directory import Checkpoint, Folder, TornError
from jdp.checkpoint.saved_leaves import disk_names, from_disk, leaves_of, unpack

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
    """The states this process can restore: its host's commit or, on process 0, a later checkpoint.

    Attributes:
      keys: keys of these states.
      life: the last life of the run known to this process.
      torn: the damaged checkpoints, if all are damaged.
    """

    def __init__(self, folder: Folder, memory: CommitMemory | None) -> None:
        self._readers: dict[Key, Callable[[], Saved]] = {}
        self.torn: list[str] = []
        self._find_commit(folder, memory)
        self.life = max((key.life for key in self._readers), default=0)
        if jax.process_index() == 0:
            self._find_checkpoint(folder)
        self.keys = [*self._readers]

    def read(self, key: Key) -> Saved:
        """Read one of these states."""
        return self._readers[key]()

    def _find_commit(self, folder: Folder, memory: CommitMemory | None) -> None:
        commit = memory.latest() if memory else None
        facts = commit.facts if commit else {}
        # Another Checkpointer may have written it, if a script trains several models in turn.
        if memory and commit and facts["directory"] == str(folder.path):
            key = Key(facts["life"], facts["step"], True, facts["tag"])
            self._readers[key] = lambda: (facts, unpack(memory.read(commit), leaves_of(facts)))

    def _find_checkpoint(self, folder: Folder) -> None:
        torn = []
        for checkpoint in folder.checkpoints():
            self.life = max(self.life, checkpoint.life)
            key = Key(checkpoint.life, checkpoint.step)
            if any(key < commit for commit in self._readers):
                return
            try:
                facts = folder.facts(checkpoint)
            except TornError as error:
                torn.append(f"{checkpoint.path}: {error}")
                _log.warning("jdp: a checkpoint is damaged and is passed over: %s.", torn[-1])
                continue
            self._readers[key] = functools.partial(_read_checkpoint, folder, checkpoint, facts)
            return
        self.torn = torn


def _read_checkpoint(folder: Folder, checkpoint: Checkpoint, facts: dict[str, Any]) -> Saved:
    read = functools.partial(folder.read, checkpoint)
    return facts, from_disk(disk_names(leaves_of(facts)), read)


class Latest(NamedTuple):
    """The state to restore, equal on all processes."""

    key: Key
    source: int  # a process that has it
    lacking: list[int]  # processes that do not
    where: str

    @property
    def tier(self) -> str:
        """Return the name of its tier, as reported to the launcher."""
        return "commit" if self.key.is_commit else "checkpoint"


def latest(offers: dict[int, dict[str, Any]], directory: str) -> Latest | None:
    """Return the latest state that any process offers; None if there are none.

    Raises:
      RuntimeError: if all checkpoints are damaged and there is no commit, or if there is a state
        but process 0 does not resume.

    >>> offers = {0: {"keys": [], "resumes": True}, 1: {"keys": [[1, 40, True, "a"]]}}
    >>> found = latest(offers, "runs")
    >>> found.key.step, found.source, found.lacking, found.where
    (40, 1, [0], 'the commit of step 40')
    """
    keys = {process: [Key(*key) for key in each["keys"]] for process, each in offers.items()}
    key = max((key for each in keys.values() for key in each), default=None)
    if key is None:
        if torn := offers[0].get("torn"):
            raise RuntimeError(
                f"all {len(torn)} checkpoints are damaged: {'; '.join(torn)}. Inspect them before "
                "starting over, then move the directory away or give Checkpointer a new one."
            )
        if offers[0]["resumes"] and jax.process_index() == 0:
            _log.warning("jdp: nothing to resume in %s: this begins anew.", directory)
        return None
    if not offers[0]["resumes"]:
        raise RuntimeError(
            f"{directory} holds step {key.step} of an earlier run. To go on from there: jdp run "
            "--resume, JDP_RESUME=1 or Checkpointer(..., resume=True). To begin anew: another "
            "directory, or this one emptied."
        )
    having = [process for process, each in keys.items() if key in each]
    lacking = [process for process in keys if process not in having]
    where = f"step {key.step} of {directory}"
    if key.is_commit:
        where = f"the commit of step {key.step}"
    return Latest(key, having[0], lacking, where)
