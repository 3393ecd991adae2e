"""Which commit or checkpoint is the latest, on any process, and getting it to all of them."""

import logging
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jdp import rank_state
from jdp.checkpoint.commit_memory import CommitMemory
from jdp.checkpoint.directory import Checkpoint, Folder, TornError
from jdp.checkpoint.saved_leaves import (
    SavedLeaf,
    describe,
    disk_names,
    from_disk,
    leaves_of,
    pack,
    packed_bytes,
    require_same,
    unpack,
    with_shapes,
)
from jdp.checkpoint.snapshot import place
from jdp.distributed import agree
from jdp.distributed.checks import known_leaves

_log = logging.getLogger("jdp")

# A state is handed over in parts of this many bytes, so that little of it is there twice.
_PART_BYTES = 64 << 20


class Restorable(NamedTuple):
    """What is restored, as all processes see it."""

    tier: str  # "commit" or "checkpoint"
    life: int
    step: int
    source: int  # a process that has it
    lacking: list[int]  # processes that have not
    where: str


class Sources:
    """What this process could restore.

    Args:
      folder: of the checkpoints. Only process 0 looks there, and reads only what is newer than
        its own commit.
      memory: of this host's commits, if there is a launcher.

    Raises:
      RuntimeError: if there are checkpoints and all are damaged.
    """

    def __init__(self, folder: Folder, memory: CommitMemory | None) -> None:
        self._folder, self._memory = folder, memory
        self._commit = memory.latest() if memory else None
        facts = self._commit.facts if self._commit else {}
        if facts.get("directory") != str(folder.path):
            # Another Checkpointer wrote it: a script may train one model after the other.
            self._commit, facts = None, {}
        # A commit of a later life of the run is later. Commits of one life and step
        # are the same, unless two parts of a torn network both took that life: hence the tag.
        self._key = [facts[name] for name in ("life", "step", "tag")] if facts else None
        self._life: int = facts.get("life", 0)
        self._checkpoint: Checkpoint | None = None
        self._checkpoint_facts: dict[str, Any] = {}
        self._torn: list[str] = []
        if jax.process_index() == 0:
            self._find_checkpoint()

    def offer(self) -> dict[str, Any]:
        """Return a description of it that JSON can hold."""
        written = self._checkpoint
        return {
            "commit": self._key,
            "checkpoint": [written.life, written.step] if written else None,
            "life": self._life,
            "where": str(self._folder.path),
            "torn": self._torn,
        }

    def read(self, tier: str) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Read what was offered: facts and values."""
        if tier == "commit":
            assert self._memory is not None and self._commit is not None
            facts = self._commit.facts
            return facts, unpack(self._memory.read(self._commit), leaves_of(facts))
        assert self._checkpoint is not None
        facts = self._checkpoint_facts
        leaves = leaves_of(facts)
        return facts, from_disk(leaves, self._folder.read(self._checkpoint, disk_names(leaves)))

    def _find_checkpoint(self) -> None:
        torn = []
        for checkpoint in self._folder.checkpoints():
            self._life = max(self._life, checkpoint.life)
            if self._key and [checkpoint.life, checkpoint.step] <= self._key[:2]:
                return
            try:
                self._checkpoint_facts = self._folder.facts(checkpoint)
                self._checkpoint = checkpoint
                return
            except TornError as error:
                torn.append(f"{checkpoint.path}: {error}")
                _log.warning("jdp: a checkpoint is damaged and is passed over: %s.", torn[-1])
        self._torn = torn


def latest(offers: dict[int, dict[str, Any]]) -> Restorable | None:
    """Choose from the offers of all processes; None if there is nothing.

    >>> nothing = {"checkpoint": None, "where": "runs"}
    >>> found = latest({0: {"commit": None, **nothing}, 1: {"commit": [1, 40, "a"], **nothing}})
    >>> found.tier, found.step, found.source, found.lacking
    ('commit', 40, 1, [0])
    """
    commits = {process: each["commit"] for process, each in offers.items() if each["commit"]}
    commit = max(commits.values(), default=None)
    checkpoint, where = offers[0]["checkpoint"], offers[0]["where"]
    if checkpoint and (commit is None or checkpoint > commit[:2]):
        others = [process for process in offers if process]
        life, step = checkpoint
        return Restorable("checkpoint", life, step, 0, others, f"step {step} of {where}")
    if commit is None:
        if torn := offers[0].get("torn"):
            raise RuntimeError(
                f"all {len(torn)} checkpoints are damaged: {'; '.join(torn)}. Inspect them before "
                "starting over, then move the directory away or give Checkpointer a new one."
            )
        return None
    holders = [process for process, its in commits.items() if its == commit]
    lacking = [process for process in offers if process not in holders]
    life, step, _ = commit
    return Restorable("commit", life, step, holders[0], lacking, f"the commit of step {step}")


def restored(
    group: tuple[int, ...], found: Restorable, sources: Sources, state: Any, batches: Any
) -> Any:
    """Return the state that was found, in the place of `state`, and set the position of `batches`.

    Raises:
      ValueError: if it is of another model, or without a position although there are batches.
    """
    facts, values = _loaded(group, found, sources)
    with agree.propagating_errors(group, f"while it restored {found.where}"):
        values = rank_state.resized(state, values, found.where)
        saved = with_shapes(leaves_of(facts), values)
        require_same(saved, describe(state), found.where)
        state = place(state, values)
        if batches is not None:
            _set_position(batches, facts, found.where)
    agree.all_gather(group, None, what="whether all restored", of=f" {found.where}")
    known_leaves.vouch(jax.tree.leaves(state))  # All have it from one place.
    return state


# Processes that have the values read them on their own host, and nothing is computed over the
# processes unless one of them lacks the values.
def _loaded(
    group: tuple[int, ...], found: Restorable, sources: Sources
) -> tuple[dict[str, Any], list[np.ndarray]]:
    me = jax.process_index()
    facts: dict[str, Any] = {}
    values: list[np.ndarray] = []
    with agree.propagating_errors(group, f"while it read {found.where}"):
        if me not in found.lacking:
            facts, values = sources.read(found.tier)
    if found.lacking:
        gathered = agree.all_gather(
            group,
            facts if me == found.source else None,
            what="what to restore",
            of=f" from {found.where}",
        )
        facts = gathered[found.source]
        values = _handed_over(values, leaves_of(facts), is_source=me == found.source)
    return facts, values


def position_of(batches: Any) -> dict[str, Any]:
    """Return where the data stands, as it is written among the facts."""
    if batches is None:
        return {"position": None}
    if hasattr(batches, "get_state"):
        state = batches.get_state()
        return {"position": state["position"], "data": state}
    return {"position": int(batches.position)}


def _set_position(batches: Any, facts: dict[str, Any], where: str) -> None:
    if facts["position"] is None:
        raise ValueError(
            f"{where} was written without batches, so it is not known where the data stood. Write "
            "state = ckpt.restore(state), and set batches.position yourself."
        )
    if hasattr(batches, "set_state"):  # jdp 0.1 wrote the position alone
        batches.set_state(facts.get("data", {"position": facts["position"]}))
    else:
        batches.position = facts["position"]


# As integers: a sum of floats over the processes would make 0.0 of -0.0.
def _handed_over(values: list[Any], leaves: list[SavedLeaf], *, is_source: bool) -> list[Any]:
    size = packed_bytes(leaves)
    data = np.concatenate(pack(values)) if is_source and size else np.zeros(size, np.uint8)
    for start in range(0, size, _PART_BYTES):
        part = data[start : start + _PART_BYTES]
        words = multihost_utils.broadcast_one_to_all(part.view(np.uint32), is_source)
        part[:] = words.view(np.uint8)
    return unpack(data, leaves)
