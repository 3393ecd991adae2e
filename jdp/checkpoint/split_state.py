"""Commits and checkpoints of a state sharded over processes."""

import json
import time
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jdp import pytrees, rank_state
from jdp.checkpoint import orbax_files, shards
from jdp.checkpoint.commit_memory import Commit, CommitMemory
from jdp.checkpoint.directory import Checkpoint, Folder, sealed
from jdp.checkpoint.saved_leaves import (
    SavedLeaf,
    describe,
    from_disk,
    is_split,
    leaves_of,
    padded_bytes,
    to_disk_named,
)
from jdp.distributed import agree, kv_store
from jdp.distributed.agree import broadcast_bytes


class CommitPart(NamedTuple):
    """The shards of a commit by one process."""

    memory: CommitMemory
    commit: Commit
    facts: dict[str, Any]


class Coverage(NamedTuple):
    """A commit's shards in some records; a JSON list between processes."""

    held: list[tuple[int, int]]  # ranges of shard indices
    num_parts: int  # of the commit
    has_whole: bool  # holds the unsplit leaves
    replaceable: Sequence[shards.Replaceable] = ()


def commit_parts(memory: CommitMemory) -> list[CommitPart]:
    """Return the shards by processes of this host."""
    intact = [(area, commit) for area in memory.areas() for commit in area.intact()]
    found = [CommitPart(area, commit, commit.facts) for area, commit in intact]
    return [each for each in found if is_split(each.facts)]


def coverage(found: Sequence[CommitPart]) -> Coverage:
    """Return which shards of one commit some records hold."""
    facts = [record.facts for record in found]
    held = {n for each in facts for n in each["held"]}
    has_whole = any(each["has_whole"] for each in facts)
    num_parts, replaceable = len(facts[0]["parts"]), facts[0].get("replaceable", [])
    return Coverage(shards.ranges([*held]), num_parts, has_whole, replaceable)


class Missing(NamedTuple):
    """A commit's shards missing on all hosts."""

    num: int  # shards that no rule replaces; the unsplit leaves count as one
    replaceable: list[int]  # indices of the others


def missing(coverages: Sequence[Coverage], memories: Container[str]) -> Missing:
    """Return a commit's shards missing on all hosts, which have these memories.

    >>> own = [(3, 5, "a"), (5, 7, "b")]
    >>> missing([Coverage([(0, 2)], 7, True, own), Coverage([(3, 4)], 7, True, own)], {"a"})
    Missing(num=2, replaceable=[5, 6])
    """
    held = _numbers((start, stop) for each in coverages for start, stop in each.held)
    lost = {*range(coverages[0].num_parts)} - held
    bounds = ((start, stop) for start, stop, own in coverages[0].replaceable if own not in memories)
    replaceable = lost & _numbers(bounds)
    num = len(lost - replaceable) + (not any(each.has_whole for each in coverages))
    return Missing(num, sorted(replaceable))


def _numbers(bounds: Iterable[tuple[int, int]]) -> set[int]:
    return {n for start, stop in bounds for n in range(start, stop)}


def is_whole_commit(found: Sequence[CommitPart]) -> bool:
    """Whether a host's records are a complete commit."""
    return missing([coverage(found)], ()) == (0, [])


def wait_for_all(facts: Mapping[str, Any]) -> None:
    """Wait until all processes wrote their shards, before they overwrite the last commit's."""
    name = f"jdp/committed/{facts['life']}/{facts['tag']}/{facts['step']}"
    kv_store.wait_for_all(name, timeout_s=agree.timeout_s())


class CommitReader:
    """The pieces (`shards.pieces`) in this host's memory."""

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


# The store rejects an infinite timeout.
_SLICE_S = 60.0


def write(folder: Folder, facts: dict[str, Any], values: Sequence[np.ndarray], number: int) -> None:
    """Write this process's shards; return when the checkpoint is complete.

    All processes call it in the thread that writes checkpoints. Process 0 makes the folder, and the
    manifest when all have written. `number`: of this call in this life, from 0.
    """
    names = shards.names(facts)
    arrays = to_disk_named([names[n] for n in shards.stored(facts)], values)
    me, step = jax.process_index(), facts["step"]
    # A late process must not disturb the next attempt.
    part = folder.part(facts["life"], step, attempt=number)
    store = _Store(f"jdp/saved/{facts['tag']}", number, step)
    failure, sums = None, {}
    try:
        if me == 0:
            folder.begin(part)
            store.put("begun", {"owner": folder.owner()})
        else:
            require_shared(folder, _right(store.get("begun", 0))["owner"])
        state = part / shards.folder_name(me)
        orbax_files.write_parts(state, arrays.items())
        sums = sealed(state)
        store.put(f"{me}", {"files": sums})
    except Exception as error:
        failure = folder.failure(step, arrays, error)
        failure.__cause__ = error
        store.put("begun" if me == 0 else f"{me}", {"error": str(failure)})
    if me == 0:
        failure = _finish(folder, part, facts, store, sums, failure)
    answer = store.get("done", 0)
    if failure is not None:
        raise failure
    _right(answer)


