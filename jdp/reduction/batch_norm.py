"""Statistics for batch normalisation, over the rows of all ranks that count."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdp.axis import AxisName
from jdp.reduction import row_weight
from jdp.reduction.metrics import sum_over_ranks


def batch_norm_statistics(
    x: jax.Array,
    mask: Any = None,
    *,
    feature_dim: int = -1,
    axis_name: AxisName = "data",
) -> tuple[jax.Array, jax.Array]:
    """Return mean and variance of each feature over all rows that count, of all ranks.

    They are those of the batch in one go, whatever the number of ranks, with exact gradients, with
    the weights of the step, too. They are the same on every rank, so that they may be kept in the
    state. A rank that has only padding contributes nothing; without any row that counts both are
    0. In micro-batches they are those of a micro-batch of all ranks.

    Args:
      x: `[rows, ..., features]` float, this rank's rows. Dims between (positions, pixels) count
        like rows.
      mask: `[rows]` or `[rows, positions]`, bool or float >= 0, how much each counts; where it is
        0, `x` may hold anything, even NaN. Default: all count the same.
      feature_dim: which dim of `x` the features are, 1 for `[rows, features, height, width]`.
      axis_name: the data axis.

    Returns:
      (mean, variance), each `[features]` in at least float32. The variance is that of the
      population: sum(w * (x - mean)**2) / sum(w). Where no axis is bound, those of `x`.

    Raises:
      TypeError: if `x` is not a float array.
      ValueError: if `x` has fewer than 2 dims, or the mask does not fit its first dims.

    >>> import jax, jax.numpy as jnp
    >>> x = jnp.array([[[1.0], [3.0]], [[5.0], [jnp.nan]]])     # two rows for each of two ranks
    >>> mask = jnp.array([[True, True], [True, False]])
    >>> jax.vmap(batch_norm_statistics, axis_name="data")(x, mask)[0].tolist()
    [[3.0], [3.0]]
    """
    x = jnp.asarray(x)
    found = f"jdp.batch_norm_statistics(x) got x {x.dtype}{list(x.shape)}"
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{found}, which has no mean of its own dtype. Cast it to float32.")
    if x.ndim < 2:
        raise ValueError(f"{found}, but it needs a dim of rows and one of features.")
    x = jnp.moveaxis(x, feature_dim, -1)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    weight = _weights(x, mask, found)
    dims = tuple(range(x.ndim - 1))
    # A feature of a row that does not count may be NaN, and so may its gradient.
    x = jnp.where(weight == 0, 0, x)
    count = jnp.broadcast_to(weight, (*x.shape[:-1], 1)).sum()
    total, count = sum_over_ranks(((weight * x).sum(dims), count), axis_name=axis_name)
    divisor = row_weight.divisor(count)
    # Where the mean is large beside the deviation, this sum is off by some of its last digits. The
    # deviations from it make up for that.
    shift = lax.stop_gradient(total / divisor)
    deviations = weight * (x - shift)
    sums = deviations.sum(dims), (deviations * (x - shift)).sum(dims)
    moved, squares = sum_over_ranks(sums, axis_name=axis_name)
    moved = moved / divisor
    return shift + moved, jnp.maximum(squares / divisor - moved**2, 0)


def _weights(x: jax.Array, mask: Any, found: str) -> jax.Array:
    """Return how much each row counts, with as many dims as `x`, whose features are last."""
    mask = jnp.ones(x.shape[:1], x.dtype) if mask is None else jnp.asarray(mask)
    if not 0 < mask.ndim < x.ndim or mask.shape != x.shape[: mask.ndim]:
        raise ValueError(
            f"{found} and a mask {mask.dtype}{list(mask.shape)}: a mask has one number for each "
            f"row, {list(x.shape[:1])}, or for each position of a row, without the features."
        )
    weight = lax.stop_gradient(mask.astype(x.dtype))
    return weight.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))
