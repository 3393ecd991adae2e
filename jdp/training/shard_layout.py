"""Which leaves of a state are split over the ranks, and along which dim."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jdp import axis, pytrees, rank_state
from jdp.distributed.mesh import num_ranks
from jdp.reduction.sharding import Sharding, sharding_of
from jdp.training import optimized

# A state is handed through `shard_map` in groups of leaves that are split alike.
UNIFORM, OWN = 0, 1
_FIRST_DIM = 2
_NUM_DIMS = 8


def groups(state: Any, mesh: Mesh) -> tuple[list[int], tuple[str, ...]]:
    """Return for each array of a state its group, and the mesh axes that shards are split over.

    Group 0 is the same on every rank, group 1 is `per_rank`, and group 2 + d is split along dim d.
    """
    restored = pytrees.restore(state)
    dims, axes = _dims(restored, mesh)
    found = [
        OWN if is_own else UNIFORM if dim is None else _FIRST_DIM + dim
        for is_own, dim in zip(rank_state.flags(restored), dims, strict=True)
    ]
    if isinstance(state, pytrees.Held):
        others = {i for i, _ in state.others}
        found = [group for i, group in enumerate(found) if i not in others]
    return found, axes


def specs(axis_name: Sequence[str], shard_axes: Sequence[str]) -> tuple[PartitionSpec, ...]:
    """Return the partition of each group over the mesh, but for the uniform one."""
    dims = (PartitionSpec(*[None] * dim, tuple(shard_axes)) for dim in range(_NUM_DIMS))
    return (PartitionSpec(tuple(axis_name)), *dims)


NUM_GROUPS = _FIRST_DIM + _NUM_DIMS


def partition(state: Any, mesh: Mesh) -> list[PartitionSpec | None]:
    """Return for each array of a state how it is split over the ranks, None where no rule says.

    A leaf that its optimizer leaves whole is whole, also if another optimizer had split it.
    """
    restored = pytrees.restore(state)
    dims, axes = _dims(restored, mesh)
    specs: list[PartitionSpec | None] = []
    for node, tx in optimized.nodes(restored):
        rule = None if sharding_of(tx) is None else PartitionSpec()
        specs += [rule] * len(jax.tree.leaves(node))
    for i, dim in enumerate(dims):
        if dim is not None:
            specs[i] = PartitionSpec(*[None] * dim, axes)
    if isinstance(state, pytrees.Held):
        others = {i for i, _ in state.others}
        specs = [spec for i, spec in enumerate(specs) if i not in others]
    return specs


def partition_of_optimizer(opt_state: Any, tx: Any, mesh: Mesh) -> list[PartitionSpec]:
    """Return for each leaf of the state of an optimizer how it is split over the ranks."""
    sharding = sharding_of(tx)
    if sharding is None:
        return [PartitionSpec()] * len(jax.tree.leaves(opt_state))
    axes = _axes(tx, mesh)
    dims = map(_finder(sharding, num_ranks(mesh, axes)), jax.tree.leaves(opt_state))
    return [PartitionSpec(*() if dim is None else (*[None] * dim, axes)) for dim in dims]


def with_split_gradients(state: Any) -> list[tuple[Any, Sequence[bool], Any]]:
    """Return the parameters of a state whose gradients are split, which of them train, and `tx`.

    Those of a `TrainState`, of jdp and of Flax, and the variables that an optimizer of nnx updates.
    """
    found = []
    for node, tx in optimized.nodes(state):
        sharding = sharding_of(tx)
        if sharding is not None and sharding.stage >= 2:
            params = optimized.parameters(node)
            flags = [True] * len(jax.tree.leaves(params))
            is_of_jdp = optimized.is_train_state(node)
            found.append((params, node.trainable if is_of_jdp else flags, tx))
    return found


def adds_whole_updates(state: Any) -> bool:
    """Whether parameters of a state are split, and code other than jdp's adds updates to them."""
    return any(
        sharding.stage == 3
        and bool(jax.tree.leaves(optimized.parameters(node)))
        and not optimized.is_train_state(node)
        for node, tx in optimized.nodes(state)
        if (sharding := sharding_of(tx)) is not None
    )


def _dims(state: Any, mesh: Mesh) -> tuple[list[int | None], tuple[str, ...]]:
    dims: list[int | None] = []
    found: set[tuple[str, ...]] = set()
    for node, tx in optimized.nodes(state):
        sharding = sharding_of(tx)
        if sharding is None:
            dims += [None] * len(jax.tree.leaves(node))
            continue
        axes = _axes(tx, mesh)
        found.add(axes)
        find = _finder(sharding, num_ranks(mesh, axes))
        is_at_3 = sharding.stage == 3
        if not optimized.is_optimizer(node):
            dims += [find(leaf) if is_at_3 else None for leaf in jax.tree.leaves(node)]
            continue
        is_split = {"params": is_at_3, "opt_state": True}
        shapes = {jnp.shape(leaf) for leaf in jax.tree.leaves(optimized.parameters(node))}
        for path, leaf in jax.tree_util.tree_leaves_with_path(node):
            name = getattr(path[0], "name", "")
            # Such an array in the shape of the parameters may be an average of them.
            is_beside = is_at_3 and name not in ("step", "seed")
            has_dim = is_split.get(name, is_beside and jnp.shape(leaf) in shapes)
            dims.append(find(leaf) if has_dim else None)
    if len(found) > 1:
        raise ValueError(
            f"the optimizers of this state split over different mesh axes, {sorted(found)}. "
            "Give all of them the same jdp.sharded(over=...)."
        )
    return dims, next(iter(found), ())


def _axes(tx: Any, mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes that an optimizer splits over, in the order of the mesh."""
    names = tx.sharding.axes or axis.names(tx.axis_name)
    return tuple(sorted(names, key=mesh.axis_names.index))


def _finder(sharding: Sharding, num_shards: int) -> Callable[[Any], int | None]:
    def find(leaf: Any) -> int | None:
        if not pytrees.is_array(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct):
            return None
        dim = sharding.dim(leaf, num_shards)
        return None if dim is None or dim >= _NUM_DIMS else dim

    return find
