"""Scanned layers whose parameters are whole, and whose gradients are split over the ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdp.analysis.marks import SHARED, mark
from jdp.reduction.layer_shards import LayerShards
from jdp.reduction.overlap.identities import instantiated
from jdp.reduction.shard_registry import Shard


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    params: Any,
    xs: Any,
    parts: Sequence[Shard | None],
    *,
    axes: tuple[str, ...],
    reverse: bool,
    unroll: int | bool,
) -> tuple[Any, Any]:
    """Run `lax.scan` over stacked parameters whose gradients go to the shards of this rank.

    Each round of the backward loop scatters the gradient of the layer before, while it computes its
    own, so that no more than two gradients of layers are whole at once.

    Args:
      parts: for each leaf of `params` its shard, None where its gradient is this rank's own.
    """
    named, tree = jax.tree_util.tree_flatten_with_path(params)
    is_split = [part is not None for part in parts]
    wholes = [
        mark(lax.stop_gradient(leaf), kind=SHARED, path=jax.tree_util.keystr(path), axes=axes)
        for (path, leaf), flag in zip(named, is_split, strict=True)
        if flag
    ]
    others = [leaf for (_, leaf), flag in zip(named, is_split, strict=True) if not flag]
    found = [part for part in parts if part is not None]
    late = _LateScatter(LayerShards(found, axes), reverse)
    own, slot = late.enter([part.value for part in found])

    def body(state: tuple[Any, Any], given: Any) -> tuple[tuple[Any, Any], Any]:
        (carry, slot), (wholes, own, others, x) = state, given
        wholes, slot = late.begin(wholes, own, slot)
        split, rest = iter(wholes), iter(others)
        layer = tree.unflatten(next(split if flag else rest) for flag in is_split)
        carry, y = f(carry, layer if xs is None else (layer, x))
        return (carry, slot), y

    given = wholes, own, others, xs
    (carry, _), ys = lax.scan(body, (init, slot), given, reverse=reverse, unroll=unroll)
    return carry, ys


class _LateScatter:
    """Identities around the scan and around each layer, of which only the backward passes act.

    As in `overlap.layer_hooks` the scan carries a slot, which holds this rank's gradient of the
    layer before on the way back. Each layer gives the parts of its sum for its own shards, and puts
    its own gradient into the slot. So the sums come out shifted by one layer, the first is one of
    zeros, and the last is taken after the loop.

    Args:
      shards: scatters the gradient of a layer.
      reverse: whether the scan runs the last layer first.
    """

    def __init__(self, shards: LayerShards, reverse: bool):
        self._shards = shards
        self._share = shards.share
        self._reverse = reverse

    def enter(self, own: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the stacked shards and an empty slot."""
        shards = self._shards

        def same(own: list, share: Any) -> tuple[list, list]:
            return own, shards.zeros()

        def backward(share: Any, cotangents: tuple[list, list]) -> tuple[list, Any]:
            shifted, slot = cotangents
            sums = [
                jnp.concatenate(
                    [more[1:], last[None]] if self._reverse else [last[None], more[:-1]]
                )
                for last, more in zip(shards.sums(slot, share), shifted, strict=True)
            ]
            means = shards.proved(shards.divided(sums, share))
            return means, jax.tree.map(jnp.zeros_like, share)

        hook = jax.custom_vjp(same)
        hook.defvjp(lambda own, share: (same(own, share), share), backward)
        return hook(own, self._share)

    def begin(
        self, wholes: list[jax.Array], own: list[jax.Array], slot: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the parameters of a layer and the slot; on the way back stand behind the layer."""

        def same(wholes: list, own: list, slot: list, share: Any) -> tuple[list, list]:
            return wholes, slot

        hook = jax.custom_vjp(same)

        def forward(*args: Any) -> tuple[Any, tuple]:
            values = jax.tree.map(lambda arg: arg.value, args)
            # Where derivatives are nested, one may be of the carry alone, which this one is not of.
            if any(x.perturbed for x in args[1]):
                return same(*values), (values[-1],)
            return hook(*values), (values[-1], None)

        def backward(residuals: tuple, cotangents: tuple[list, list]) -> tuple:
            gradient, slot = instantiated(cotangents)
            nothing = jax.tree.map(jnp.zeros_like, residuals[0])
            if len(residuals) > 1:
                return gradient, None, slot, nothing
            # XLA waits for a sum where it is used first: not before this layer's matmuls.
            sums = self._shards.sums(slot, residuals[0])
            sums, gradient = lax.optimization_barrier((sums, gradient))
            return None, sums, gradient, nothing

        hook.defvjp(forward, backward, symbolic_zeros=True)
        return hook(wholes, own, slot, self._share)
