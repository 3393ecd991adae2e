"""The restorable states, and the choice of the latest."""

import functools
import logging
import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jdp.checkpoint import directory, split_state
from jdp.checkpoint.code_change import facts_of_script
from jdp.checkpoint.commit_memory import Commit, CommitMemory
from jdp.checkpoint.directory import Checkpoint, Folder
from jdp.checkpoint.manifest import TornError
from jdp.checkpoint.saved_leaves import disk_names, from_disk, is_split, leaves_of, unpack
from jdp.checkpoint.split_state import CommitPart, Readable, require_shared
from jdp.distributed import agree, kv_store
from jdp.worker.build_info import version

_log = logging.getLogger("jdp")

Saved = tuple[dict[str, Any], list[np.ndarray]]  # facts, values


class Key(NamedTuple):
    """Identifies a written state of a run; a later state compares greater.

    The tag tells apart lives that both sides of a network partition began.
    """

    life: int
    step: int
    is_commit: bool = False
    tag: str = ""


class Sources:
    """The states restorable by this process: its host's commits; on process 0 also a checkpoint.

    Attributes:
      keys: of these states, except commits with perhaps only shards on the host.
      records: commit shards by processes of this host.
      torn: the damaged checkpoints, if all are.
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
        """Return this process's facts for `latest`, as JSON."""
        split = [[key, split_state.coverage(found)] for key, found in self.records.items()]
        offer = {"keys": self.keys, "split": split, "is_split": self.is_split}
        return {**offer, "life": self.life, "torn": self.torn}

    def read(self, key: Key) -> Saved:
        """Read one of these states; a commit's values stay in its memory."""
        facts, read = self._found[key]
        return facts, read()

    def facts(self, key: Key) -> dict[str, Any] | None:
        """Return a state's facts."""
        if key in self.records:
            return self.records[key][0].facts
        return self._found[key][0] if key in self._found else None

    def readable(self, key: Key, facts: dict[str, Any], *, sees_directory: bool) -> Readable:
        """Return the pieces of a state readable by this process."""
        if not key.is_commit:
            checkpoint = self._folder.checkpoint(key.life, key.step)
            return split_state.CheckpointReader(
                self._folder, checkpoint, facts, is_here=sees_directory
            )
        if key in self._found and self._memory and self._commit:
            return split_state.CommitReader([CommitPart(self._memory, self._commit, facts)])
        return split_state.CommitReader(self.records.get(key, []))

    def forget_later(self, key: Key, own: CommitMemory) -> None:
        """Clear this process's later commits with missing shards."""
        own.forget(lambda facts: is_split(facts) and _key_of(facts) > key)

    def _find_commits(self, memory: CommitMemory) -> None:
        directory = str(self._folder.path)
        for record in split_state.commit_parts(memory):
            # A script may train several models.
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
        whole = [key for key, each in self.records.items() if split_state.is_whole_commit(each)]
        for checkpoint in folder.checkpoints():
            self.life = max(self.life, checkpoint.life)
            key = Key(checkpoint.life, checkpoint.step)
            if any(key < commit for commit in [*self._found, *whole]):
                return
            try:
                facts = folder.facts(checkpoint)
            except TornError as error:
                torn.append(f"{checkpoint.path}: {error}")
                _log.warning("jdp: skipped a damaged checkpoint: %s.", torn[-1])
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


class Latest(NamedTuple):
    """The state to restore, equal on all processes."""

    key: Key
    source: int  # a process that has it
    lacking: list[int]
    where: str
    is_split: bool = False  # written in shards, or to be restored in shards
    lost: Sequence[int] = ()  # indices of shards of `per_rank` state that no process has

    @property
    def tier(self) -> str:
        """Its tier, as reported to the launcher."""
        return "commit" if self.key.is_commit else "checkpoint"


class Found(NamedTuple):
    """What a run's processes found, and its next life."""

    sources: Sources  # of this process
    latest: Latest | None  # equal on all processes, as are life and tag
    life: int
    tag: str
    hosts: tuple[int, ...]  # of each process
    memories: tuple[str, ...]  # of each process's commits
    sees_directory: bool  # of process 0

    def identity(self) -> dict[str, Any]:
        """Return the facts written with all states of the next life."""
        versions = {"jdp": version(), "jax": jax.__version__}
        return {"life": self.life, "tag": self.tag, **versions, **facts_of_script()}


def all_processes() -> tuple[int, ...]:
    """Return all processes, since they restore together."""
    if jax.process_count() > 1 and not kv_store.is_open():
        raise RuntimeError(
            f"{jax.process_count()} processes cannot agree on what to restore, because this JAX "
            "has no store for it. Use a version of JAX tested with jdp."
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
    commit_every: int,
) -> Found:
    """Return what all processes of `group` found."""
    is_first = jax.process_index() == 0
    with agree.propagating_errors(group, "while it looked for what to restore"):
        if is_first:
            folder.lock(resumes=is_later)
        sources = Sources(folder, memory)
    mine: dict[str, Any] = sources.offer() | {"resumes": resumes, "splits": splits, "host": host}
    mine |= {"is_later": is_later, "memory": memory.name if memory else ""}
    mine |= {"tag": secrets.token_hex(4), "owner": folder.owner() if is_first else ""}
    other = directory.find_foreign(folder.path) if is_first and not is_later else None
    mine |= {"commit_every": commit_every, "other": other and [str(other), other.advice()]}
    offers = agree.all_gather(group, mine, what="what there is to restore")
    _require_equal_intervals(offers)
    owner = offers[0]["owner"]
    if any(each["splits"] for each in offers.values()):
        with agree.propagating_errors(group, "while it looked for the directory"):
            require_shared(folder, owner)
        agree.all_gather(group, None, what="whether all see the directory")
    life = 1 + max(each["life"] for each in offers.values())
    found = latest(offers, str(folder.path))
    hosts = tuple(offers[process]["host"] for process in group)
    memories = tuple(offers[process]["memory"] for process in group)
    return Found(sources, found, life, offers[0]["tag"], hosts, memories, folder.owner() == owner)


