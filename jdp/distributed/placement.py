"""Copies a state onto the mesh."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jdp import axis, rank_state
from jdp.axis import AxisName
from jdp.distributed.checks import state as state_check
from jdp.distributed.mesh import mesh_of, num_ranks, require_auto
from jdp.pytrees import is_array, is_key

# Smaller ones are copied on the host first.
LARGE_BYTES = 1 << 20


def copied_from_host(value: np.ndarray, sharding: Sharding) -> jax.Array:
    """Copy to devices: JAX aliases host memory despite `may_alias`, and never donates it."""
    if value.dtype.kind in "iufc":  # JAX would narrow int64 too, and warn of it
        value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)
    if value.nbytes >= LARGE_BYTES:
        found = _placed(value, sharding)
        found.block_until_ready()  # it may be read until then
        if not _shares_memory(found, value):
            return found
    return _placed(np.array(value), sharding)


def _placed(value: np.ndarray, sharding: Sharding) -> jax.Array:
    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: value[index], dtype=value.dtype
    )


def _shares_memory(array: jax.Array, value: np.ndarray) -> bool:
    if next(iter(array.sharding.device_set)).platform != "cpu":
        return False
    low, high = np.lib.array_utils.byte_bounds(value)
    parts: list[Any] = [shard.data for shard in array.addressable_shards]
    return any(low <= part.unsafe_buffer_pointer() < high for part in parts)


_shapes_only: ContextVar[bool] = ContextVar("shapes only", default=False)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """While JAX traces what makes a state, place and compare no values."""
    token = _shapes_only.set(True)
    try:
        yield
    finally:
        _shapes_only.reset(token)


def is_shapes_only() -> bool:
    """Whether a state is made for its shapes alone."""
    return _shapes_only.get()


def described(
    tree: Any, axis_name: AxisName, mesh: Mesh, partition: Sequence[PartitionSpec | None]
) -> Any:
    """Return the leaves that `placed` would return, as shapes, on data axes alone."""
    leaves, treedef = jax.tree.flatten(tree)
    own = PartitionSpec(axis.names(axis_name))
    found = []
    for leaf, spec, flag in zip(leaves, partition, rank_state.flags(tree), strict=True):
        if not is_array(leaf):
            found.append(leaf)
            continue
        sharding = NamedSharding(mesh, own if flag else spec or PartitionSpec())
        given = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        dtype = jax.dtypes.canonicalize_dtype(given, allow_extended_dtype=True)
        found.append(jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=sharding))
    return treedef.unflatten(found)


def placed(
    tree: Any,
    axis_name: AxisName,
    mesh: Mesh | None = None,
    *,
    copy: bool = False,
    partition: Sequence[PartitionSpec | None] | None = None,
    may_be_split: bool = False,
) -> Any:
    """Copy a state onto the mesh, equal on every rank; `per_rank` state is sharded over the ranks.

    Leaves already there, perhaps sharded over further axes, stay. A copy shares no buffer with the
    original: it may be donated.
    """
    named, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [leaf for _, leaf in named]
    if mesh is None:
        try:
            mesh = mesh_of(leaves, axis_name)
        except RuntimeError:
            return tree
    flags, names = rank_state.flags(tree), axis.names(axis_name)
    specs = partition if partition is not None else [None] * len(leaves)
    found = [
        _shard_target(leaf, spec, mesh, axis_name)
        if spec is not None and not flag
        else _target(path, leaf, flag, mesh, names, may_be_split)
        for (path, leaf), flag, spec in zip(named, flags, specs, strict=True)
    ]
    targets = {i: target for i, target in enumerate(found) if target is not None}
    if not may_be_split:
        for i in targets:
            _require_same_mesh(*named[i], mesh, names)
    if targets:
        _require_agreement(treedef, leaves, targets, mesh)
    copies = _copies([leaves[i] for i in targets], [*targets.values()])
    for i, leaf in zip(targets, copies, strict=True):
        leaves[i] = leaf
    for i, leaf in enumerate(leaves if copy else ()):
        if isinstance(leaf, jax.Array) and i not in targets:
            leaves[i] = jnp.copy(leaf)
    return jax.tree.unflatten(treedef, leaves)


def copy_to(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Copy an array held by all processes, without comparing values."""
    if is_key(leaf):
        data = copy_to(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.jit(jnp.copy, out_shardings=sharding)(leaf)
    if not isinstance(leaf, jax.Array):
        return copied_from_host(np.asarray(leaf), sharding)
    value = np.asarray(leaf)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _require_agreement(
    treedef: Any, leaves: Sequence[Any], targets: Mapping[int, NamedSharding], mesh: Mesh
) -> None:
    """Refuse values that differ between processes; `targets` has the copied leaves."""
    if NamedSharding(mesh, PartitionSpec()).is_fully_addressable:
        return  # a process that trains alone must not wait for others
    is_new = [i in targets and not _is_on(leaf, mesh) for i, leaf in enumerate(leaves)]
    compared = [leaf if new else None for leaf, new in zip(leaves, is_new, strict=True)]
    state_check.agreed(treedef.unflatten(compared), mesh)


def _copies(leaves: list[Any], targets: Sequence[NamedSharding]) -> list[jax.Array]:
    if not all(target.is_fully_addressable for target in targets):
        # device_put would compare all processes' values, leaf by leaf.
        return list(map(copy_to, leaves, targets))
    # Strongly typed: a weak type would change at the first step, which would compile twice. Copied
    # first, since device_put may alias the caller's memory; all small leaves in one call.
    strong = list(map(_copy, leaves, targets))
    return jax.device_put(strong, list(targets))


def _copy(leaf: Any, target: NamedSharding) -> Any:
    if isinstance(leaf, jax.Array):
        return jnp.copy(leaf)
    value = np.asarray(leaf)
    return copied_from_host(value, target) if value.nbytes >= LARGE_BYTES else np.array(value)


def _is_on(leaf: Any, mesh: Mesh) -> bool:
    sharding = getattr(leaf, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh == mesh


def _shard_target(
    leaf: Any, spec: PartitionSpec, mesh: Mesh, axis_name: AxisName
) -> NamedSharding | None:
    """Return the sharding for a leaf's shards; None if it has it."""
    if isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct)) or not is_array(leaf):
        return None
    # It keeps its sharding along further axes.
    old = tuple(leaf.sharding.spec) if _is_on(leaf, mesh) else ()
    parts = [_without(part, set(axis.names(axis_name))) for part in old]
    if spec:
        parts += [None] * (len(spec) - len(parts))
        parts[len(spec) - 1] = axis.names(spec[-1])
    target = NamedSharding(mesh, PartitionSpec(*parts))
    is_there = _is_on(leaf, mesh) and leaf.sharding.is_equivalent_to(target, leaf.ndim)
    return None if is_there else target


