"""Native calls on CPUs, each of which waits for the one before it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jdp import axis
from jdp.collectives import call_order
from jdp.collectives.cpu import shared_memory
from jdp.collectives.xla import Scale, scaled

SUMMED_DTYPES = frozenset(
    "float32 float64 bfloat16 float16 int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()
)

# MLIR compares each leaf of a call with every other leaf, which takes 1.5 s for 10,000 leaves.
_MAX_LEAVES = 512


class Calls:
    """The calls that one function traces, each of which waits for the one before it.

    Args:
      axes: names of the axes of the ranks, which are numbered in the order of these axes.
      mesh: the mesh of the ranks; None if it is not known.
    """

    def __init__(self, axes: tuple[str, ...], mesh: Mesh | None):
        self._rank, self._group = lax.axis_index(axes), _group(axes)
        self._options = dict(
            axes=axes,
            num_ranks=axis.size(axes),
            communicator=shared_memory.communicator(mesh, axes),
            beside_xla=call_order.is_beside_xla(),
        )
        token = call_order.token()
        self._token: Any = np.zeros(1, np.float32) if token is None else token

    def summed(
        self, primitive: Any, bucket: Sequence[jax.Array], scale: Scale, **params: Any
    ) -> list[jax.Array]:
        """Return the sums of leaves of one dtype, multiplied by a scale.

        Args:
          scale: a number, or `[]` float, which multiplies the sums.
        """
        # The call scales in the same rounding by a number. Integers are scaled as XLA's sums are.
        dtype = bucket[0].dtype
        is_fused = isinstance(scale, (int, float)) and jnp.issubdtype(dtype, jnp.floating)
        fused = np.asarray(scale if is_fused else 1, "float64" if dtype == "float64" else "float32")
        sums = self.results(primitive, bucket, fused, **params)
        return sums if is_fused else [scaled(leaf, scale) for leaf in sums]

    def results(
        self,
        primitive: Any,
        bucket: Sequence[jax.Array],
        scale: Any,
        overwritten: Sequence[jax.Array | None] = (),
        **params: Any,
    ) -> list[jax.Array]:
        """Return the results of a primitive, in one call for each 512 leaves.

        Args:
          scale: a number, or `[]` array, which the primitive gets.
        """
        results: list[jax.Array] = []
        for first in range(0, len(bucket), _MAX_LEAVES):
            chosen = slice(first, first + _MAX_LEAVES)
            part = bucket[chosen]
            own = {
                key: value[chosen] if isinstance(value, tuple) else value
                for key, value in params.items()
            }
            more = [x for x in overwritten[chosen] if x is not None]
            number = call_order.next_number(part)
            self._token, *leaves = primitive.bind(
                self._rank, self._group, scale, self._token, *part, *more,
                number=number, **own, **self._options,
            )  # fmt: skip
            results += leaves
        return results

    def end(self) -> None:
        """Record the token of the last call, for the next calls of the program."""
        if isinstance(self._token, jax.Array):
            call_order.passed(self._token)


def _group(axes: tuple[str, ...]) -> jax.Array:
    # Ranks that differ along another axis belong to another reduction.
    around = axis.enclosing_mesh()
    others = tuple(n for n in around.axis_names if n in around.manual_axes and n not in axes)
    return lax.axis_index(others) if others else jnp.int32(0)
