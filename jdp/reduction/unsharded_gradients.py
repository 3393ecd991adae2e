"""The means of gradients that stay whole, of optimizers that split the gradients of others.

They are means also where no gradient is large enough to be split: what a step does with its
gradients must not depend on their sizes, or on the number of ranks.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from jdp.axis import AxisName
from jdp.reduction import gradients, scattered_gradients, shard_registry, step_context


class WholeMeans:
    """The gradients of the leaves of a tree that stay whole, and how they become means.

    Args:
      params: tree of parameters.
      axis_name: the data axis of the caller.
      is_sent: whether gradients may be averaged over the ranks where they are computed.
      is_at_once: whether the gradients are those of all rows of this rank.
      besides: positions of leaves whose gradients are not averaged.

    Attributes:
      are_sent: whether gradients are averaged over the ranks where they are computed.
      is_at_once: see above.
      owners: position of a leaf that stays whole -> its optimizer.
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
        # Under a vmap of the author's, gradients are those of single rows, which are not averaged.
        is_here = step is not None and step.trace == jax.extend.core.get_opaque_trace_state()
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
        """Return the positions of those that are reduced in the calls that scatter others.

        Of micro-batches these are none: they are reduced once, at the end, with the loss.
        """
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
        """Return the means over ranks of all these gradients, by position."""
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
