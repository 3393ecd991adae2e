"""Places a step's state and further arguments."""

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp import pytrees
from jdp.distributed import placement
from jdp.step_spec import StepSpec
from jdp.training import parameters, shard_layout, virtual_ranks

_log = logging.getLogger("jdp")

_VIEWED = (
    "jdp: `%s` could not donate `%s`, because a NumPy view of it is alive, so the step uses %.1f "
    "MB more. Write np.array(x) instead of np.asarray(x) and jax.device_get(x), or delete the "
    "view."
)
_LARGE_BYTES = 1 << 16  # less is not worth a log line
_COPIED = (
    "jdp: each call of `%s` copies `%s` (%.1f MB) to all devices. If it is constant, copy it "
    "once before the loop: %s = jax.device_put(%s, jax.sharding.NamedSharding(mesh, "
    "jax.sharding.PartitionSpec())), with mesh = jdp.init()."
)
_SLOW_BYTES = 1 << 20  # less is copied in a millisecond


def place_state(state: Any, where: Mesh, spec: StepSpec) -> Any:
    """Place a state from outside a step, and copy aliased leaves."""
    virtual_ranks.require_fits(spec, where, state)
    state = placement.placed(
        state,
        spec.axis_name,
        where,
        partition=shard_layout.partition(state, virtual_ranks.traced_mesh(spec, where)),
        may_be_split=not spec.returns_state,  # JAX gathers the arrays that an `eval_step` reads
    )
    if not spec.donate:
        return state
    leaves, treedef = jax.tree.flatten(state)
    seen: set[Any] = set()
    for i, leaf in enumerate(leaves):
        buffer = _buffer(leaf)
        if buffer in seen:  # donated twice, it would crash JAX 0.10
            leaves[i] = jnp.copy(leaf)
        seen.add(buffer)
    return jax.tree.unflatten(treedef, leaves)


def require_usable(spec: StepSpec, state: Any) -> None:
    """Refuse a donated leaf, or a state that no train step can return."""
    require_alive(spec, [state])
    if spec.returns_state:
        parameters.require_unshared(spec.argument(0), state)


def require_batch(spec: StepSpec, batch: Any, num_rest: int) -> None:
    """Refuse a state, or an optimizer's, as the batch."""
    nodes = jax.tree.leaves(batch, is_leaf=_is_of_optimizer)
    found = next(filter(_is_of_optimizer, nodes), None)
    if found is None:
        return
    kind, (state, second, data) = type(found).__name__, map(spec.argument, range(3))
    text = f"`{second}` holds {pytrees.kind_of(found)}, but the second argument of a step is the "
    if num_rest:
        raise TypeError(
            f"{text}batch. Pass the state as one argument and return it as one value: call "
            f"`{spec.name}(({state}, {second}), {data})`, and begin the step with `{state}, "
            f"{second} = state`."
        )
    raise TypeError(
        f"{text}batch, which is split over the ranks. The state is the first argument: `def "
        f"{spec.name}(state, batch)`, called as `{spec.name}(state, batch)` with the {kind} in "
        "the state."
    )


def _is_of_optimizer(node: Any) -> bool:
    return type(node).__module__.partition(".")[0] == "optax" or hasattr(node, "opt_state")


