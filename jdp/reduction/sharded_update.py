"""The update of a sharded optimizer: each rank computes its part of the new state."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax import lax

from jdp import axis, jax_compat
from jdp.collectives import call_order, shards
from jdp.reduction import mixed_precision, scheduling_barrier, shard_registry, step_context
from jdp.reduction.optimizer import Replicated, require_shapes, require_updates
from jdp.reduction.partition import Gather, Owned, Piece, partitioned
from jdp.reduction.reduce_scatter_gradients import GradientPieces
from jdp.reduction.shard_registry import Shard
from jdp.reduction.sharding import Sharded, Sharding
from jdp.reduction.tree_arrays import TreeArrays


def updated(
    tx: Replicated, grads: Any, opt_state: Any, params: Any, *, synced: bool, **extra: Any
) -> tuple[Any, Any]:
    """Return the parameters and the optimizer state after one step of the optimizer."""
    mixed_precision.mark_gradients(grads, tx)
    axes = shard_axes(tx)
    if axes is None:
        updates, opt_state = tx.update(grads, opt_state, params, synced=synced, **extra)
        return optax.apply_updates(params, updates), opt_state
    assert isinstance(tx, Sharded)
    if not synced:
        require_shapes(grads, params)
    update = Update(tx, axes, jax.tree.structure(grads))
    return update.run(update.means(grads, synced), opt_state, params, extra)


def shard_axes(tx: Replicated) -> tuple[str, ...] | None:
    """Return the axes that the state of the step being traced is split over, None if it is not."""
    if not isinstance(tx, Sharded) or not axis.is_bound(tx.axis_name):
        return None
    if step_context.current(tx.axis_name) is None:
        return None
    axes = axis.in_mesh_order(tx.sharding.axes or tx.axis_name)
    return axes if lax.axis_size(axes) > 1 else None


class Update:
    """One update of a sharded optimizer on this rank.

    Args:
      tx: the optimizer.
      axes: names of the mesh axes that the state is split over.
      grad_tree: the structure of the gradients, that of the parameters for most optimizers.
      applies: whether `run` adds the updates to the parameters; it returns them otherwise.
    """

    def __init__(self, tx: Sharded, axes: tuple[str, ...], grad_tree: Any, *, applies: bool = True):
        self._tx = tx
        self._axes = axes
        self._num_shards = lax.axis_size(axes)
        self._grad_tree = grad_tree
        self._applies = applies

    def _dims(self, leaves: Sequence[Any]) -> list[int | None]:
        sharding: Sharding = self._tx.sharding
        return [sharding.dim(leaf, self._num_shards) for leaf in leaves]

    def means(self, grads: Any, synced: bool) -> list[Piece]:
        """Return this rank's part of the mean of each gradient."""
        dims = self._dims(jax.tree.leaves(grads))
        return GradientPieces(self._tx, self._axes, grads, dims, synced=synced).means()

    def run(
        self, pieces: Sequence[Piece], opt_state: Any, params: Any, extra: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Return the new parameters and optimizer state, whole arrays that know their shards."""
        given = [TreeArrays(tree) for tree in (opt_state, params, extra)]
        returned: list[TreeArrays] = []

        def update(*flat: jax.Array) -> list[jax.Array]:
            left = iter(flat)
            grads = self._grad_tree.unflatten([next(left) for _ in pieces])
            state, params, options = (
                each.tree([next(left) for _ in each.arrays]) for each in given
            )
            new, new_state = self._tx.wrapped.update(grads, state, params, **options)
            require_updates(new, params)
            new = optax.apply_updates(params, new) if self._applies else new
            returned[:] = [TreeArrays(new), TreeArrays(new_state)]
            return [x for each in returned for x in each.arrays]

        state, old, options = (each.arrays for each in given)
        is_in_place = self._applies and self._is_in_place()
        args = [
            *pieces,
            *self._pieces(state),
            *(self._waiting(self._pieces(old)) if is_in_place else self._pieces(old)),
            *(Piece(x, None) for x in options),
        ]
        results, gathers, owned = partitioned(update, args, self._axes, self._dims)
        _report(gathers, owned)
        num_params = len(returned[0].arrays)
        overwrite = given[1].like(returned[0]) if is_in_place else ()
        new_params = self._whole(results[:num_params], overwrite)
        new_state = self._whole(results[num_params:])
        return returned[0].tree(new_params), returned[1].tree(new_state)

    def _pieces(self, leaves: Sequence[jax.Array]) -> list[Piece]:
        return [
            Piece(leaf, None)
            if dim is None
            else Piece(shard_registry.own(leaf, dim, self._axes), dim)
            for leaf, dim in zip(leaves, self._dims(leaves), strict=True)
        ]

    def _is_in_place(self) -> bool:
        """Whether new parameters take the memory of the old ones, of which each rank has all."""
        step = step_context.current(self._tx.axis_name)
        if step is None or not step.choices.in_place or self._tx.sharding.stage == 3:
            return False
        return not jax_compat.CPU_COPIES_SLICES and shards.is_native(self._axes, step.mesh)

    def _waiting(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return parts of old parameters, not before the last gradient was sent.

        Until then the backward pass may need them, and XLA would copy what the new ones overwrite.
        """
        token = call_order.token()
        chosen = [i for i, piece in enumerate(pieces) if piece.dim is not None]
        values = [pieces[i].value for i in chosen]
        waiting = values if token is None else scheduling_barrier.after(values, [token])
        found = dict(zip(chosen, waiting, strict=True))
        return [Piece(found.get(i, x.value), x.dim) for i, x in enumerate(pieces)]

    def _whole(
        self, pieces: Sequence[Piece], overwrite: Sequence[jax.Array | None] = ()
    ) -> list[jax.Array]:
        parts = {
            i: Shard(piece.value, piece.dim, self._axes)
            for i, piece in enumerate(pieces)
            if piece.dim is not None
        }
        bucket_bytes = self._tx.sharding.bucket_bytes
        places = [overwrite[i] for i in parts] if overwrite else ()
        wholes = shard_registry.gathered([*parts.values()], bucket_bytes, places)
        found = dict(zip(parts, wholes, strict=True))
        return [found.get(i, piece.value) for i, piece in enumerate(pieces)]


def _report(gathers: Sequence[Gather], owned: Sequence[Owned]) -> None:
    """Record in the step the arrays that the update gathers, and those that one rank computes."""
    step = step_context.innermost()
    if step is None:
        return
    for gather, num in Counter(gathers).items():
        where = f" at {gather.line}" if gather.line else ""
        step.gathers.append(
            f"{num} x {list(gather.shape)} for `{gather.primitive}`{where}, "
            f"{num * gather.num_bytes / 1e6:.3g} MB"
        )
    for each in owned:
        where = f" at {each.line}" if each.line else ""
        step.owned.append(
            f"{each.count} x {list(each.shape)}{where}, {each.count_of_rank} on each rank"
        )
