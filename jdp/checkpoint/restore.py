"""Which commit or checkpoint is the latest, on any process, and getting it to all of them."""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jdp.checkpoint.commit_memory import CommitMemory
from jdp.checkpoint.directory import Checkpoint, Folder, TornError
from jdp.checkpoint.fill import fill
from jdp.checkpoint.saved_leaves import (
    SavedLeaf,
    disk_names,
    from_disk,
    leaves_of,
    pack,
    packed_bytes,
    unpack,
)
from jdp.distributed import agree
from jdp.distributed.checks import known_leaves

_log = logging.getLogger("jdp")

# A state is handed over in parts of this many bytes, so that little of it is there twice.
_PART_BYTES = 64 << 20

Saved = tuple[dict[str, Any], list[np.ndarray]]  # facts, values


class Key(NamedTuple):
    """Which state of a run was written; the later one compares greater.

    All commits of one life and step are the same, unless two parts of a torn network both began
    that life: hence the tag.
    """

    life: int
    step: int
    is_commit: bool = False
    tag: str = ""


class Sources:
    """What this process could restore: the commit of its host, or on process 0 a later checkpoint.

    Attributes:
      keys: of these states.
      life: the last life of the run that is known here.
      torn: which checkpoints are damaged, if all are.
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
        # Another Checkpointer may have written it: a script may train one model after the other.
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
    """The state that is restored, as all processes see it."""

    key: Key
    source: int  # a process that has it
    lacking: list[int]  # processes that do not
    where: str

    @property
    def tier(self) -> str:
        """Return what the launcher is told of it."""
        return "commit" if self.key.is_commit else "checkpoint"


def latest(offers: dict[int, dict[str, Any]], directory: str) -> Latest | None:
    """Choose from the keys that all processes offer; None if there are none.

    Raises:
      RuntimeError: if all checkpoints are damaged and there is no commit.

    >>> found = latest({0: {"keys": []}, 1: {"keys": [[1, 40, True, "a"]]}}, "runs")
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
        return None
    having = [process for process, each in keys.items() if key in each]
    lacking = [process for process in keys if process not in having]
    where = f"step {key.step} of {directory}"
    if key.is_commit:
        where = f"the commit of step {key.step}"
    return Latest(key, having[0], lacking, where)


def restored(
    group: tuple[int, ...],
    found: Latest,
    sources: Sources,
    state: Any,
    batches: Any,
    *,
    keeps_missing: bool,
    require: Callable[[dict[str, Any]], None],
) -> Any:
    """Return the state that was found, in the place of `state`, and set the position of `batches`.

    `require` may refuse the facts that were written with the state.

    Raises:
      ValueError: if it is of another model, or without a position although there are batches.
    """
    facts, values = _loaded(group, found, sources)
    with agree.propagating_errors(group, f"while it restored {found.where}"):
        require(facts)
        state, taken = fill(
            state, leaves_of(facts), values, found.where, keeps_missing=keeps_missing
        )
        if batches is not None:
            _set_position(batches, facts, found.where)
    agree.all_gather(group, None, what="whether all restored", of=f" {found.where}")
    known_leaves.vouch(taken)  # All have them from one place.
    return state


# Processes that have the values read them on their own host, and nothing is computed over the
# processes unless one of them lacks the values.
def _loaded(group: tuple[int, ...], found: Latest, sources: Sources) -> Saved:
    me = jax.process_index()
    facts: dict[str, Any] = {}
    values: list[np.ndarray] = []
    with agree.propagating_errors(group, f"while it read {found.where}"):
        if me not in found.lacking:
            facts, values = sources.read(found.key)
    if found.lacking:
        is_source = me == found.source
        gathered = agree.all_gather(
            group,
            facts if is_source else None,
            what="what to restore",
            of=f" from {found.where}",
        )
        facts = gathered[found.source]
        values = _handed_over(values, leaves_of(facts), is_source=is_source)
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
