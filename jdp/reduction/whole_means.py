"""The means of gradients that stay whole, of optimizers that split the gradients of others."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdp.reduction import gradients, known_shards, scattered_gradients


class WholeMeans:
    """The gradients of the leaves of a tree that stay whole, and how they become means.

    Args:
      params: tree of parameters.
      is_at_once: whether the gradients are those of all rows of this rank.

    Attributes:
      is_at_once: see above.
      owners: position of a leaf that stays whole -> its optimizer.
      along: positions of those that are reduced in the calls that scatter other gradients.
    """

    def __init__(self, params: Any, *, is_at_once: bool):
        named = jax.tree_util.tree_leaves_with_path(params)
        found = [known_shards.owner_of_whole(leaf) for _, leaf in named]
        self.is_at_once = is_at_once
        self.owners = {i: it for i, it in enumerate(found) if it is not None and it.sharding.mean}
        self._paths = {i: jax.tree_util.keystr(named[i][0]) for i in self.owners}
        # Of micro-batches they are reduced once, at the end, with the loss.
        self.along = [
            i
            for owner, chosen in self._by_owner(self.owners if is_at_once else ())
            if scattered_gradients.takes_along([jnp.asarray(named[i][1]) for i in chosen], owner)
            for i in chosen
        ]

    def _by_owner(self, chosen: Iterable[int]) -> list[tuple[Any, list[int]]]:
        chosen = list(chosen)
        owners = {id(self.owners[i]): self.owners[i] for i in chosen}
        return [(it, [i for i in chosen if self.owners[i] is it]) for it in owners.values()]

    def means(self, local: Sequence[Any], reduced: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
        """Return the means over ranks of all these gradients, by position.

        Args:
          local: of each leaf this rank's gradient, or None.
          reduced: position -> mean of those that are means already.
        """
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
        return {i: known_shards.remember_mean(value) for i, value in found.items()}
