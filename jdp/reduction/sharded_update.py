"""A sharded optimizer's update on this rank."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdp import axis, jax_compat
from jdp.analysis.marks import SYNCED, mark
from jdp.axis import FurtherSpec
from jdp.collectives import call_order, shards
from jdp.distributed.this_process import log_once
from jdp.reduction import (
    gradients,
    mixed_precision,
    nonfinite,
    scattered_gradients,
    shard_registry,
    step_context,
    wait_order,
)
from jdp.reduction.optimizer import Replicated, Sharded, applied, require_shapes, require_updates
from jdp.reduction.partition import Gather, Owned, Piece, partitioned
from jdp.reduction.shard_registry import Shard


class TreeArrays:
    """A tree's arrays; its other leaves stay unchanged."""

    def __init__(self, tree: Any):
        self._leaves, self._structure = jax.tree.flatten(tree)
        self.places: list[int] = [i for i, x in enumerate(self._leaves) if isinstance(x, jax.Array)]
        self.arrays: list[jax.Array] = [self._leaves[i] for i in self.places]

    def like(self, other: "TreeArrays") -> list[jax.Array | None]:
        """Return the arrays at `other`'s positions, None if shape or dtype differ."""
        here = dict(zip(self.places, self.arrays, strict=True))
        found = [here.get(i) for i in other.places]
        return [
            x if x is not None and (x.shape, x.dtype) == (new.shape, new.dtype) else None
            for x, new in zip(found, other.arrays, strict=True)
        ]

    def tree(self, arrays: Sequence[Any]) -> Any:
        """Return the tree with new arrays."""
        leaves = list(self._leaves)
        for i, x in zip(self.places, arrays, strict=True):
            leaves[i] = x
        return self._structure.unflatten(leaves)


def _log_whole_gradients(leaves: Sequence[Any]) -> None:
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in map(jnp.asarray, leaves))
    if not num_bytes:
        return
    arrays = "1 array" if len(leaves) == 1 else f"{len(leaves)} arrays"
    message = (
        f"the optimizer gets gradients as whole arrays ({arrays} of {num_bytes:,} bytes), so "
        "stage=3 saves no memory inside this step: it gathers their parameters at its start, "
        f"another {num_bytes:,} bytes. Write loss, grads = "
        "jdp.value_and_grad(loss_fn)(state.params, batch), and pass grads unchanged; jdp then "
        "gathers parameters where they are used and averages gradients where they are computed. "
        "With a model of nnx, differentiate with respect to weights: graph, weights = "
        "nnx.split(model), and in the loss nnx.merge(graph, weights, copy=True)."
    )
    log_once(logging.WARNING, message)


