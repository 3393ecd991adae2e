"""Distributes the restored state to all processes, and fills the given state with it."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jdp.checkpoint.edits import require_unedited
from jdp.checkpoint.fill import fill
from jdp.checkpoint.saved_leaves import SavedLeaf, leaves_of, pack, packed_bytes, unpack
from jdp.checkpoint.sources import Latest, Saved, Sources
from jdp.distributed import agree
from jdp.distributed.checks import known_leaves

# A state is broadcast in chunks of this many bytes, to bound the temporary memory.
_PART_BYTES = 64 << 20


def restored(
    group: tuple[int, ...],
    found: Latest,
    sources: Sources,
    state: Any,
    batches: Any,
    *,
    keeps_missing: bool,
    allows_edits: bool,
) -> Any:
    """Return `state` with the values that were found, and set the position of `batches`.

    Raises:
      ValueError: if it is of a different model, or has no position although `batches` is given.
      RuntimeError: if the run recovers with an edited script, and not `allows_edits`.
    """
    facts, values = _loaded(group, found, sources)
    with agree.propagating_errors(group, f"while it restored {found.where}"):
        require_unedited(facts, allows_edits=allows_edits)
        state, taken = fill(
            state, leaves_of(facts), values, found.where, keeps_missing=keeps_missing
        )
        if batches is not None:
            _set_position(batches, facts, found.where)
    agree.all_gather(group, None, what="whether all restored", of=f" {found.where}")
    known_leaves.vouch(taken)  # All processes got them from one source.
    return state


# Processes that have the values read them on their own host. No collective runs unless a process
# lacks the values.
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


# Broadcast as integers, because a float sum over the processes would turn -0.0 into 0.0.
def _handed_over(values: list[Any], leaves: list[SavedLeaf], *, is_source: bool) -> list[Any]:
    size = packed_bytes(leaves)
    data = np.concatenate(pack(values)) if is_source and size else np.zeros(size, np.uint8)
    for start in range(0, size, _PART_BYTES):
        part = data[start : start + _PART_BYTES]
        words = multihost_utils.broadcast_one_to_all(part.view(np.uint32), is_source)
        part[:] = words.view(np.uint8)
    return unpack(data, leaves)
