"""A loss's local gradients, and means of unsharded ones."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdp import axis
from jdp.axis import AxisName
from jdp.reduction import (
    gradients,
    mixed_precision,
    scattered_gradients,
    shard_registry,
    step_context,
)


# Unsharded gradients always become means: a step must not depend on sizes or the number of ranks.
class WholeMeans:
    """Unsharded gradients of a tree, and how they become means.

    Args:
      is_sent: whether gradients may be averaged where they are computed.
      is_at_once: whether the gradients are those of all rows of this rank.
      besides: positions of leaves without averaged gradients.
    """

    def __init__(
        self,
        params: Any,
        axis_name: AxisName,
        *,
        is_sent: bool,
        is_at_once: bool,
        besides: Container[int] = (),
    ):
        step = step_context.current(axis_name)
        # Gradients under an author's vmap are of single rows.
        is_here = step is not None and step.is_here()
        self.are_sent, self.is_at_once = is_sent and is_here, is_at_once
        named = jax.tree_util.tree_leaves_with_path(params) if self.are_sent else []
        found = [shard_registry.owner_of_whole(leaf) for _, leaf in named]
        self.owners = {
            i: it
            for i, it in enumerate(found)
            if it is not None and it.sharding.mean and i not in besides
        }
        self._leaves = {i: jnp.asarray(named[i][1]) for i in self.owners}
        self._paths = {i: jax.tree_util.keystr(named[i][0]) for i in self.owners}

    def along(self) -> list[int]:
        """Return the positions reduced with scattered ones; of micro-batches once, at the end."""
        return [
            i
            for owner, chosen in self._by_owner(self.owners if self.is_at_once else ())
            if scattered_gradients.takes_along([self._leaves[i] for i in chosen], owner)
            for i in chosen
        ]

    def _by_owner(self, chosen: Iterable[int]) -> list[tuple[Any, list[int]]]:
        chosen = list(chosen)
        owners = {id(self.owners[i]): self.owners[i] for i in chosen}
        return [(it, [i for i in chosen if self.owners[i] is it]) for it in owners.values()]

    def means(self, local: Sequence[Any], reduced: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
        """Return the means over ranks, by position."""
        found = {i: reduced[i] for i in self.owners if i in reduced}
        for owner, chosen in self._by_owner([i for i in self.owners if i not in found]):
            means = gradients.reduced(
                [self._paths[i] for i in chosen],
                [local[i] for i in chosen],
                axis_name=owner.axis_name,
                all_reduce=owner.sharding.all_reduce,
                bucket_bytes=owner.sharding.bucket_bytes,
                mean=True,
                reduce_dtype=owner.reduce_dtype,
            )
            found |= dict(zip(chosen, means, strict=True))
        return {
            i: shard_registry.remember_mean(value, self._paths[i]) for i, value in found.items()
        }


class LeafGradients(NamedTuple):
    """A tree's gradients: this rank's own, or means over ranks by position, whole or this shard."""

    local: list[Any]
    means: Mapping[int, jax.Array] = MappingProxyType({})


def local_value_and_grad(
    loss_fn: Callable[..., Any], has_aux: bool, axis_name: AxisName
) -> Callable[..., tuple[Any, Any]]:
    """Return `jax.value_and_grad(loss_fn)` of this rank's rows."""
    # A jdp step is never typed, and asking takes time.
    if step_context.current(axis_name) is not None or not axis.is_typed(axis_name):
        return jax.value_and_grad(loss_fn, has_aux=has_aux)

    # JAX would sum gradients of parameters of invariant type. Those of an invariant loss are n
    # times smaller.
    def varying_loss(params: Any, *rest: Any) -> Any:
        value = loss_fn(params, *rest)
        if not has_aux:
            return axis.as_varying(value, axis_name)
        loss, aux = value
        return axis.as_varying(loss, axis_name), aux

    def fn(params: Any, *rest: Any) -> tuple[Any, Any]:
        params = axis.as_varying(params, axis_name)
        return jax.value_and_grad(varying_loss, has_aux=has_aux)(params, *rest)

    return fn


class WholeGradients:
    """Gradients in whole parameters, with the interface of `ShardGradients`."""

    sends = False

    def __init__(
        self, params: Any, value_and_grad: Callable[..., tuple[Any, Any]], wholes: WholeMeans
    ):
        self._params = params
        self._seen = mixed_precision.for_loss(params)
        self._value_and_grad, self._wholes = value_and_grad, wholes

    def differentiate(
        self, loss_fn: Callable[..., Any], has_aux: bool, args: tuple
    ) -> tuple[Any, LeafGradients]:
        """Return a loss and its gradients."""
        value, grads = self._value_and_grad(self._seen, *args)
        if self._seen is not self._params:
            cast = mixed_precision.cast
            grads = jax.tree.map(lambda g, p: cast(g, jnp.result_type(p)), grads, self._params)
        return value, LeafGradients(jax.tree.leaves(grads))

    def whole(self, grads: LeafGradients) -> Any:
        """Return the gradients' tree."""
        means = self._wholes.means(grads.local, {}) if self._wholes.owners else {}
        leaves = [means.get(i, leaf) for i, leaf in enumerate(grads.local)]
        return jax.tree.structure(self._params).unflatten(leaves)
