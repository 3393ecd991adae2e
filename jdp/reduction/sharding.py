"""`Sharding`: the arrays that an optimizer splits over the ranks, and along which dim."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from jdp.collectives import AllReduce
from jdp.reduction.optimizer import Replicated

# Smaller leaves stay whole: splitting one saves less than the start of a transfer costs.
MIN_SIZE = 2**12


@dataclass(frozen=True)
class Sharding:
    """The arrays that `sharded` splits, and the ranks.

    Attributes:
      stage: 1: optimizer state. 2: gradients, too. 3: parameters, too.
      min_size: smaller leaves, in numbers, stay whole.
      axes: the mesh axes that the parts are split over; None: all axes of the optimizer.
      all_reduce: the algorithm for gradients that stay whole.
      bucket_bytes: capacity of one bucket in bytes.
      mean: average gradients; False adds them up.
      keep_gathered: at stage 3 gather parameters once for each step, and keep them.
      gather_dtype: at stage 3, in which a loss sees parameters; None: their own.
    """

    stage: int
    min_size: int
    axes: tuple[str, ...] | None
    all_reduce: AllReduce
    bucket_bytes: int
    mean: bool
    keep_gathered: bool = False
    gather_dtype: np.dtype | None = None

    @property
    def keeps_params(self) -> bool:
        """Whether all whole parameters are there throughout a step."""
        return self.stage < 3 or self.keep_gathered

    def dim(self, leaf: Any, num_shards: int) -> int | None:
        """Return the dim along which a leaf is split over some ranks, None if it stays whole.

        It is the largest one that divides, since that of stacked layers is a small one; the
        first of several that are equal. If that is the last one, and the one before it has whole
        tiles of rows for each rank, it is the one before: XLA for TPUs scatters those, where it
        may sum a slice of columns whole (v5e:2x4, bfloat16 `[1024, 1024]`).
        """
        shape = np.shape(leaf)
        if num_shards == 1 or np.prod(shape) < self.min_size:
            return None
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            return None
        dims = [i for i, size in enumerate(shape) if size and size % num_shards == 0]
        largest = max(dims, key=lambda i: (shape[i], -i), default=None)
        rows = len(shape) - 2
        # A tile of a TPU has 8 rows. Fewer than 128 may be vectors of stacked layers.
        if largest == rows + 1 and rows in dims and shape[rows] >= 128:
            return rows if shape[rows] % (8 * num_shards) == 0 else largest
        return largest


class Sharded(Replicated):
    """The result of `sharded`: an optax transformation that knows its axis and its `Sharding`."""

    @property
    def sharding(self) -> Sharding:
        """The arrays that are split, and the ranks."""
        return self.update.sharding  # type: ignore[attr-defined]

    @property
    def wrapped(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer itself, which sees mean gradients."""
        return self.update.wrapped  # type: ignore[attr-defined]


def sharding_of(tx: Any) -> Sharding | None:
    """Return the `Sharding` of an optimizer, None if it splits nothing."""
    return tx.sharding if isinstance(tx, Sharded) else None
