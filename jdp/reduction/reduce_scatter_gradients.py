"""This rank's part of the mean of each gradient, for the update of a sharded optimizer."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdp import axis
from jdp.analysis.marks import SYNCED, mark
from jdp.reduction import (
    gradient_checks,
    gradients,
    scattered_gradients,
    shard_registry,
    whole_gradients,
)
from jdp.reduction.partition import Piece
from jdp.reduction.sharding import Sharded


class GradientPieces:
    """The gradients of one update, which are means already, or are sent now.

    Args:
      tx: the optimizer.
      axes: names of the mesh axes that its state is split over.
      grads: tree of this rank's gradients, or with `synced` of the means of all ranks.
      dims: for each the dim along which it is split; None for one that stays whole.
      synced: whether they are means over ranks already.
    """

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

    def means(self) -> list[Piece]:
        """Return this rank's part of the mean of each gradient."""
        leaves, sharding = self._leaves, self._tx.sharding
        if not self._synced and not sharding.mean:
            gradient_checks.require_unreduced(self._paths, leaves)
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
            whole_gradients.log([leaves[i] for i in scattered])
        scattered += self._going_along(left) if scattered else []
        pieces |= self._scattered(sorted(scattered))
        pieces |= self._reduced([i for i in left if i not in scattered])
        return [pieces[i] for i in range(len(leaves))]

    def _going_along(self, chosen: Sequence[int]) -> list[int]:
        """Return the gradients that stay whole, if the calls of the others can take them."""
        whole = [i for i in chosen if self._dims[i] is None]
        arrays = [gradients.require_float(self._paths[i], self._leaves[i]) for i in whole]
        return whole if scattered_gradients.takes_along(arrays, self._tx) else []

    def _scattered(self, chosen: Sequence[int]) -> dict[int, Piece]:
        """Return this rank's parts of the means of gradients, by their position."""
        if not chosen:
            return {}
        paths, dims = [self._paths[i] for i in chosen], [self._dims[i] for i in chosen]
        own = [gradients.require_float(self._paths[i], self._leaves[i]) for i in chosen]
        parts = scattered_gradients.scattered(paths, own, dims, self._tx)
        found = zip(chosen, parts, dims, strict=True)
        return {i: Piece(part, dim) for i, part, dim in found}

    def _reduced(self, chosen: Sequence[int]) -> dict[int, Piece]:
        """Return the means of gradients that stay whole, by their position."""
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
