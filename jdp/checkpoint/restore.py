"""Restores all processes: values, and the data's position."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp.checkpoint.code_change import Edits
from jdp.checkpoint.commit_memory import CommitMemory
from jdp.checkpoint.load import fill
from jdp.checkpoint.restore_candidates import Found, Latest, Saved, Sources
from jdp.checkpoint.saved_leaves import leaves_of, pack, packed_bytes, unpack
from jdp.checkpoint.shards import SplitValue
from jdp.checkpoint.split_state import split_values
from jdp.checkpoint.state_writer import KEY_OF_LOADER, state_of_data
from jdp.distributed import agree, placement
from jdp.distributed.agree import broadcast_bytes
from jdp.distributed.checks import state as state_check

_log = logging.getLogger("jdp")


def is_maker(state: Any) -> bool:
    """Whether a function that makes a state was given in its place. A module is a state."""
    return callable(state) and jax.tree_util.all_leaves([state])


def shapes_of(make: Callable[[], Any]) -> Any:
    """Return the result of `make`, with shapes and shardings for new arrays.

    None where these are not known without making it: the function reads values, or places arrays.
    """
    kept: list[Any] = []

    def traced() -> list[Any]:
        leaves, tree = jax.tree.flatten(make())
        is_made = [isinstance(leaf, jax.core.Tracer) for leaf in leaves]
        kept[:] = tree, [None if made else x for x, made in zip(leaves, is_made, strict=True)]
        return [leaf for leaf, made in zip(leaves, is_made, strict=True) if made]

    try:
        with placement.shapes_only():
            jaxpr, shapes = jax.make_jaxpr(traced, return_shape=True)()
    except Exception as error:  # an error of the function comes again when it is called
        text = (
            "the state to restore is computed first, because its function cannot be traced: %s: %s"
        )
        _log.info(text, type(error).__name__, str(error).partition("\n")[0])
        return None
    tree, leaves = kept
    left = iter(shapes)
    state = tree.unflatten([next(left) if leaf is None else leaf for leaf in leaves])
    nodes, outer = jax.tree.flatten(state, is_leaf=_knows_its_place)
    if any(isinstance(node, jax.ShapeDtypeStruct) for node in nodes) and (
        _places(jaxpr) or any(map(_knows_its_place, nodes))  # from whose arrays it may be made
    ):
        return None
    placed = [node.as_placed() if _knows_its_place(node) else node for node in nodes]
    return None if any(node is None for node in placed) else outer.unflatten(placed)


def _knows_its_place(node: Any) -> bool:
    return hasattr(node, "as_placed")


def _places(program: Any) -> bool:
    """Whether a program places arrays or reads placed ones, of which shapes tell nothing."""
    if any(getattr(x, "committed", False) for x in getattr(program, "consts", ())):
        return True
    for eqn in program.eqns:
        places = [*eqn.params.get("devices", ()), *eqn.params.get("out_shardings", ())]
        is_free = all(x is None or type(x).__name__ == "UnspecifiedValue" for x in places)
        inner = eqn.params.get("jaxpr")
        if eqn.primitive.name == "sharding_constraint" or not is_free or inner and _places(inner):
            return True
    return False


def _arrays_of(state: Any, shapes: Any) -> Any:
    """Return a restored state with JAX arrays where `shapes` has a shape without a sharding."""

    def array(x: Any, shape: Any) -> Any:
        is_described = isinstance(shape, jax.ShapeDtypeStruct) and not isinstance(x, jax.Array)
        is_number = is_described and shape.weak_type and not shape.shape
        return jnp.asarray(x.item() if is_number else x) if is_described else x

    return jax.tree.map(array, state, shapes)


def restored(
    group: tuple[int, ...],
    everything: Found,
    state: Any,
    batches: Any,
    own: CommitMemory | None,
    *,
    keeps_missing: bool,
    edits: Edits,
) -> Any:
    """Return `state` with the restored values, and set the position of `batches`.

    `own`: this process's own commits; later ones with missing shards are cleared.
    """
    sources, found = everything.sources, everything.latest
    assert found is not None
    values: Sequence[np.ndarray | SplitValue]
    if found.is_split:
        facts = _facts(group, found, sources)
        readable = sources.readable(found.key, facts, sees_directory=everything.sees_directory)
        values = split_values(facts, readable, state, group, found.lost)
    else:
        facts, values = _loaded(group, found, sources)
    pairs = zip(leaves_of(facts), values, strict=True)
    leaves = [leaf._replace(shape=value.shape) for leaf, value in pairs]  # without lost rows
    with agree.propagating_errors(group, f"while it restored {found.where}"):
        edits.continue_from(facts)
        new, taken = fill(
            state,
            leaves,
            values,
            found.where,
            keeps_missing=keeps_missing,
            copies=found.key.is_commit,
        )
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
            new = _arrays_of(new, state)
            taken = jax.tree.leaves(new)
        if batches is not None:
            set_position(batches, facts, found.where)
        if own is not None:
            # Before another of the host's processes begins a commit over the older record.
            sources.forget_later(found.key, own)
    agree.all_gather(group, None, what="whether all restored", of=f" {found.where}")
    state_check.vouch_for(taken)  # All processes got them from one source.
    return new


# Processes read their host's values; collectives only run if a process lacks some.
def _facts(group: tuple[int, ...], found: Latest, sources: Sources) -> dict[str, Any]:
    mine = sources.facts(found.key) if jax.process_index() == found.source else None
    what = "what to restore"
    return agree.all_gather(group, mine, what=what, of=f" from {found.where}")[found.source]


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
            group, facts if is_source else None, what="what to restore", of=f" from {found.where}"
        )
        facts = gathered[found.source]
        leaves = leaves_of(facts)
        data = np.concatenate([np.zeros(0, np.uint8), *pack(values)]) if is_source else None
        values = unpack(broadcast_bytes(data, packed_bytes(leaves), group), leaves)
    return facts, values


def require_position(batches: Any) -> None:
    """Refuse batches without a position."""
    if batches is None or hasattr(batches, "position"):
        return
    instead = "Pass jdp.batches(...), or an object with an int `position`, the number of rows "
    instead += "already yielded, which it continues from after it is set."
    if hasattr(batches, "__next__") or hasattr(batches, "__iter__"):
        instead += (
            " jdp.shard_batches prefetches from a loader. For a loader that saves its own state "
            "(an iterator of grain, a StatefulDataLoader), pass batches = "
            "jdp.shard_batches(loader) to restore, to the loop and to step."
        )
    raise TypeError(
        f"batches= is a {type(batches).__name__}, which has no `position`, so rows would be "
        f"duplicated or skipped after a restart. {instead}"
    )


def set_position(batches: Any, facts: Mapping[str, Any], where: str) -> None:
    """Set batches to a written position."""
    if facts.get("position") is None:
        raise ValueError(
            f"{where} was written without batches, so the position of the data is unknown. Write "
            "state = ckpt.restore(state), and set batches.position yourself."
        )
    # jdp 0.1 wrote only the position
    data = facts.get("data", {"position": facts["position"]})
    own = state_of_data(batches)
    is_loader = own is not None and KEY_OF_LOADER in own
    if is_loader != ("loaders" in data):
        has, given = ("jdp.shard_batches", "others")[:: 1 if "loaders" in data else -1]
        raise ValueError(
            f"{where} was written with batches of {has}, but the given ones are of {given}, so "
            "its position does not apply. Pass the batches of the start of the run."
        )
    if own is None:
        batches.position = facts["position"]
    elif is_loader:
        batches.set_state(_of_this_process(data, where))
    else:
        batches.set_state(data)


def _of_this_process(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    loaders = data["loaders"]
    if len(loaders) != jax.process_count():
        raise ValueError(
            f"{where} was written by {len(loaders)} processes, but this run has "
            f"{jax.process_count()}. Each process saved the state of its own loader, which "
            f"cannot be divided. Resume with {len(loaders)} processes; or write "
            "jdp.batches(dataset, ...), which resumes on any number. Without batches= in restore "
            "and step a run restarts its data."
        )
    return {"position": data["position"], KEY_OF_LOADER: loaders[jax.process_index()]}
