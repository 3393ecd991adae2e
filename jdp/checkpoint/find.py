"""Gather the states that each process could restore, choose the latest, and begin a new life."""

import logging
import secrets
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jdp.checkpoint import other_tools, split_commit
from jdp.checkpoint.code_change import facts_of_script
from jdp.checkpoint.commit_memory import CommitMemory
from jdp.checkpoint.directory import Folder
from jdp.checkpoint.shared_checkpoint import require_shared
from jdp.checkpoint.sources import Key, Sources
from jdp.distributed import agree, kv_store
from jdp.worker.version import version

_log = logging.getLogger("jdp")


class Latest(NamedTuple):
    """The state to restore, equal on all processes."""

    key: Key
    source: int  # a process that has it
    lacking: list[int]  # processes that do not
    where: str
    is_split: bool = False  # whether it was written in parts, or is to be restored in parts

    @property
    def tier(self) -> str:
        """Return the name of its tier, as reported to the launcher."""
        return "commit" if self.key.is_commit else "checkpoint"


class Found(NamedTuple):
    """The states that the processes of a run found, and the number of its next life."""

    sources: Sources  # of this process
    latest: Latest | None  # equal on all processes, as are life and tag
    life: int
    tag: str
    hosts: tuple[int, ...]  # the number of the host of each process
    sees_directory: bool  # whether this process sees the directory of process 0

    def identity(self) -> dict[str, Any]:
        """Return the facts of the next life and its programs, for all states that it writes."""
        versions = {"jdp": version(), "jax": jax.__version__}
        return {"life": self.life, "tag": self.tag, **versions, **facts_of_script()}


def all_processes() -> tuple[int, ...]:
    """Return the numbers of all processes, which restore together."""
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
    commit_every: int,
) -> Found:
    """Return the states that all processes of `group` found."""
    is_first = jax.process_index() == 0
    with agree.propagating_errors(group, "while it looked for what to restore"):
        if is_first:
            folder.lock(resumes=is_later)
        sources = Sources(folder, memory)
    mine: dict[str, Any] = sources.offer() | {"resumes": resumes, "splits": splits, "host": host}
    mine["is_later"] = is_later
    mine |= {"tag": secrets.token_hex(4), "owner": folder.owner() if is_first else ""}
    other = other_tools.find(folder.path) if is_first and not is_later else None
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
    return Found(sources, found, life, offers[0]["tag"], hosts, folder.owner() == owner)


# Each process writes a share of each commit of its host.
def _require_equal_intervals(offers: dict[int, dict[str, Any]]) -> None:
    every = {process: each["commit_every"] for process, each in offers.items()}
    odd = agree.odd_one(every)
    if odd is not None:
        raise RuntimeError(
            f"commit_every is {every[odd[0]]} on process {odd[0]} and {every[odd[1]]} on process "
            f"{odd[1]}: processes write a commit together, so give all the same number."
        )


def latest(offers: dict[int, dict[str, Any]], directory: str) -> Latest | None:
    """Return the latest state that any process offers; None if there are none.

    >>> offers = {0: {"keys": [], "resumes": True}, 1: {"keys": [[1, 40, True, "a"]]}}
    >>> found = latest(offers, "runs")
    >>> found.key.step, found.source, found.lacking, found.where
    (40, 1, [0], 'the commit of step 40')
    """
    keys = {process: [Key(*key) for key in each["keys"]] for process, each in offers.items()}
    num_missing = _num_missing(offers)
    split = {key for key, num in num_missing.items() if not num}
    for process, each in offers.items():
        keys[process] += split.intersection(_split_keys(each))
    key = max((key for each in keys.values() for key in each), default=None)
    if key is None:
        if torn := offers[0].get("torn"):
            raise RuntimeError(
                f"all {len(torn)} checkpoints are damaged: {'; '.join(torn)}. Inspect them before "
                "starting over, then move the directory away or give Checkpointer a new one."
            )
        _require_own(directory, offers[0])
        return None
    if not offers[0]["resumes"]:
        raise RuntimeError(
            f"{directory} holds step {key.step} of an earlier run. To continue from there: jdp run "
            "--resume, JDP_RESUME=1 or Checkpointer(..., resume=True). To begin anew: another "
            f"directory, or this one emptied{_metrics_too()}."
        )
    _warn_of_lost(num_missing, key)
    having = [process for process, each in keys.items() if key in each]
    lacking = [process for process in keys if process not in having]
    where = f"step {key.step} of {directory}"
    if key.is_commit:
        where = f"the commit of step {key.step}"
    is_split = key in split or any(each.get("splits") for each in offers.values())
    is_split |= not key.is_commit and offers[0].get("is_split", False)
    return Latest(key, having[0], [*keys] if key in split else lacking, where, is_split)


# `jdp.log` refuses the file of an earlier run, too, but only after the first step.
def _metrics_too() -> str:
    return "; and move metrics.jsonl away, too" if Path("metrics.jsonl").exists() else ""


# A run that recovers has begun there already.
def _require_own(directory: str, offer: dict[str, Any]) -> None:
    what, advice = offer.get("other") or ("", "")
    if what and offer["resumes"]:
        raise RuntimeError(
            f"{what}, and no checkpoint of jdp, so the run would begin at step 0. Write {advice}, "
            'and begin in another directory: jdp.Checkpointer("checkpoints").restore(state).'
        )
    if jax.process_index() != 0:
        return
    if what:
        _log.warning("jdp: %s. This begins anew; to begin with that, write %s.", what, advice)
    elif offer["is_later"]:
        _log.warning(
            "jdp: the processes before kept no step in %s: this begins at step 0.", directory
        )
    elif offer["resumes"]:
        _log.warning("jdp: nothing to resume in %s: this begins anew.", directory)


def _split_keys(offer: dict[str, Any]) -> list[Key]:
    return [Key(*key) for key, _ in offer.get("split", ())]


# The commits in parts: how many each of all hosts together lack.
def _num_missing(offers: dict[int, dict[str, Any]]) -> dict[Key, int]:
    found: dict[Key, list[split_commit.Coverage]] = defaultdict(list)
    for offer in offers.values():
        for key, coverage in offer.get("split", ()):
            found[Key(*key)].append(split_commit.Coverage(*coverage))
    return {key: split_commit.num_missing(each) for key, each in found.items()}


# In the log of process 0, a commit that would have been taken if no host had been lost.
def _warn_of_lost(num_missing: dict[Key, int], key: Key) -> None:
    lost = max((each for each, num in num_missing.items() if num), default=key)
    if lost > key and not key.is_commit and jax.process_index() == 0:
        _log.warning(
            "jdp: the commit of step %d lacks %d of its parts, which were on hosts that are gone "
            "or were not written in time. This continues from step %d, which is on the disk.",
            lost.step,
            num_missing[lost],
            key.step,
        )
