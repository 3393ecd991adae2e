"""The operands of a loop over sharded layers, and the layer that is gathered ahead."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdp.reduction import scheduling_barrier
from jdp.reduction.layer_shards import LayerShards
from jdp.reduction.traced_layer import TracedLayer


class Operands(NamedTuple):
    """The operands of a loop over layers, or the gradient of each.

    Attributes:
      closed_over: see `TracedLayer`.
      carry: leaves of the first carry.
      shards: this rank's, of the stacked parameters that are split over the ranks.
      wholes: the other stacked parameters.
      xs: further stacked arrays.
    """

    closed_over: Sequence[Any]
    carry: Sequence[Any]
    shards: Sequence[Any]
    wholes: Sequence[Any]
    xs: Sequence[Any]


class LayerLoop(NamedTuple):
    """A loop over layers.

    Attributes:
      layer: the computation of one round.
      shards: gathers layers, and scatters their gradients.
      is_split: for each leaf of a layer whether it is gathered.
      num_layers: how many rounds, >= 1.
      is_reverse: whether the last layer is the first round.
      unroll: as in `lax.scan`.
    """

    layer: TracedLayer
    shards: LayerShards
    is_split: Sequence[bool]
    num_layers: int
    is_reverse: bool
    unroll: int | bool

    def turned(self) -> "LayerLoop":
        """Return the loop in the other direction."""
        return self._replace(is_reverse=not self.is_reverse)

    @property
    def first(self) -> int:
        """Number of the layer of the first round."""
        return self.num_layers - 1 if self.is_reverse else 0

    def after(self, i: Any) -> Any:
        """Return the number of the layer that follows layer `i`; the last one follows itself."""
        return jnp.maximum(i - 1, 0) if self.is_reverse else jnp.minimum(i + 1, self.num_layers - 1)

    def before(self, i: Any) -> Any:
        """Return the number of the layer before layer `i`; the first one is before itself."""
        return self.turned().after(i)

    def gathered(
        self, stacked: Sequence[jax.Array], i: Any, share: Any, ready: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Return the whole parameters of the layer that follows layer `i`.

        Args:
          i: `[]` int, number of the layer that is computed meanwhile.
        """
        # Where there is no loop, XLA would gather all layers before it computes the first.
        (following,) = scheduling_barrier.after([self.after(i)], ready if self.unroll != 1 else [])
        return self.shards.gathered(stacked, following, share)

    def joined(self, split: Sequence[jax.Array], wholes: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the parameters of a layer in their order, from the gathered and the other ones."""
        split_left, wholes_left = iter(split), iter(wholes)
        return [next(split_left if flag else wholes_left) for flag in self.is_split]

    def run(self, body: Any, state: Any, given: Any) -> tuple[Any, Any]:
        """Run `lax.scan(body, state, (numbers of the layers, *given))`."""
        numbers = jnp.arange(self.num_layers)
        options: Any = {"reverse": self.is_reverse, "unroll": self.unroll}
        return lax.scan(body, state, (numbers, *given), **options)
