"""Writes a host's latest commit to the run's directory, after its processes have ended.

`jdp run` starts it with the commit memory's descriptor, and reads its JSON answer.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jdp.checkpoint import orbax_files, shards, split_state
from jdp.checkpoint.commit_memory import Commit, CommitMemory
from jdp.checkpoint.directory import Folder, sealed
from jdp.checkpoint.manifest import TornError
from jdp.checkpoint.saved_leaves import is_split, leaves_of, to_disk, to_disk_named, unpack
from jdp.checkpoint.split_state import CommitPart


# A commit in shards: each host in turn writes its shards into one folder, and the last makes the
# checkpoint.
def gathered_commits(records: Sequence[CommitPart]) -> list[list[CommitPart]]:
    """Return the records of each commit to save with this host's help, latest first.

    Of complete commits, only the latest.
    """
    found: dict[tuple[int, int, str], list[CommitPart]] = defaultdict(list)
    for each in records:
        found[each.facts["life"], each.facts["step"], each.facts["tag"]].append(each)
    latest_first = [found[key] for key in sorted(found, reverse=True)]
    return [each for each in latest_first if split_state.is_whole_commit(each)][:1] or latest_first


def add_parts(folder: Folder, found: Sequence[CommitPart]) -> int:
    """Write this host's shards of one commit to a locked folder; return how many are missing."""
    facts = found[0].facts
    gathering = folder.gathering(facts["life"], facts["step"], facts["tag"])
    readable, written = split_state.CommitReader(found), _written(gathering)
    has = {n for each in written.values() for n in each["held"]}
    num = len(shards.pieces(facts))
    if mine := [n for n in range(num) if readable.has(n) and n not in has]:
        written |= _write(gathering, facts, readable, mine)
    missing = num - len(has) - len(mine)
    if not missing:
        _finish(folder, gathering, facts, written)
    return missing


# Folder number -> pieces and checksums.
def _written(gathering: Path) -> dict[int, dict[str, Any]]:
    found = {}
    for path in gathering.glob("*.json"):
        try:
            found[int(path.stem)] = json.loads(path.read_text())
        except ValueError:  # its host ended during the write
            continue
    return found


def _write(
    gathering: Path, facts: dict[str, Any], readable: split_state.CommitReader, mine: list[int]
) -> dict[int, dict[str, Any]]:
    folder = len([*gathering.glob("state-*")])
    names, state = shards.names(facts), gathering / shards.folder_name(folder)

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        for n in mine:
            yield from to_disk_named([names[n]], [readable.read([n])[n]]).items()

    orbax_files.write_parts(state, arrays())
    answer = {"held": mine, "files": sealed(state)}
    (gathering / f"{folder}.json").write_text(json.dumps(answer))
    return {folder: answer}


def _finish(
    folder: Folder, gathering: Path, facts: dict[str, Any], written: dict[int, dict[str, Any]]
) -> None:
    folder_of = {n: number for number, each in written.items() for n in each["held"]}
    pieces, num_parts = shards.pieces(facts), len(facts["parts"])
    placed = [part._replace(writer=folder_of[n]) for n, part in enumerate(pieces[:num_parts])]
    whole_in = {str(part.leaf): folder_of[n] for n, part in enumerate(pieces) if n >= num_parts}
    kept = shards.of_all_processes(facts) | {"parts": placed, "whole_in": whole_in}
    sums = {name: each for found in written.values() for name, each in found["files"].items()}
    life, step = facts["life"], facts["step"]
    folder.finish(gathering, life, step, kept, sums)
    for path in folder.place(life, step).glob("[0-9]*.json"):
        path.unlink()
    folder.discard_gathering(up_to=(life, step))


Candidate = Commit | list[split_state.CommitPart]

_GATHERING_TIMEOUT_S = 600.0


def save_last_commit(file: int) -> dict[str, Any]:
    """Write the latest commit as a checkpoint, unless one is as recent."""
    memory = CommitMemory(file)
    records = split_state.commit_parts(memory)
    whole = memory.latest(lambda facts: not is_split(facts))
    candidates = ([whole] if whole else []) + gathered_commits(records)
    if not candidates:
        return {}
    folder = Folder(_facts_of(candidates[0])["directory"])
    if not folder.path.is_dir():
        raise FileNotFoundError(f"{folder.path} is not on this host")
    # Another host may write there, too.
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
    return {"error": f"{' and '.join(missing)} are on other hosts or were not written"}


# Returns how many shards are missing.
def _save(folder: Folder, memory: CommitMemory, candidate: Candidate) -> int:
    if isinstance(candidate, list):
        return add_parts(folder, candidate)
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


# Return (life, step), at least `least`.
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
