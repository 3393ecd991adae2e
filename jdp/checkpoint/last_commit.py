"""Writes the latest commit of a host to the directory of its run, when its processes have ended.

`jdp run` starts it with the descriptor of the commit memory, and reads its answer in JSON.
"""

import json
import sys
from typing import Any

from jdp.checkpoint import gathered_commit, split_commit
from jdp.checkpoint.commit_memory import Commit, CommitMemory
from jdp.checkpoint.directory import Folder
from jdp.checkpoint.manifest import TornError
from jdp.checkpoint.saved_leaves import is_split, leaves_of, to_disk, unpack

Candidate = Commit | list[split_commit.CommitPart]

# Hosts write their parts one after the other.
_GATHERING_TIMEOUT_S = 600.0


def save_last_commit(file: int) -> dict[str, Any]:
    """Write the latest commit as a checkpoint, unless an intact one is at least as recent."""
    memory = CommitMemory(file)
    records = split_commit.records(memory)
    whole = memory.latest(lambda facts: not is_split(facts))
    candidates = ([whole] if whole else []) + gathered_commit.commits(records)
    if not candidates:
        return {}
    folder = Folder(_facts_of(candidates[0])["directory"])
    if not folder.path.is_dir():
        raise FileNotFoundError(f"{folder.path} is not on this host")
    # The same command on another host may write there, too.
    folder.lock(resumes=True, timeout_s=_GATHERING_TIMEOUT_S if records else None)
    try:
        missing = []
        for candidate in sorted(candidates, key=_number, reverse=True):
            life, step = _latest_intact(folder, _number(candidate)) or (0, 0)
            if not life:
                life, step = _number(candidate)
                if num_missing := _save(folder, memory, candidate):
                    missing.append(f"{num_missing} parts of step {step}")
                    continue
            return {"life": life, "step": step, "directory": str(folder.path)}
    finally:
        folder.unlock()
    return {"error": f"{' and '.join(missing)} are on other hosts, or were not written"}


# Returns how many parts are missing.
def _save(folder: Folder, memory: CommitMemory, candidate: Candidate) -> int:
    if isinstance(candidate, list):
        return gathered_commit.add(folder, candidate)
    facts = candidate.facts
    leaves = leaves_of(facts)
    values = to_disk(leaves, unpack(memory.view(candidate), leaves))
    folder.write(facts["life"], facts["step"], facts, values)
    return 0


def _facts_of(candidate: Candidate) -> dict[str, Any]:
    return candidate[0].facts if isinstance(candidate, list) else candidate.facts


def _number(candidate: Candidate) -> tuple[int, int]:
    facts = _facts_of(candidate)
    return facts["life"], facts["step"]


# Life and step of the latest intact checkpoint, unless it is older than `least`.
def _latest_intact(folder: Folder, least: tuple[int, int]) -> tuple[int, int] | None:
    for checkpoint in folder.checkpoints():
        if checkpoint[:2] < least:
            return None
        try:
            folder.facts(checkpoint)
            return checkpoint[:2]
        except TornError:
            pass
    return None


if __name__ == "__main__":
    try:
        answer = save_last_commit(int(sys.argv[1]))
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))
