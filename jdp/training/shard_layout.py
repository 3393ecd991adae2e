"""Which leaves of a state are split over the ranks, and along which dim."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jdp import axis, pytrees, rank_state
from jdp.distributed.mesh import num_ranks
from jdp.reduction.optimizer import Replicated
from jdp.reduction.sharding import Sharding, sharding_of

# A state is handed through `shard_map` in groups of leaves that are split alike.
UNIFORM, OWN = 0, 1
_FIRST_DIM = 2
_NUM_DIMS = 8


def groups(state: Any, mesh: Mesh) -> tuple[list[int], tuple[str, ...]]:
    """Return for each array of a state its group, and the mesh axes that shards are split over.

    Group 0 is the same on every rank, group 1 is `per_rank`, and group 2 + d is split along dim d.

    Args:
      state: as `pytrees.hold` returns it: of arrays, tracers or `ShapeDtypeStruct`s.
      mesh: of the ranks.

    Raises:
      ValueError: if two optimizers of the state split over different axes.
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
    """Return the partition of each group over the mesh, but for the uniform one.

    Args:
      axis_name: names of the data axes.
      shard_axes: names of the mesh axes that shards are split over.
    """
    dims = (PartitionSpec(*[None] * dim, tuple(shard_axes)) for dim in range(_NUM_DIMS))
    return (PartitionSpec(tuple(axis_name)), *dims)


NUM_GROUPS = _FIRST_DIM + _NUM_DIMS
# Fields of a `TrainState`; a class that inherits from it may have more.
_FIELDS = ("step", "params", "opt_state", "model_state", "seed")


def partition(state: Any, mesh: Mesh) -> list[PartitionSpec | None]:
    """Return for each array of a state how it is split over the ranks, None where no rule says.

    A leaf of a `TrainState` that its optimizer leaves whole is whole, also if another optimizer
    had split it.

    Args:
      state: a state, or `pytrees.hold` of it.
      mesh: the mesh of the ranks.
    """
    restored = pytrees.restore(state)
    dims, axes = _dims(restored, mesh)
    specs: list[PartitionSpec | None] = []
    for node in jax.tree.leaves(restored, is_leaf=_is_optimizer):
        is_sharded = _is_optimizer(node) and sharding_of(node.tx) is not None
        rule = PartitionSpec() if is_sharded else None
        specs += [rule] * len(jax.tree.leaves(node))
    for i, dim in enumerate(dims):
        if dim is not None:
            specs[i] = PartitionSpec(*[None] * dim, axes)
    if isinstance(state, pytrees.Held):
        others = {i for i, _ in state.others}
        specs = [spec for i, spec in enumerate(specs) if i not in others]
    return specs


def partition_of_optimizer(opt_state: Any, tx: Any, mesh: Mesh) -> list[PartitionSpec]:
    """Return for each leaf of the state of an optimizer how it is split over the ranks.

    Args:
      opt_state: of `ShapeDtypeStruct`s.
      tx: the optimizer.
      mesh: of the ranks.
    """
    sharding = sharding_of(tx)
    if sharding is None:
        return [PartitionSpec()] * len(jax.tree.leaves(opt_state))
    axes = _axes(tx, mesh)
    dims = map(_finder(sharding, num_ranks(mesh, axes)), jax.tree.leaves(opt_state))
    return [PartitionSpec(*() if dim is None else (*[None] * dim, axes)) for dim in dims]


def with_split_gradients(state: Any) -> list[tuple[Any, Sequence[bool], Any]]:
    """Return the parameters of a state whose gradients are split, which of them train, and `tx`.

    Those of a `TrainState`, of jdp and of Flax.
    """
    found = []
    for node in jax.tree.leaves(state, is_leaf=_is_optimizer):
        sharding = sharding_of(node.tx) if _is_optimizer(node) else None
        if sharding is None or sharding.stage < 2 or not hasattr(node, "params"):
            continue
        if _is_train_state(node):
            found.append((node.params, node.trainable, node.tx))
        else:
            found.append((node.params, [True] * len(jax.tree.leaves(node.params)), node.tx))
    return found


def adds_whole_updates(state: Any) -> bool:
    """Whether parameters of a state are split, and code other than jdp's adds updates to them."""
    nodes = jax.tree.leaves(state, is_leaf=_is_optimizer)
    return any(_splits_params(node) and not _is_train_state(node) for node in nodes)


def _splits_params(node: Any) -> bool:
    sharding = sharding_of(node.tx) if _is_optimizer(node) else None
    return sharding is not None and sharding.stage == 3 and hasattr(node, "params")


def _dims(state: Any, mesh: Mesh) -> tuple[list[int | None], tuple[str, ...]]:
    nodes = jax.tree.leaves(state, is_leaf=_is_optimizer)
    dims: list[int | None] = []
    found: set[tuple[str, ...]] = set()
    for node in nodes:
        sharding = sharding_of(node.tx) if _is_optimizer(node) else None
        if sharding is None:
            dims += [None] * len(jax.tree.leaves(node))
            continue
        axes = _axes(node.tx, mesh)
        found.add(axes)
        find = _finder(sharding, num_ranks(mesh, axes))
        is_split = {"params": sharding.stage == 3, "opt_state": True}
        shapes = {jnp.shape(leaf) for leaf in jax.tree.leaves(getattr(node, "params", ()))}
        for path, leaf in jax.tree_util.tree_leaves_with_path(node):
            name = getattr(path[0], "name", "")
            # Such an array in the shape of the parameters may be an average of them.
            is_beside = sharding.stage == 3 and name not in ("step", "seed")
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


def _is_optimizer(node: Any) -> bool:
    """Whether a node has an optimizer and its state: a `TrainState`, that of Flax, of nnx."""
    return isinstance(getattr(node, "tx", None), Replicated) and hasattr(node, "opt_state")


def _is_train_state(node: Any) -> bool:
    # Not by its class, whose module imports this one.
    return all(hasattr(node, name) for name in ("tx", *_FIELDS))
