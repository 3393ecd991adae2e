"""The parameters of one layer: gathered from all ranks, and their gradients scattered to them."""

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdp import axis
from jdp.collectives import buckets, shards
from jdp.collectives.xla import scaled, split_scale
from jdp.reduction import step_context, weighted_sum
from jdp.reduction.mixed_precision import cast
from jdp.reduction.scattered_gradients import proved
from jdp.reduction.shard_registry import Shard


class LayerShards:
    """Gathers single layers of stacked shards, and scatters gradients of single layers.

    Args:
      parts: shards of stacked parameters, all over the same axes, split on a dim behind that of
        the layers.
      axes: all axes of the step, over which gradients are averaged.
    """

    def __init__(self, parts: Sequence[Shard], axes: tuple[str, ...]):
        self._dims = [part.dim - 1 for part in parts]
        self._over = parts[0].axes
        self._others = tuple(name for name in axes if name not in self._over)
        self._axes = axes
        step = step_context.current(axes)
        assert step is not None
        self._mesh = step.mesh
        self._weights, self._scale = weighted_sum.factors(step.weight, axes, mean=True)
        self._dtypes = [part.value.dtype for part in parts]
        self._gather_dtypes = [part.gather_dtype or part.value.dtype for part in parts]
        self._reduce_dtypes = [part.reduce_dtype or part.value.dtype for part in parts]
        shapes = [part.value.shape[1:] for part in parts]
        # A bucket for each dtype: they are needed, and complete, all at once.
        sent = list(map(jax.ShapeDtypeStruct, shapes, self._reduce_dtypes))
        self._plan = buckets.plan(sent, sys.maxsize)
        self._shapes = [
            (*shape[:dim], shape[dim] * axis.size(self._over), *shape[dim + 1 :])
            for shape, dim in zip(shapes, self._dims, strict=True)
        ]

    @property
    def share(self) -> jax.Array | None:
        """This rank's share of the weight of all ranks, None where all count the same."""
        return None if self._weights.forward is None else lax.stop_gradient(self._weights.forward)

    def zeros(self) -> list[jax.Array]:
        """Return a gradient of zeros of one layer."""
        return [jnp.zeros(*x) for x in zip(self._shapes, self._gather_dtypes, strict=True)]

    def gathered(self, stacked: Sequence[jax.Array], i: Any, share: Any) -> list[jax.Array]:
        """Return the whole parameters of layer `i`; their gradient is the mean over ranks.

        Args:
          i: `[]` int, number of the layer.
        """
        own = [lax.dynamic_index_in_dim(x, i, keepdims=False) for x in stacked]

        # Where derivatives are nested, JAX differentiates what is inside of the inner one.
        @jax.custom_vjp
        def gather(own: list[jax.Array], share: Any) -> list[jax.Array]:
            sent = self._bucketed(list(map(cast, own, self._gather_dtypes)))
            with self._weights.named():
                planned = shards.all_gather(*sent, self._over, mesh=self._mesh)
            return self._unplanned(planned)

        def backward(share: Any, gradient: list[jax.Array]) -> tuple[list[jax.Array], Any]:
            return self.means(gradient, share), jax.tree.map(jnp.zeros_like, share)

        gather.defvjp(lambda own, share: (gather(own, share), share), backward)
        return gather(own, share)

    def means(self, gradient: Sequence[jax.Array], share: Any) -> list[jax.Array]:
        """Return this rank's shards of the mean of a layer's gradient."""
        return self.divided(self.sums(gradient, share), share)

    def sums(self, gradient: Sequence[jax.Array], share: Any) -> list[jax.Array]:
        """Return this rank's shards of the sum of a layer's gradient over ranks.

        `divided` makes means of sums, after a loop: XLA waits for a sum where it is used first.
        """
        weights = self._weights.by_share(share)
        local = []
        for x, dtype, sent in zip(gradient, self._dtypes, self._reduce_dtypes, strict=True):
            before, _ = split_scale(self._scale, sent)
            local.append(cast(scaled(weights.term(cast(x, dtype)), before), sent))
        with weights.named():
            sums = shards.reduce_scatter(*self._bucketed(local), self._over, mesh=self._mesh)
            if self._others:
                sums = [axis.psum(x, self._others, axis.platform(self._mesh)) for x in sums]
        return list(map(cast, self._unplanned(sums), self._dtypes))

    def divided(self, sums: Sequence[jax.Array], share: Any) -> list[jax.Array]:
        """Return the means for the sums of one layer, or of stacked layers."""
        weights = self._weights.by_share(share)
        scales = [split_scale(self._scale, dtype)[1] for dtype in self._reduce_dtypes]
        return [weights.total(scaled(x, by)) for x, by in zip(sums, scales, strict=True)]

    def proved(self, stacked: Sequence[jax.Array]) -> list[jax.Array]:
        """Return stacked means, marked for the proof."""
        return [proved(x, self._axes, mean=True) for x in stacked]

    def _bucketed(self, leaves: Sequence[Any]) -> tuple[list[list[Any]], list[list[int]]]:
        values = [[leaves[i] for i in bucket] for bucket in self._plan]
        return values, [[self._dims[i] for i in bucket] for bucket in self._plan]

    def _unplanned(self, planned: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        by_position = {
            i: leaf
            for bucket, leaves in zip(self._plan, planned, strict=True)
            for i, leaf in zip(bucket, leaves, strict=True)
        }
        return [by_position[i] for i in range(len(self._dims))]