def place_rest(name: str, arg: Any, where: Mesh) -> Any:
    """Place a further argument, equal on every rank."""

    # An array committed to one device cannot be used with the mesh; JAX copies all others.
    def place(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return leaf.copy()  # the caller may write into it while the step runs
        if not isinstance(leaf, jax.Array):
            is_ref = isinstance(leaf, jax.Ref)
            if not is_ref and not pytrees.is_array(leaf) and not hasattr(leaf, "__jax_array__"):
                raise TypeError(
                    f"`{name}` holds {leaf!r}, of type {type(leaf).__name__}, but a compiled "
                    "program accepts only arrays and numbers. Close over it, one step per value: "
                    f"jdp.train_step(functools.partial(fn, {name}=...))."
                )
            return leaf
        if isinstance(leaf, jax.core.Tracer):
            return leaf
        if len(leaf.sharding.device_set) == 1 and leaf.committed and where.size > 1:
            if where.is_multi_process:  # else device_put has all processes compare it
                return placement.copy_to(leaf, NamedSharding(where, PartitionSpec()))
            return jax.device_put(leaf, NamedSharding(where, PartitionSpec()))
        return leaf

    return jax.tree.map(place, arg)


def copy_donated(args: list[Any], donated: Sequence[Any]) -> list[Any]:
    """Copy leaves of other arguments also in the donated state."""
    shared = {id(leaf) for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array)}
    # This runs for every leaf in every call, so it has no Python loop.
    if shared.isdisjoint(map(id, donated)):
        return args
    shared.intersection_update(map(id, donated))
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if id(leaf) in shared else leaf, args)


def _buffer(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or not leaf.size:
        return id(leaf)
    # JAX keeps its result with each array: few objects.
    first = pytrees.without_key(leaf).addressable_data(0)
    if next(iter(first.devices())).platform == "cpu":
        # The address of a CPU array waits for its values and holds the GIL; a callback of an
        # earlier program would wait for the GIL forever.
        with contextlib.suppress(RuntimeError):  # the next line raises it, too
            first.block_until_ready()
    return first.unsafe_buffer_pointer()


def log_views(spec: StepSpec, where: Mesh, state: Any) -> None:
    """Log once a large leaf kept from donation by a view on a CPU."""
    if _VIEWED in spec.warned or where.devices.flat[0].platform != "cpu":
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(leaf, jax.Array) and leaf.nbytes >= _LARGE_BYTES and not leaf.is_deleted():
            spec.warned.add(_VIEWED)
            name = f"{spec.argument(0)}{jax.tree_util.keystr(path)}"
            _log.warning(_VIEWED, spec.name, name, leaf.nbytes / 1e6)
            return


def copied_leaves(where: Mesh, rest: Sequence[Any]) -> list[Any]:
    """Return the large further arguments copied to devices in each call."""
    return [
        leaf
        for leaf in jax.tree.leaves(rest)
        if getattr(leaf, "nbytes", 0) >= _SLOW_BYTES
        and (
            isinstance(leaf, np.ndarray)
            or isinstance(leaf, jax.Array)
            and len(leaf.sharding.device_set) < where.size
        )
    ]


def log_copies(spec: StepSpec, where: Mesh, rest: Sequence[Any], before: Sequence[Any]) -> None:
    """Log once a further argument also copied by an earlier call."""
    known = {id(leaf) for leaf in before if leaf is not None}
    if _COPIED in spec.warned or known.isdisjoint(map(id, copied_leaves(where, rest))):
        return
    for i, arg in enumerate(rest, 2):
        if copied := copied_leaves(where, [arg]):
            spec.warned.add(_COPIED)
            name = spec.argument(i)
            num_bytes = sum(leaf.nbytes for leaf in copied)
            _log.warning(_COPIED, spec.name, name, num_bytes / 1e6, name, name)
            return


def require_alive_or_unsorted(spec: StepSpec, args: Sequence[Any]) -> None:
    """Refuse donated leaves, unless JAX cannot sort an argument's keys."""
    try:
        is_gone = pytrees.any_deleted(args)
    except ValueError:  # with an error of their own
        return
    if is_gone:
        require_alive(spec, args)


def require_alive(spec: StepSpec, args: Sequence[Any]) -> None:
    """Refuse a step's arguments with a donated leaf."""
    for i, arg in enumerate(args):
        pytrees.require_alive(
            spec.argument(i),
            arg,
            "Continue with the returned state, pass a copy (jax.tree.map(jnp.copy, ...)), or "
            "decorate with donate=False.",
        )