class _GradientPieces:
    """The gradients of one update, this rank's or with `synced` means over ranks."""

    def __init__(
        self,
        tx: Sharded,
        axes: tuple[str, ...],
        grads: Any,
        dims: Sequence[int | None],
        *,
        synced: bool,
    ):
        named = jax.tree_util.tree_leaves_with_path(grads)
        self._paths = [jax.tree_util.keystr(path) for path, _ in named]
        self._leaves = [leaf for _, leaf in named]
        self._tx, self._axes, self._dims, self._synced = tx, axes, dims, synced
        self._further = [shard_registry.further_spec(x, tx.axis_name) for x in self._leaves]

    def means(self) -> list[Piece]:
        leaves, sharding = self._leaves, self._tx.sharding
        if not self._synced and not sharding.mean:
            gradients.require_unreduced(self._paths, leaves)
        pieces: dict[int, Piece] = {}
        averaged = shard_registry.means()
        for i, (leaf, dim) in enumerate(zip(leaves, self._dims, strict=True)):
            found, is_mean = shard_registry.known(leaf), id(leaf) in averaged
            if self._synced:
                leaves[i] = self._marked(leaf, self._paths[i])
            is_part = found is not None and (found.dim, found.axes) == (dim, self._axes)
            if found is not None and is_mean and is_part:
                pieces[i] = Piece(found.value, dim)
            elif is_mean and dim is None and not self._synced:
                pieces[i] = Piece(leaf, None)
            elif self._synced and dim is None:
                pieces[i] = Piece(jnp.asarray(leaves[i]), None)
            elif self._synced and dim is not None:
                pieces[i] = Piece(shard_registry.own(leaves[i], dim, self._axes), dim)
        left = [i for i in range(len(leaves)) if i not in pieces]
        scattered = [i for i in left if self._dims[i] is not None]
        is_at_stage_3 = sharding.stage == 3 and shard_registry.are_of(self._tx)
        if is_at_stage_3 and sharding.mean and not self._synced:
            _log_whole_gradients([leaves[i] for i in scattered])
        scattered += self._going_along(left) if scattered else []
        pieces |= self._scattered(sorted(scattered))
        pieces |= self._reduced([i for i in left if i not in scattered])
        return [pieces[i] for i in range(len(leaves))]

    def _going_along(self, chosen: Sequence[int]) -> list[int]:
        """Return the whole gradients, if the others' calls can reduce them."""
        whole = [i for i in chosen if self._dims[i] is None]
        arrays = [gradients.require_float(self._paths[i], self._leaves[i]) for i in whole]
        return whole if scattered_gradients.takes_along(arrays, self._tx) else []

    def _scattered(self, chosen: Sequence[int]) -> dict[int, Piece]:
        if not chosen:
            return {}
        paths, dims = [self._paths[i] for i in chosen], [self._dims[i] for i in chosen]
        own = [gradients.require_float(self._paths[i], self._leaves[i]) for i in chosen]
        further = [self._further[i] for i in chosen]
        parts = scattered_gradients.scattered(paths, own, dims, self._tx, further)
        found = zip(chosen, parts, dims, strict=True)
        return {i: Piece(part, dim) for i, part, dim in found}

    def _reduced(self, chosen: Sequence[int]) -> dict[int, Piece]:
        if not chosen:
            return {}
        sharding = self._tx.sharding
        means = gradients.reduced(
            [self._paths[i] for i in chosen],
            [self._leaves[i] for i in chosen],
            axis_name=self._tx.axis_name,
            all_reduce=sharding.all_reduce,
            bucket_bytes=sharding.bucket_bytes,
            mean=sharding.mean,
            reduce_dtype=self._tx.reduce_dtype,
        )
        return {i: Piece(mean, None) for i, mean in zip(chosen, means, strict=True)}

    def _marked(self, leaf: Any, path: str) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return mark(leaf, kind=SYNCED, path=path, axes=axis.names(self._tx.axis_name))


def updated(
    tx: Replicated, grads: Any, opt_state: Any, params: Any, *, synced: bool, **extra: Any
) -> tuple[Any, Any]:
    """Return the parameters and the state after an update."""
    mixed_precision.mark_gradients(grads, tx)
    axes = shard_axes(tx)
    if axes is None:
        return tx.update(grads, opt_state, params, synced=synced, applies=True, **extra)
    assert isinstance(tx, Sharded)
    if not synced:
        require_shapes(grads, params)
    shard_registry.remember_further_like(grads, params, tx.axis_name)
    update = Update(tx, axes, jax.tree.structure(grads))
    return update.run(update.means(grads, synced), opt_state, params, extra)


def shard_axes(tx: Replicated) -> tuple[str, ...] | None:
    """Return the axes of the step's split state."""
    if not isinstance(tx, Sharded) or not axis.is_bound(tx.axis_name):
        return None
    if step_context.current(tx.axis_name) is None:
        return None
    axes = axis.in_mesh_order(tx.sharding.axes or tx.axis_name)
    return axes if lax.axis_size(axes) > 1 else None


