"""The shards of leaves split over processes, and their writers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdp.checkpoint.saved_leaves import SavedLeaf, disk_names, leaves_of

Box = tuple[tuple[int, int], ...]  # start and stop in each dim


class LeafPart(NamedTuple):
    """A leaf's shard, written by one process."""

    leaf: int  # index among the state's arrays
    box: Box
    writer: int  # process; 0 for an unsplit leaf


def parts_of(leaf: int, x: jax.Array) -> list[LeafPart]:
    """Return an array's shards, equal on all processes; the first holder writes one."""
    writers: dict[Box, int] = {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        box = box_of(index, x.shape)
        writers[box] = min(writers.get(box, device.process_index), device.process_index)
    return [LeafPart(leaf, box, writer) for box, writer in sorted(writers.items())]


def box_of(index: Any, shape: Sequence[int]) -> Box:
    """Return an index of an array as a box.

    >>> box_of((slice(None), slice(4, 8)), (3, 8))
    ((0, 3), (4, 8))
    """
    bounds = (each.indices(size) for each, size in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in bounds)


def common(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes."""
    pairs = zip(one, other, strict=True)
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in pairs)
    return box if all(start < stop for start, stop in box) else None


def ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return numbers as ranges.

    >>> ranges([0, 1, 2, 5])
    [(0, 3), (5, 6)]
    """
    found: list[tuple[int, int]] = []
    for n in sorted(numbers):
        if found and found[-1][1] == n:
            found[-1] = found[-1][0], n + 1
        else:
            found.append((n, n + 1))
    return found


def has_whole_rows(box: Box, shape: Sequence[int]) -> bool:
    """Whether a shard is cut in the first dim alone."""
    return all(bounds == (0, size) for bounds, size in zip(box[1:], shape[1:], strict=True))


def without(
    leaves: Sequence[SavedLeaf], parts: Mapping[int, LeafPart], lost: Sequence[int]
) -> tuple[list[SavedLeaf], dict[int, LeafPart]]:
    """Return leaves without the rows of lost shards, and the other shards.

    >>> leaf = SavedLeaf("", (6, 2), "float32", None)
    >>> parts = {n: LeafPart(0, ((2 * n, 2 * n + 2), (0, 2)), n) for n in range(3)}
    >>> [leaf], parts = without([leaf], parts, [1])
    >>> leaf.shape, [part.box for part in parts.values()]
    ((4, 2), [((0, 2), (0, 2)), ((2, 4), (0, 2))])
    """
    found, cut = [*leaves], {n: part for n, part in parts.items() if n not in {*lost}}
    for i in {parts[n].leaf for n in lost}:
        rest = sorted((part.box, n) for n, part in cut.items() if part.leaf == i)
        end = 0
        for ((start, stop), *others), n in rest:
            begin, end = end, end + stop - start
            cut[n] = cut[n]._replace(box=((begin, end), *others))
        found[i] = found[i]._replace(shape=(end, *found[i].shape[1:]))
    return found, cut


# Shards that a rule replaces if the memory with their commit is lost: start, stop, the memory.
Replaceable = tuple[int, int, str]


def split_facts(
    parts: Sequence[LeafPart],
    held: Sequence[int],
    *,
    has_whole: bool,
    replaceable: Sequence[Replaceable] = (),
) -> dict[str, Any]:
    """Return the facts to write beside shards."""
    facts = {"parts": list(parts), "held": list(held), "has_whole": has_whole}
    return {**facts, "replaceable": list(replaceable)} if replaceable else facts


def of_all_processes(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts without those about their writer."""
    return {key: facts[key] for key in facts if key not in ("held", "has_whole", "replaceable")}


def folder_name(writer: int) -> str:
    """Return the folder of a process's shards."""
    return f"state-{writer}"


def pieces(facts: Mapping[str, Any]) -> list[LeafPart]:
    """Return the pieces of all leaves, split leaves first."""
    split = [
        LeafPart(leaf, tuple((start, stop) for start, stop in box), writer)
        for leaf, box, writer in facts.get("parts", ())
    ]
    apart, writers = {part.leaf for part in split}, facts.get("whole_in", {})
    leaves = [(i, x) for i, x in enumerate(leaves_of(facts)) if i not in apart]
    return [*split, *(LeafPart(i, _whole(x.shape), writers.get(str(i), 0)) for i, x in leaves)]


def names(facts: Mapping[str, Any]) -> list[str]:
    """Return each piece's name on disk."""
    whole, num_split = [*disk_names(leaves_of(facts))], len(facts.get("parts", ()))
    found = []
    for n, (leaf, box, _) in enumerate(pieces(facts)):
        start = ",".join(str(start) for start, _ in box)
        found.append(f"{whole[leaf]}@{start}" if n < num_split else whole[leaf])
    return found


def described(facts: Mapping[str, Any]) -> list[SavedLeaf]:
    """Return each piece's description."""
    leaves = leaves_of(facts)
    return [described_part(leaves, piece) for piece in pieces(facts)]


def described_part(leaves: Sequence[SavedLeaf], part: LeafPart) -> SavedLeaf:
    """Return a shard's description."""
    return leaves[part.leaf]._replace(shape=tuple(_sizes(part.box)))


def stored(facts: Mapping[str, Any]) -> list[int]:
    """Return the indices of the pieces beside these facts, in order."""
    num_split, num = len(facts.get("parts", ())), len(pieces(facts))
    whole = range(num_split, num) if facts.get("has_whole", True) else ()
    return [*whole, *facts.get("held", ())]


# Reads pieces by index.
Read = Callable[[Sequence[int]], Mapping[int, np.ndarray]]


class SplitValue:
    """A saved leaf whose shards are fetched when it is placed: the host holds one leaf at a time.

    `fetch` returns those needed by this process. `is_cut`: rows are lost.
    """

    def __init__(
        self, leaf: SavedLeaf, parts: Mapping[int, LeafPart], fetch: Read, *, is_cut: bool = False
    ) -> None:
        self.shape, self.dtype, self.is_cut = leaf.shape, jnp.dtype(leaf.dtype), is_cut
        self._parts, self._fetch = parts, fetch
        self._values: Mapping[int, np.ndarray] | None = None
        self._assembled: dict[Box, np.ndarray] = {}

    def __getitem__(self, index: Any) -> np.ndarray:
        if index is ...:
            index = (slice(None),) * len(self.shape)
        box = box_of(index, self.shape)
        if box not in self._assembled:
            self._assembled[box] = self._assemble(box)
        return self._assembled[box]

    def fetch(self) -> None:
        """Fetch the shards; all processes take part."""
        if self._values is None:
            self._values = self._fetch([*self._parts])

    def release(self) -> None:
        """Drop the fetched shards."""
        self._values, self._assembled = {}, {}

    def _assemble(self, box: Box) -> np.ndarray:
        self.fetch()
        assert self._values is not None
        found, size = np.empty(_sizes(box), self.dtype), 0
        for n, values in self._values.items():
            source = self._parts[n].box
            if source == box:
                return values
            if (shared := common(source, box)) is not None:
                inside = _inside(shared, box)
                found[inside] = values[_inside(shared, source)]
                size += found[inside].size
        assert size == found.size, "shards of a leaf were not fetched"
        return found


def _whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def _sizes(box: Box) -> list[int]:
    return [stop - start for start, stop in box]


# Return a box as an index of an array that is also a box.
def _inside(box: Box, outer: Box) -> tuple[slice, ...]:
    pairs = zip(box, outer, strict=True)
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in pairs)
