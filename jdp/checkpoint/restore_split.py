"""Restores a state leaf by leaf, so that no process holds more than its own parts and one leaf."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jdp import pytrees, rank_state
from jdp.checkpoint import shards
from jdp.checkpoint.saved_leaves import SavedLeaf, describe, leaves_of
from jdp.distributed import agree
from jdp.distributed.broadcast import broadcast


class Readable(Protocol):
    """The pieces of a saved state that this process can read, see `shards.pieces`."""

    def has(self, n: int) -> bool:
        """Whether a piece can be read."""

    def read(self, numbers: Sequence[int]) -> dict[int, np.ndarray]:
        """Read pieces."""


def split_values(
    facts: dict[str, Any],
    readable: Readable,
    state: Any = None,
    group: tuple[int, ...] = (),
) -> list[shards.SplitValue]:
    """Return the leaves that were saved beside `facts`, which are fetched when they are placed."""
    leaves, pieces = leaves_of(facts), dict(enumerate(shards.pieces(facts)))
    needed = {*pieces} if state is None else _needed(state, leaves, pieces)
    sources = _sources(group, state, needed, readable) if len(group) > 1 else {}
    transfer = _Transfer(shards.described(facts), readable, needed, sources, group)
    of: dict[int, dict[int, shards.LeafPart]] = defaultdict(dict)
    for n, part in pieces.items():
        of[part.leaf][n] = part
    return [shards.SplitValue(leaf, of[i], transfer.fetch) for i, leaf in enumerate(leaves)]


class _Transfer:
    """Reads the pieces that this process needs, and sends pieces that others cannot read.

    Args:
      described: the pieces.
      readable: what this process can read.
      needed: numbers of the pieces that it needs.
      sources: number of each piece that some process cannot read -> the process that sends it.
      group: the processes among which they are sent.
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
        """Return the pieces that this process needs."""
        me = jax.process_index()
        sent = {n for n in numbers if self._sources.get(n) == me}
        here = [n for n in numbers if n in sent or (n in self._needed and self._readable.has(n))]
        values = self._readable.read(here)
        for n in numbers:
            if n in self._sources:
                leaf, data = self._described[n], None
                if n in sent:
                    data = np.ascontiguousarray(values[n]).reshape(-1).view(np.uint8)
                received = broadcast(data, leaf.num_bytes, self._group)
                if n in self._needed and n not in values:
                    values[n] = received.view(jnp.dtype(leaf.dtype)).reshape(leaf.shape)
        return {n: value for n, value in values.items() if n in self._needed}


# The pieces that overlap what lies on the devices of this process. State of `per_rank` may be
# resized, and a leaf that is not a jax.Array is not placed: those need all.
def _needed(
    state: Any, leaves: Sequence[SavedLeaf], pieces: dict[int, shards.LeafPart]
) -> set[int]:
    boxes: dict[str, set[shards.Box] | None] = {}
    pairs = zip(jax.tree.leaves(state), rank_state.owners(state), strict=True)
    found = [(x, owner) for x, owner in pairs if pytrees.is_array(x)]
    for new, (x, owner) in zip(describe(state), found, strict=True):
        x = pytrees.without_key(x)
        known = boxes.setdefault(new.name, set())
        if owner is not None or not isinstance(x, jax.Array):
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
            f"process {odd[0]} restores a state with other leaves than process {odd[1]}. All "
            "processes must give the same state to ckpt.restore."
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
        raise RuntimeError(f"{len(missing)} parts of the saved state are on no process.")
    return sources