def require_shared(folder: Folder, owner: str) -> None:
    """Refuse a directory that process 0 has not locked."""
    if folder.owner() != owner:
        raise OSError(
            f"process {jax.process_index()} does not see the directory {folder.path} of process "
            "0, but each process writes its part of a checkpoint there. Pass Checkpointer a "
            "directory on a file system shared by all hosts."
        )


def _finish(
    folder: Folder,
    part: Path,
    facts: dict[str, Any],
    store: "_Store",
    sums: dict[str, list[Any]],
    failure: OSError | None,
) -> OSError | None:
    """Make a checkpoint of all shards, or remove them and return why."""
    end = time.monotonic() + agree.timeout_s()
    # Even after a failure: files being written could not be removed.
    for process in range(1, jax.process_count()):
        try:
            sums |= _right(store.get(f"{process}", process, end))["files"]
        except Exception as error:
            failure = failure or _failure(folder, facts, error)
    try:
        if failure is None:
            store.delete_previous()
            kept = shards.of_all_processes(facts)
            folder.finish(part, facts["life"], facts["step"], kept, sums)
    except Exception as error:
        failure = _failure(folder, facts, error)
    if failure is not None:
        folder.discard(part)
    store.put("done", {} if failure is None else {"error": str(failure)})
    return failure


def _failure(folder: Folder, facts: dict[str, Any], error: Exception) -> OSError:
    failure = folder.failure(facts["step"], {}, error)
    failure.__cause__ = error
    return failure


