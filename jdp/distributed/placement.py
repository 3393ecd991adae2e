"""Copying a state onto the mesh."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp import axis, rank_state
from jdp.axis import AxisName
from jdp.distributed.checks import state as state_check
from jdp.distributed.mesh import mesh_of, num_ranks
from jdp.pytrees import is_array, is_key


def placed(tree: Any, axis_name: AxisName, mesh: Mesh | None = None, *, copy: bool = False) -> Any:
    """Copy a state onto the mesh, the same on every rank; `per_rank` is split over the ranks.

    Leaves that lie there already, perhaps split over further axes, stay as they are. A copy shares
    no buffer with the original, which donating the copy leaves intact.

    Args:
      tree: tree of arrays and numbers; other leaves stay as they are.
      axis_name: the data axis.
      mesh: Default: the mesh of the leaves, else that of `init`; without either the tree is
        returned as it is.
      copy: copy also the leaves that lie there already.

    Raises:
      ValueError: if a leaf is split over `axis_name`, or lies on another mesh; if one of `per_rank`
        does not divide by the number of ranks.
    """
    named, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [leaf for _, leaf in named]
    if mesh is None:
        try:
            mesh = mesh_of(leaves, axis_name)
        except RuntimeError:
            return tree
    flags = rank_state.flags(tree)
    found = [_target(*one, flag, mesh, axis_name) for one, flag in zip(named, flags, strict=True)]
    targets = {i: target for i, target in enumerate(found) if target is not None}
    if targets and not NamedSharding(mesh, PartitionSpec()).is_fully_addressable:
        # Only over a mesh of several processes: one that trains alone must not wait for others.
        compared = [leaf if i in targets else None for i, leaf in enumerate(leaves)]
        state_check.agreed(treedef.unflatten(compared))
    copies = _copies([leaves[i] for i in targets], [*targets.values()])
    for i, leaf in zip(targets, copies, strict=True):
        leaves[i] = leaf
    if copy:
        leaves = [
            jnp.copy(leaf) if isinstance(leaf, jax.Array) and i not in targets else leaf
            for i, leaf in enumerate(leaves)
        ]
    return jax.tree.unflatten(treedef, leaves)


def copy_to(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Copy an array that all processes of a mesh hold to their devices; nothing is compared."""
    if is_key(leaf):
        data = copy_to(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.jit(jnp.copy, out_shardings=sharding)(leaf)
    # A copy of a NumPy array, since JAX may use its memory as that of a device.
    value = np.asarray(leaf) if isinstance(leaf, jax.Array) else np.array(leaf)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _copies(leaves: list[Any], targets: Sequence[NamedSharding]) -> list[jax.Array]:
    if not all(target.is_fully_addressable for target in targets):
        # device_put would compare the values over all processes, leaf by leaf.
        return list(map(copy_to, leaves, targets))
    # Numbers become arrays of a strong type: a weak one would change at the first step, and
    # the step would compile twice. A copy first, since device_put may use the caller's own memory,
    # also a NumPy array's, whatever its may_alias.
    strong = [jnp.copy(x) if isinstance(x, jax.Array) else np.array(x) for x in leaves]
    return jax.device_put(strong, list(targets))


def _target(
    path: tuple, leaf: Any, is_own: bool, mesh: Mesh, axis_name: AxisName
) -> NamedSharding | None:
    """Return the sharding to copy a leaf to; None if it stays as it is."""
    if isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct)) or not is_array(leaf):
        return None
    name, names = jax.tree_util.keystr(path), axis.names(axis_name)
    found = getattr(leaf, "sharding", None)
    sharding = found if isinstance(found, NamedSharding) else None
    if is_own:
        rank_state.require_dim(name, leaf, num_ranks(mesh, axis_name))
        spec = sharding.spec if sharding is not None and sharding.mesh == mesh else ()
        if spec and spec[0] is not None and axis.names(spec[0]) == names:
            return None
        # Over further axes it stays split as it was.
        return NamedSharding(mesh, PartitionSpec(names, *spec[1:]))
    if sharding is not None:
        _require_whole(name, leaf, sharding, mesh, axis_name)
    is_here = sharding is not None and sharding.mesh == mesh
    return None if is_here else NamedSharding(mesh, PartitionSpec())


def _require_whole(
    name: str, leaf: Any, sharding: NamedSharding, mesh: Mesh, axis_name: AxisName
) -> None:
    split = {name for part in sharding.spec if part is not None for name in axis.names(part)}
    if split & set(axis.names(axis_name)):
        raise ValueError(
            f"`{name}` {leaf.dtype}{list(leaf.shape)} is split over {axis_name!r}, but every rank "
            "needs the whole state. Place it with jax.sharding.PartitionSpec() on that axis."
        )
    if sharding.mesh != mesh and sharding.mesh.size > 1:
        raise ValueError(
            f"`{name}` lies on a mesh of {sharding.mesh.size} devices "
            f"{dict(sharding.mesh.shape)}, the rest of the state on one of {mesh.size} "
            f"{dict(mesh.shape)}. Move it with jax.device_put first, or create the state after "
            "jdp.init()."
        )