def _without(part: Any, names: set[str]) -> Any:
    left = tuple(name for name in axis.names(part) if name not in names) if part else ()
    return left or None


def _target(
    path: tuple, leaf: Any, is_own: bool, mesh: Mesh, names: tuple[str, ...], may_be_split: bool
) -> NamedSharding | None:
    """Return the sharding to copy a leaf to; None if it stays."""
    if isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct)) or not is_array(leaf):
        return None
    found = getattr(leaf, "sharding", None)
    sharding = found if isinstance(found, NamedSharding) else None
    if is_own:
        rank_state.require_dim(jax.tree_util.keystr(path), leaf, num_ranks(mesh, names))
        spec = sharding.spec if sharding is not None and sharding.mesh == mesh else ()
        if spec and spec[0] is not None and axis.names(spec[0]) == names:
            return None
        return NamedSharding(mesh, PartitionSpec(names, *spec[1:]))
    if sharding is not None and not may_be_split:
        _require_whole(path, leaf, sharding, names)
    is_here = sharding is not None and sharding.mesh == mesh
    return None if is_here else NamedSharding(mesh, PartitionSpec())


def _require_whole(path: tuple, leaf: Any, sharding: NamedSharding, names: tuple[str, ...]) -> None:
    split = {name for part in sharding.spec if part is not None for name in axis.names(part)}
    if not split.isdisjoint(names):
        raise ValueError(
            f"`{jax.tree_util.keystr(path)}` {leaf.dtype}{list(leaf.shape)} is split over "
            f"{', '.join(map(repr, names))}, but every rank needs the whole state. Place it with "
            "jax.sharding.PartitionSpec() on that axis."
        )


def _require_same_mesh(path: tuple, leaf: Any, mesh: Mesh, names: tuple[str, ...]) -> None:
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh != mesh and sharding.mesh.size > 1:
        require_auto(sharding.mesh, names)
        hint = ""
        if sharding.spec and axis.names(sharding.spec[0] or ()) == sharding.mesh.axis_names:
            hint = (
                " If it has a dim for the devices, as jax_utils.replicate and jax.pmap return "
                "arrays, remove replicate, or write jax_utils.unreplicate(state)."
            )
        raise ValueError(
            f"`{jax.tree_util.keystr(path)}` is on a mesh of {sharding.mesh.size} devices "
            f"{dict(sharding.mesh.shape)}, the rest of the state on one of {mesh.size} "
            f"{dict(mesh.shape)}. Move it with jax.device_put first, or create the state after "
            f"jdp.init().{hint}"
        )