def _right(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise OSError(answer["error"])
    return answer


class _Store:
    """Messages about one checkpoint, through JAX's store."""

    def __init__(self, run: str, number: int, step: int) -> None:
        self._run, self._number, self._step = run, number, step

    def put(self, key: str, value: Any) -> None:
        kv_store.offer(f"{self._run}/{self._number}/{key}", json.dumps(value))

    def get(self, key: str, process: int, end: float | None = None) -> Any:
        timeout_s = agree.timeout_s()
        end = time.monotonic() + timeout_s if end is None else end
        left_s = end - time.monotonic()
        while True:
            slice_s = max(0.0, min(left_s, _SLICE_S))
            text = kv_store.get(f"{self._run}/{self._number}/{key}", timeout_s=slice_s)
            if text is not None:
                return json.loads(text)
            if (left_s := end - time.monotonic()) <= 0:
                break
        raise OSError(
            f"process {process} did not write its part of step {self._step} within {timeout_s:g} s."
        )

    def delete_previous(self) -> None:
        if self._number:
            kv_store.delete(f"{self._run}/{self._number - 1}/")


class CheckpointReader:
    """The pieces (`shards.pieces`) of a checkpoint; readable if this process sees the directory."""

    def __init__(
        self,
        folder: Folder,
        checkpoint: Checkpoint,
        facts: Mapping[str, Any],
        *,
        is_here: bool = True,
    ) -> None:
        self._folder, self._checkpoint, self._is_here = folder, checkpoint, is_here
        self._is_split = is_split(facts)
        self._pieces, self._names = shards.pieces(facts), shards.names(facts)
        self._described = shards.described(facts)

    def has(self, n: int) -> bool:
        """Whether a piece can be read."""
        return self._is_here

    def read(self, numbers: Sequence[int]) -> dict[int, np.ndarray]:
        """Read pieces from disk."""
        of: dict[str, list[int]] = defaultdict(list)
        for n in numbers:
            of[shards.folder_name(self._pieces[n].writer)].append(n)
        found: dict[int, np.ndarray] = {}
        for name, inside in of.items():
            wanted = {self._names[n]: self._described[n] for n in inside}
            values = from_disk(wanted, lambda names, name=name: self._read(names, name))
            found |= dict(zip(inside, values, strict=True))
        return found

    def _read(self, names: list[str], name: str) -> Mapping[str, np.ndarray]:
        if self._is_split:
            return orbax_files.read_parts(self._checkpoint.path / name, names)
        return self._folder.read(self._checkpoint, names)


class Readable(Protocol):
    """The pieces of a saved state readable by this process."""

    def has(self, n: int) -> bool:
        """Whether a piece can be read."""

    def read(self, numbers: Sequence[int]) -> dict[int, np.ndarray]:
        """Read pieces."""


def split_values(
    facts: dict[str, Any],
    readable: Readable,
    state: Any = None,
    group: tuple[int, ...] = (),
    lost: Sequence[int] = (),
) -> list[shards.SplitValue]:
    """Return the leaves saved beside `facts`, to be fetched when placed, without `lost` rows."""
    leaves, pieces = leaves_of(facts), dict(enumerate(shards.pieces(facts)))
    cut = {pieces[n].leaf for n in lost}
    leaves, pieces = shards.without(leaves, pieces, lost)
    needed = {*pieces} if state is None else _needed(state, leaves, pieces, cut)
    sources = _sources(group, state, needed, readable) if len(group) > 1 else {}
    transfer = _Transfer(shards.described(facts), readable, needed, sources, group)
    of: dict[int, dict[int, shards.LeafPart]] = defaultdict(dict)
    for n, part in pieces.items():
        of[part.leaf][n] = part
    return [
        shards.SplitValue(leaf, of[i], transfer.fetch, is_cut=i in cut)
        for i, leaf in enumerate(leaves)
    ]


class _Transfer:
    """Reads this process's pieces, and sends pieces unreadable to others.

    `sources`: the sender of each piece unreadable to some process.
    """

    def __init__(
        self,
        described: Sequence[SavedLeaf],
        readable: Readable,
        needed: set[int],
        sources: dict[int, int],
        group: tuple[int, ...],
    ) -> None:
        self._described, self._readable = described, readable
        self._needed, self._sources, self._group = needed, sources, group

    def fetch(self, numbers: Sequence[int]) -> dict[int, np.ndarray]:
        me = jax.process_index()
        sent = {n for n in numbers if self._sources.get(n) == me}
        here = [n for n in numbers if n in sent or (n in self._needed and self._readable.has(n))]
        values = self._readable.read(here)
        for n in numbers:
            if n in self._sources:
                leaf, data = self._described[n], None
                if n in sent:
                    data = np.ascontiguousarray(values[n]).reshape(-1).view(np.uint8)
                received = broadcast_bytes(data, leaf.num_bytes, self._group)
                if n in self._needed and n not in values:
                    values[n] = received.view(jnp.dtype(leaf.dtype)).reshape(leaf.shape)
        return {n: value for n, value in values.items() if n in self._needed}


# The pieces that overlap this process's shards; all of `per_rank` state to be resized, and of other
# leaves than jax.Arrays.
def _needed(
    state: Any, leaves: Sequence[SavedLeaf], pieces: dict[int, shards.LeafPart], cut: Container[int]
) -> set[int]:
    boxes: dict[str, set[shards.Box] | None] = {}
    pairs = zip(jax.tree.leaves(state), rank_state.owners(state), strict=True)
    found = [(x, owner) for x, owner in pairs if pytrees.is_array(x)]
    shapes = {leaf.name: None if i in cut else leaf.shape for i, leaf in enumerate(leaves)}
    for new, (x, owner) in zip(describe(state), found, strict=True):
        x = pytrees.without_key(x)
        known = boxes.setdefault(new.name, set())
        is_resized = owner is not None and shapes.get(new.name) != new.shape
        if is_resized or getattr(x, "sharding", None) is None:
            boxes[new.name] = None
        elif known is not None:
            indices = x.sharding.addressable_devices_indices_map(x.shape).values()
            known |= {shards.box_of(index, x.shape) for index in indices}
    return {n for n, part in pieces.items() if _is_needed(part, leaves[part.leaf], boxes)}


def _is_needed(
    part: shards.LeafPart, leaf: SavedLeaf, boxes: dict[str, set[shards.Box] | None]
) -> bool:
    wanted = boxes.get(leaf.name, set())
    if wanted is None or any(len(box) != len(part.box) for box in wanted):
        return True
    return any(shards.common(part.box, box) is not None for box in wanted)


def _sources(
    group: tuple[int, ...], state: Any, needed: set[int], readable: Readable
) -> dict[int, int]:
    lacks = sorted(n for n in needed if not readable.has(n))
    mine = {"lacks": lacks, "state": agree.digest([*map(str, map(tuple, describe(state)))])}
    gathered = agree.all_gather(group, mine, what="what each restores")
    odd = agree.odd_one({process: each["state"] for process, each in gathered.items()})
    if odd is not None:
        raise RuntimeError(
            f"process {odd[0]} restores a state with other leaves than process {odd[1]}. Pass "
            "the same state to ckpt.restore on all processes."
        )
    wanted = sorted({n for each in gathered.values() for n in each["lacks"]})
    if not wanted:
        return {}
    had = [n for n in wanted if readable.has(n)]
    sources: dict[int, int] = {}
    for process, each in agree.all_gather(group, had, what="which parts each has").items():
        for n in each:
            sources.setdefault(n, process)
    if missing := [n for n in wanted if n not in sources]:
        raise RuntimeError(f"{len(missing)} parts of the saved state are missing on all processes.")
    return sources
