"""Which of a state's leaves are sharded over the ranks."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jdp import axis, pytrees, rank_state
from jdp.axis import AxisName, FurtherSpec
from jdp.distributed.mesh import num_ranks
from jdp.reduction import shard_registry
from jdp.reduction.optimizer import has_optimizer, sharding_of

# A subclass may have more.
_FIELDS = ("step", "params", "opt_state", "model_state", "seed")


def state_nodes(state: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a state's nodes, in the order of its leaves, each with its optimizer or None.

    A node is an optimizer with its state, another nnx variable, whose optimizer has a matching
    `wrt`, or another leaf.
    """
    nnx = sys.modules.get("flax.nnx")
    variable = () if nnx is None else nnx.Variable

    def is_node(node: Any) -> bool:
        return is_optimizer(node) or isinstance(node, variable)

    found = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_node)
    filters = [
        (nnx.filterlib.to_predicate(node.wrt), node.tx)
        for _, node in found
        if nnx is not None and isinstance(node, nnx.Optimizer) and is_optimizer(node)
    ]
    for path, node in found:
        if is_optimizer(node):
            yield node, node.tx
            continue
        names = tuple(map(_name, path)) if isinstance(node, variable) else ()
        yield node, _one([tx for is_of, tx in filters if names and is_of(names, node)])


def _one(found: list[Any]) -> Any:
    """Return a variable's first optimizer if all reduce and shard alike."""
    ways = {(tx.axis_name, tx.reduce_dtype, sharding_of(tx)) for tx in found}
    return found[0] if len(ways) == 1 else None


def _name(key: Any) -> Any:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


def _optimized_parameters(node: Any) -> Any:
    return getattr(node, "params", ()) if is_optimizer(node) else node


def is_optimizer(node: Any) -> bool:
    """Whether a node has an optimizer and its state."""
    return has_optimizer(node) and hasattr(node, "opt_state")


def is_train_state(node: Any) -> bool:
    """Whether a node is a `TrainState`, without importing its module, which imports this one."""
    return all(hasattr(node, name) for name in ("tx", *_FIELDS))


# `shard_map` gets groups of equally sharded leaves.
UNIFORM, OWN = 0, 1
_FIRST_DIM = 2
_NUM_DIMS = 8


def groups(state: Any, mesh: Mesh) -> tuple[list[int], tuple[str, ...]]:
    """Return each state array's group, and its shards' mesh axes.

    Group 0 is equal on every rank, group 1 is `per_rank`, group 2 + d is sharded along dim d.
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
    """Return each group's partition but the uniform one's."""
    dims = (PartitionSpec(*[None] * dim, tuple(shard_axes)) for dim in range(_NUM_DIMS))
    return (PartitionSpec(tuple(axis_name)), *dims)


NUM_GROUPS = _FIRST_DIM + _NUM_DIMS


def partition(state: Any, mesh: Mesh) -> list[PartitionSpec | None]:
    """Return each state array's partition over the ranks by its own optimizer, if it has a rule."""
    restored = pytrees.restore(state)
    dims, axes = _dims(restored, mesh)
    specs: list[PartitionSpec | None] = []
    for node, tx in state_nodes(restored):
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
    """Return each optimizer state leaf's partition."""
    sharding = sharding_of(tx)
    if sharding is None:
        own = PartitionSpec(axis.names(tx.axis_name))
        return [own if is_own else PartitionSpec() for is_own in rank_state.flags(opt_state)]
    axes = _axes(tx, mesh)
    dims = map(_finder(tx, num_ranks(mesh, axes)), jax.tree.leaves(opt_state))
    return [PartitionSpec(*() if dim is None else (*[None] * dim, axes)) for dim in dims]


def with_split_gradients(state: Any) -> list[tuple[Any, Sequence[bool], Any]]:
    """Return (parameters with sharded gradients, which of them train, `tx`) of a state."""
    found = []
    for node, tx in state_nodes(state):
        sharding = sharding_of(tx)
        if sharding is not None and sharding.stage >= 2:
            params = _optimized_parameters(node)
            flags = [True] * len(jax.tree.leaves(params))
            is_of_jdp = is_train_state(node)
            found.append((params, node.trainable if is_of_jdp else flags, tx))
    return found


def adds_whole_updates(state: Any) -> bool:
    """Whether other code than jdp's adds updates to sharded parameters."""
    return any(
        sharding.stage == 3
        and bool(jax.tree.leaves(_optimized_parameters(node)))
        and not is_train_state(node)
        for node, tx in state_nodes(state)
        if (sharding := sharding_of(tx)) is not None
    )