# Each process writes a share of its host's commits.
def _require_equal_intervals(offers: dict[int, dict[str, Any]]) -> None:
    every = {process: each["commit_every"] for process, each in offers.items()}
    odd = agree.odd_one(every)
    if odd is not None:
        raise RuntimeError(
            f"commit_every is {every[odd[0]]} on process {odd[0]} and {every[odd[1]]} on process "
            f"{odd[1]}, but processes write a commit together. Pass the same number on all."
        )


def latest(offers: dict[int, dict[str, Any]], directory: str) -> Latest | None:
    """Return the latest state that any process offers.

    >>> offers = {0: {"keys": [], "resumes": True}, 1: {"keys": [[1, 40, True, "a"]]}}
    >>> found = latest(offers, "runs")
    >>> found.key.step, found.source, found.lacking, found.where
    (40, 1, [0], 'the commit of step 40')
    """
    keys = {process: [Key(*key) for key in each["keys"]] for process, each in offers.items()}
    missing = _missing(offers)
    split = {key for key, each in missing.items() if not each.num}
    for process, each in offers.items():
        keys[process] += split.intersection(Key(*key) for key, _ in each.get("split", ()))
    key = max((key for each in keys.values() for key in each), default=None)
    if key is None:
        if torn := offers[0].get("torn"):
            raise RuntimeError(
                f"all {len(torn)} checkpoints are damaged: {'; '.join(torn)}. Inspect them, then "
                "move the directory away or pass a new one to Checkpointer."
            )
        _require_own(directory, offers[0])
        return None
    if not offers[0]["resumes"]:
        raise RuntimeError(
            f"{directory} holds step {key.step} of an earlier run. To continue from there: jdp "
            "run --resume, JDP_RESUME=1 or Checkpointer(..., resume=True). To start over: "
            f"another directory, or empty this one{_metrics_too()}."
        )
    _warn_of_lost(missing, key)
    having = [process for process, each in keys.items() if key in each]
    lacking = [process for process in keys if process not in having]
    where = f"step {key.step} of {directory}"
    if key.is_commit:
        where = f"the commit of step {key.step}"
    is_split = key in split or any(each.get("splits") for each in offers.values())
    is_split |= not key.is_commit and offers[0].get("is_split", False)
    lost = missing[key].replaceable if key in split else ()
    return Latest(key, having[0], [*keys] if key in split else lacking, where, is_split, lost)


# `jdp.log` refuses such a file, too, but after the first step.
def _metrics_too() -> str:
    return "; and move metrics.jsonl away, too" if Path("metrics.jsonl").exists() else ""


# A run that recovers has begun there already.
def _require_own(directory: str, offer: dict[str, Any]) -> None:
    what, advice = offer.get("other") or ("", "")
    if what and offer["resumes"]:
        raise RuntimeError(
            f"{what}, and no checkpoint of jdp, so the run would begin at step 0. Write "
            f"{advice}, and start in another directory: "
            'jdp.Checkpointer("checkpoints").restore(state).'
        )
    if jax.process_index() != 0:
        return
    if what:
        _log.warning(
            "jdp: %s. This run starts at step 0; to start from them, write %s.", what, advice
        )
    elif offer["is_later"]:
        _log.warning(
            "jdp: the earlier processes saved no step in %s, so this run starts at step 0.",
            directory,
        )
    elif offer["resumes"]:
        _log.warning("jdp: nothing to resume in %s: this run starts at step 0.", directory)


# Shards of each commit missing on all hosts.
def _missing(offers: dict[int, dict[str, Any]]) -> dict[Key, split_state.Missing]:
    found: dict[Key, list[split_state.Coverage]] = defaultdict(list)
    for offer in offers.values():
        for key, coverage in offer.get("split", ()):
            found[Key(*key)].append(split_state.Coverage(*coverage))
    memories = {offer.get("memory") for offer in offers.values()}
    return {key: split_state.missing(each, memories) for key, each in found.items()}


# Log what a lost host had alone.
def _warn_of_lost(missing: dict[Key, split_state.Missing], key: Key) -> None:
    if jax.process_index() != 0:
        return
    if key in missing and missing[key].replaceable:
        _log.warning(
            "jdp: the commit of step %d lacks the jdp.per_rank state of ranks on lost hosts. Its "
            "resize= makes that of all ranks from the ranks that remain.",
            key.step,
        )
    lost = max((each for each in missing if missing[each].num), default=key)
    if lost > key and not key.is_commit:
        _log.warning(
            "jdp: the commit of step %d lacks %d of its parts, which were on lost hosts or not "
            "written in time. This run continues from step %d on the disk.",
            lost.step,
            missing[lost].num,
            key.step,
        )