class Update:
    """An update of a sharded optimizer on this rank; `run` adds it to parameters if it applies."""

    def __init__(self, tx: Sharded, axes: tuple[str, ...], grad_tree: Any, *, applies: bool = True):
        self._tx = tx
        self._axes = axes
        self._num_shards = lax.axis_size(axes)
        self._grad_tree = grad_tree
        self._applies = applies

    def _dims(self, leaves: Sequence[Any]) -> list[int | None]:
        return [shard_registry.dim_of(self._tx, leaf, self._num_shards) for leaf in leaves]

    def means(self, grads: Any, synced: bool) -> list[Piece]:
        """Return this rank's part of each mean."""
        dims = self._dims(jax.tree.leaves(grads))
        return _GradientPieces(self._tx, self._axes, grads, dims, synced=synced).means()

    def run(
        self, pieces: Sequence[Piece], opt_state: Any, params: Any, extra: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Return the new parameters and state, whole arrays with known shards."""
        given = [TreeArrays(tree) for tree in (opt_state, params, extra)]
        returned: list[TreeArrays] = []

        def update(*flat: jax.Array) -> list[jax.Array]:
            left = iter(flat)
            grads = self._grad_tree.unflatten([next(left) for _ in pieces])
            state, params, options = (
                each.tree([next(left) for _ in each.arrays]) for each in given
            )
            operands, wrapped = (grads, state, params), self._tx.wrapped
            if self._applies:
                new, new_state = applied(wrapped, *operands, **options)
            else:
                new, new_state = wrapped.update(*operands, **options)
                require_updates(new, params)
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

        def replaced() -> list[Any]:
            """Return the old array in place of each result of its shape and dtype."""
            return [*given[1].like(returned[0]), *given[0].like(returned[1])]

        def dims_of(shapes: list[jax.ShapeDtypeStruct]) -> list[int | None]:
            pairs = zip(shapes, replaced(), strict=True)
            return self._dims([new if old is None else old for new, old in pairs])

        results, gathers, owned = partitioned(update, args, self._axes, dims_of)
        _report(gathers, owned)
        num_params = len(returned[0].arrays)
        overwrite = given[1].like(returned[0]) if is_in_place else ()
        axis_name = self._tx.axis_name
        further = [shard_registry.further_spec(x, axis_name) for x in replaced()]
        new_params = self._whole(results[:num_params], further[:num_params], overwrite)
        new_state = self._whole(results[num_params:], further[num_params:])
        state = returned[1].tree(new_state)
        grads = self._grad_tree.unflatten(range(len(pieces)))
        nonfinite.record(step_context.current(axis_name), grads, state)
        return returned[0].tree(new_params), state

    def _pieces(self, leaves: Sequence[jax.Array]) -> list[Piece]:
        return [
            Piece(leaf, None)
            if dim is None
            else Piece(shard_registry.own(leaf, dim, self._axes), dim)
            for leaf, dim in zip(leaves, self._dims(leaves), strict=True)
        ]

    def _is_in_place(self) -> bool:
        """Whether new parameters overwrite the old ones, whole on each rank."""
        step = step_context.current(self._tx.axis_name)
        if step is None or not step.choices.in_place or self._tx.sharding.stage == 3:
            return False
        return not jax_compat.CPU_COPIES_SLICES and shards.is_native(self._axes, step.mesh)

    def _waiting(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Delay old parameters until the last gradient was sent, so XLA copies none."""
        token = call_order.token()
        chosen = [i for i, piece in enumerate(pieces) if piece.dim is not None]
        values = [pieces[i].value for i in chosen]
        waiting = values if token is None else wait_order.after(values, [token])
        found = dict(zip(chosen, waiting, strict=True))
        return [Piece(found.get(i, x.value), x.dim) for i, x in enumerate(pieces)]

    def _whole(
        self,
        pieces: Sequence[Piece],
        further: Sequence[FurtherSpec],
        overwrite: Sequence[jax.Array | None] = (),
    ) -> list[jax.Array]:
        parts = {
            i: Shard(piece.value, piece.dim, self._axes, further=further[i])
            for i, piece in enumerate(pieces)
            if piece.dim is not None
        }
        bucket_bytes = self._tx.sharding.bucket_bytes
        places = [overwrite[i] for i in parts] if overwrite else ()
        wholes = shard_registry.gathered([*parts.values()], bucket_bytes, places)
        found = dict(zip(parts, wholes, strict=True))
        return [found.get(i, piece.value) for i, piece in enumerate(pieces)]


def _report(gathers: Sequence[Gather], owned: Sequence[Owned]) -> None:
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
