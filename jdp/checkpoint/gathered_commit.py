"""Makes a checkpoint of a commit in parts, when the processes that wrote it have ended.

Each host writes the parts that it has into one folder, one host after the other. The host that
adds the last part makes the checkpoint.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jdp.checkpoint import part_files, shards, split_commit
from jdp.checkpoint.directory import Folder, sealed
from jdp.checkpoint.saved_leaves import to_disk_named
from jdp.checkpoint.split_commit import CommitPart


def commits(records: Sequence[CommitPart]) -> list[list[CommitPart]]:
    """Return the records of each commit that this host may help to save, the latest first.

    If this host has whole commits, return only the latest of them.
    """
    found: dict[tuple[int, int, str], list[CommitPart]] = defaultdict(list)
    for each in records:
        found[each.facts["life"], each.facts["step"], each.facts["tag"]].append(each)
    latest_first = [found[key] for key in sorted(found, reverse=True)]
    return [each for each in latest_first if split_commit.is_whole(each)][:1] or latest_first


def add(folder: Folder, found: Sequence[CommitPart]) -> int:
    """Write the parts of this host of one commit, and return how many are missing still.

    With none missing they are a checkpoint. `folder` is locked.
    """
    facts = found[0].facts
    gathering = folder.gathering(facts["life"], facts["step"], facts["tag"])
    readable, written = split_commit.CommitReader(found), _written(gathering)
    has = {n for each in written.values() for n in each["held"]}
    num = len(shards.pieces(facts))
    if mine := [n for n in range(num) if readable.has(n) and n not in has]:
        written |= _write(gathering, facts, readable, mine)
    missing = num - len(has) - len(mine)
    if not missing:
        _finish(folder, gathering, facts, written)
    return missing


# The folders that hosts have written: number -> pieces, and checksums of the files.
def _written(gathering: Path) -> dict[int, dict[str, Any]]:
    found = {}
    for path in gathering.glob("*.json"):
        try:
            found[int(path.stem)] = json.loads(path.read_text())
        except ValueError:  # its host ended while it wrote it
            continue
    return found


def _write(
    gathering: Path, facts: dict[str, Any], readable: split_commit.CommitReader, mine: list[int]
) -> dict[int, dict[str, Any]]:
    folder = len([*gathering.glob("state-*")])
    names, state = shards.names(facts), gathering / shards.folder_name(folder)

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        for n in mine:
            yield from to_disk_named([names[n]], [readable.read([n])[n]]).items()

    part_files.write(state, arrays())
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