def _dims(state: Any, mesh: Mesh) -> tuple[list[int | None], tuple[str, ...]]:
    dims: list[int | None] = []
    found: set[tuple[str, ...]] = set()
    for node, tx in state_nodes(state):
        sharding = sharding_of(tx)
        if sharding is None:
            dims += [None] * len(jax.tree.leaves(node))
            continue
        axes = _axes(tx, mesh)
        found.add(axes)
        find = _finder(tx, num_ranks(mesh, axes))
        is_at_3 = sharding.stage == 3
        if not is_optimizer(node):
            dims += [find(leaf) if is_at_3 else None for leaf in jax.tree.leaves(node)]
            continue
        is_split = {"params": is_at_3, "opt_state": True}
        shapes = {jnp.shape(leaf) for leaf in jax.tree.leaves(_optimized_parameters(node))}
        for path, leaf in jax.tree_util.tree_leaves_with_path(node):
            name = getattr(path[0], "name", "")
            # An array shaped like a parameter may be its average.
            is_beside = is_at_3 and name not in ("step", "seed")
            has_dim = is_split.get(name, is_beside and jnp.shape(leaf) in shapes)
            dims.append(find(leaf) if has_dim else None)
    if len(found) > 1:
        raise ValueError(
            f"the optimizers of this state shard over different mesh axes, {sorted(found)}. Pass "
            "the same jdp.sharded(over=...) to all of them."
        )
    return dims, next(iter(found), ())


def _axes(tx: Any, mesh: Mesh) -> tuple[str, ...]:
    names = tx.sharding.axes or axis.names(tx.axis_name)
    return tuple(sorted(names, key=mesh.axis_names.index))


def _finder(tx: Any, num_shards: int) -> Callable[[Any], int | None]:
    def find(leaf: Any) -> int | None:
        if not pytrees.is_array(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct):
            return None
        dim = shard_registry.dim_of(tx, leaf, num_shards)
        return None if dim is None or dim >= _NUM_DIMS else dim

    return find


@jax.tree_util.register_static
@dataclass(frozen=True)
class StateLayout:
    """How a state is assembled from arrays of groups; `further`: how the compiler splits each."""

    treedef: Any
    groups: tuple[int, ...]
    adds_whole_updates: bool
    further: tuple[FurtherSpec, ...]

    def remember_further(self, state: Any) -> None:
        """Record how the compiler splits a traced state that replaces this one."""
        leaves, treedef = jax.tree.flatten(state)
        if treedef == self.treedef:
            shard_registry.remember_further(leaves, self.further)

    def joined(self, lists: Sequence[Sequence[Any]]) -> Any:
        """Invert `parted`: return the state with these leaves."""
        left = [iter(leaves) for leaves in lists]
        return self.treedef.unflatten([next(left[group]) for group in self.groups])

    def parted(self, leaves: Sequence[Any]) -> list[list[Any]]:
        """Sort the entries per array into groups."""
        lists: list[list[Any]] = [[] for _ in range(NUM_GROUPS)]
        for leaf, group in zip(leaves, self.groups, strict=True):
            lists[group].append(leaf)
        return lists


def parted(
    state: Any, mesh: Mesh, axis_name: AxisName
) -> tuple[list[list[Any]], StateLayout, tuple[str, ...]]:
    """Return a state's arrays by group, its layout, and its shards' axes."""
    rank_state.require_dims(pytrees.restore(state))
    held = pytrees.hold(state)
    leaves, treedef = jax.tree.flatten(held)
    split, axes = groups(held, mesh)
    adds = adds_whole_updates(pytrees.restore(held))
    further = tuple(shard_registry.further_spec(leaf, axis_name) for leaf in leaves)
    layout = StateLayout(treedef, tuple(split), adds, further)
    return layout.parted(leaves), layout, axes


def whole_state(
    lists: Sequence[Sequence[Any]], layout: StateLayout, axes: tuple[str, ...]
) -> list[list[Any]]:
    """Return a state's arrays as the author's function sees them."""
    own, *by_dim = lists
    _, _, *specs = layout.parted(layout.further)
    parts = [
        shard_registry.entering(value, dim, axes, spec)
        for dim, values in enumerate(by_dim)
        for value, spec in zip(values, specs[dim], strict=True)
    ]
    left = iter(shard_registry.gathered(parts))
    return [[*own], *([next(left) for _ in values] for values in by_dim)]


def claim_update(state: Any, *, trains: bool = True) -> None:
    """Record which optimizer updates parameters with sharded gradients."""
    for params, flags, tx in with_split_gradients(state):
        shard_registry.claim(params, [flag and trains for flag in flags], tx)


def state_parts(
    lists: Sequence[Sequence[jax.Array]], axes: tuple[str, ...]
) -> list[list[jax.Array]]:
    """Return a new state's arrays as they leave the step, shards of sharded ones."""
    uniform, own, *by_dim = lists
    shards = [
        [shard_registry.own(leaf, dim, axes) for leaf in leaves]
        for dim, leaves in enumerate(by_dim)
    ]
    return [[*uniform], [*own], *shards]
