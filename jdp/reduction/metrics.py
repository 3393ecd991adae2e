"""Means, sums and extremes over ranks, and row outputs."""

import functools
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdp import axis, jax_compat, pytrees
from jdp.analysis import diagnostics
from jdp.axis import AxisName
from jdp.reduction import row_weight, step_context, weighted_sum
from jdp.reduction.step_context import Scope


def _checking_step(axis_name: AxisName) -> Scope | None:
    step = step_context.around(axis_name)
    return None if step is None or step.is_part or step.batch_trace is None else step


def is_sum_checked(step: Scope, term: Any) -> bool:
    """Whether a term may overflow, in the step's own trace."""
    dtype = jnp.result_type(term)
    is_integer = jnp.issubdtype(dtype, jnp.integer) and pytrees.num_bits(dtype) >= 32
    return is_integer and jax_compat.trace_of(term) is step.batch_trace


def upper_half(term: jax.Array) -> jax.Array:
    """Return the bits' upper half, whose sum has room."""
    return lax.shift_right_arithmetic(term, lax.full_like(term, pytrees.num_bits(term.dtype) // 2))


def _report_overflow(
    step: Scope, totals: Sequence[jax.Array], uppers: Sequence[jax.Array], axis_name: AxisName
) -> None:
    others = tuple(name for name in step.axis_name if name not in axis.names(axis_name))
    frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
    line = diagnostics.innermost_line(frames)
    for total, upper in zip(totals, uppers, strict=True):
        bits = pytrees.num_bits(total.dtype)
        # Without an overflow, the lower halves' sum.
        difference = upper.astype(float) * 2.0 ** (bits // 2) - total.astype(float)
        overflows = jnp.any(jnp.abs(difference) > 2.0 ** (bits - 1))
        if others:  # ranks along other axes have other sums
            overflows = lax.pmax(overflows.astype(jnp.int32), others) > 0
        step.integer_sums.append((overflows, line))


def marked_sum(weight: jax.Array, step: Scope) -> jax.Array:
    """Return a batch's weight, -inf after an overflow."""
    if not step.integer_sums:
        return weight
    overflows = jnp.stack([flag for flag, _ in step.integer_sums])
    return jnp.where(overflows.any(), -jnp.inf, weight)


def mean_over_ranks(
    x: Any, *, weight: jax.Array | None = None, axis_name: AxisName = "data"
) -> Any:
    """Average a tree over ranks; the result is equal on every rank.

    The result is usable at once: in a `lax.cond`, as batch statistics, as a target. Inside a loss
    its gradient is exact, with the step's weights. As the loss itself use `global_mean`, since each
    rank's gradient through this mean is only its own.

    Args:
      x: tree of float arrays, any shapes; booleans count as 0.0 and 1.0.
      weight: `[]`, >= 0, of this rank's value; weight 0 drops even NaN. Default: that of the step
        (`train_step(weight=...)`), else equal. A rank whose rows have weight 0 in the step has no
        gradient. In your own `shard_map` the gradient is that of equal ranks: jdp cannot know of a
        later `sync_gradients(weight=...)`.
      axis_name: the data axis.

    Returns:
      The tree of sum(w * x) / sum(w), in the dtypes of `x`, of booleans in float32. Without a bound
      axis, `x`.

    Raises:
      TypeError: a leaf is an integer: sum it (`sum_over_ranks`) or cast it.
      ValueError: `axis_name` is a part of a weighted step's axes, without `weight`.

    >>> import jax, jdp
    >>> jax.vmap(lambda x: mean_over_ranks(x), axis_name="data")(jax.numpy.arange(4.0))
    Array([1.5, 1.5, 1.5, 1.5], dtype=float32)
    """
    named, treedef = jax.tree_util.tree_flatten_with_path(x)
    leaves = [_share(jnp.asarray(leaf)) for _, leaf in named]
    for (path, _), leaf in zip(named, leaves, strict=True):
        _require_digits("mean_over_ranks", leaf)
        _require_float(path, leaf)
    if weight is not None:
        weight = row_weight.valid(weight)
    if not axis.is_bound(axis_name) or not leaves:
        return jax.tree.unflatten(treedef, leaves)
    if weight is None:
        weight = step_context.default_weight(axis_name, "jdp.mean_over_ranks")
    # A float16 sum may pass 65504.
    if weight is None:
        average = functools.partial(lax.pmean, axis_name=axis.names(axis_name))
        means = _packed([*map(_wide, leaves)], average)
    else:
        weights = weighted_sum.weighting(weight, axis_name, mean=True)
        assert weights.forward is not None
        widest = jnp.promote_types(jnp.float32, weights.forward.dtype)
        wide = [leaf.astype(jnp.promote_types(leaf.dtype, widest)) for leaf in leaves]
        means = _packed(wide, lambda x: weighted_sum.summed(x, axis_name, weights))
    means = [mean.astype(leaf.dtype) for mean, leaf in zip(means, leaves, strict=True)]
    return jax.tree.unflatten(treedef, means)


_MOST_PACKED = 1024  # elements


def _packed(leaves: list[jax.Array], sum_all: Callable[[list], list]) -> list[jax.Array]:
    """Sum small leaves as one vector: XLA would merge one of two means with the gradients."""
    is_small = [x.size <= _MOST_PACKED and x.dtype == jnp.float32 for x in leaves]
    kinds = [_kind(x) if is_small[i] else i for i, x in enumerate(leaves)]
    groups = _grouped(kinds)
    sums = sum_all([_joined([leaves[i] for i in group]) for group in groups])
    return _parts(leaves, groups, sums)


def _kind(x: jax.Array) -> tuple:
    """Return what two leaves of one vector have in common, so that each part keeps its type."""
    return x.dtype, axis.varying_axes(x), jax_compat.batch_traces(x)


def _grouped(kinds: Iterable[Any]) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    for i, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(i)
    return [*groups.values()]


def _joined(leaves: list[jax.Array]) -> jax.Array:
    return leaves[0] if len(leaves) == 1 else jnp.concatenate([x.reshape(-1) for x in leaves])


def _parts(
    leaves: list[jax.Array], groups: list[list[int]], joined: list[jax.Array]
) -> list[jax.Array]:
    """Invert `_joined` for all groups."""
    found: dict[int, jax.Array] = {}
    for group, vector in zip(groups, joined, strict=True):
        ends = np.cumsum([leaves[i].size for i in group])[:-1]
        parts = jnp.split(vector, ends) if len(group) > 1 else [vector]
        found.update(
            (i, part.reshape(leaves[i].shape)) for i, part in zip(group, parts, strict=True)
        )
    return [found[i] for i in range(len(leaves))]


def sum_over_ranks(x: Any, *, axis_name: AxisName = "data") -> Any:
    """Sum a tree over ranks, for counts and histograms.

    Its gradient is exact, with the step's weights. A rank with rows of weight 0 in the step has no
    gradient.

    Args:
      x: tree of numeric arrays, any shapes; booleans count as 0 and 1.
      axis_name: the data axis.

    Returns:
      The tree of sums, equal on every rank; booleans and integers of fewer than 32 bits in int32 or
      uint32. Without a bound axis, `x`.

    Raises:
      TypeError: a leaf is a float of 8 bits or fewer, or a random key.
      RuntimeError: by a later call of the step, if the type of integers cannot hold their sum.
        Under a scan, vmap or jit in the step, or in your own `shard_map`, such a sum wraps around,
        as `jnp.sum` does.

    >>> import jax, jdp
    >>> jax.vmap(lambda x: sum_over_ranks(x), axis_name="data")(jax.numpy.arange(3))
    Array([3, 3, 3], dtype=int32)
    """
    for leaf in jax.tree.leaves(x):
        _require_digits("sum_over_ranks", leaf)
    leaves, treedef = jax.tree.flatten(x)
    sums = [*map(_wide, leaves)]
    if axis.is_bound(axis_name):
        sums = _summed(leaves, sums, axis_name)
    return treedef.unflatten(map(_float_like, sums, leaves))


def _summed(leaves: list[Any], wide: list[jax.Array], axis_name: AxisName) -> list[jax.Array]:
    step = _checking_step(axis_name)
    checked = [i for i, x in enumerate(leaves) if step and is_sum_checked(step, x)]
    weights = weighted_sum.weighting(None, axis_name, mean=False)
    terms = [*wide, *(upper_half(wide[i]) for i in checked)]
    sums = weighted_sum.summed(terms, axis_name, weights)
    sums, uppers = sums[: len(leaves)], sums[len(leaves) :]
    if step is not None:
        _report_overflow(step, [sums[i] for i in checked], uppers, axis_name)
    return sums


def max_over_ranks(x: Any, *, axis_name: AxisName = "data") -> Any:
    """Return the elementwise maximum of a tree over ranks; NaN if any rank has NaN.

    `lax.pmax` loses NaN on CPUs, and gives different results between processes. The gradient is
    exact, with the step's weights; ranks that share the maximum share it. To see which rows had
    NaN, return `jdp.rows(jnp.isnan(losses))`, and see `jdp.debug.first_nonfinite`.

    Args:
      x: tree of arrays of floats, integers or booleans, any shapes. A rank of weight 0 counts too:
        give padding the value -inf.
      axis_name: the data axis.

    Returns:
      The tree of maxima, in the dtypes of `x`, equal on every rank; 0.0 is greater than -0.0.
      Without a bound axis, `x`.

    Raises:
      TypeError: a leaf has no order: complex numbers, typed random keys.

    >>> import jax, jdp
    >>> jax.vmap(lambda x: max_over_ranks(x), axis_name="data")(jax.numpy.array([1, 3, 2]))
    Array([3, 3, 3], dtype=int32)
    """
    return _extremes_of(x, axis_name, "max_over_ranks")


def min_over_ranks(x: Any, *, axis_name: AxisName = "data") -> Any:
    """Return the elementwise minimum of a tree over ranks, see `max_over_ranks`.

    Args:
      x: tree of arrays of floats, integers or booleans, any shapes; give padding the value inf.
      axis_name: the data axis.

    Returns:
      The tree of minima, in the dtypes of `x`, equal on every rank; -0.0 is less than 0.0. Without
      a bound axis, `x`.

    Raises:
      TypeError: a leaf has no order: complex numbers, typed random keys.

    >>> import jax, jdp
    >>> x = jax.numpy.array([1.0, float("nan"), 2.0])
    >>> jax.vmap(lambda x: min_over_ranks(x), axis_name="data")(x)
    Array([nan, nan, nan], dtype=float32)
    """
    return _extremes_of(x, axis_name, "min_over_ranks")


def _extremes_of(x: Any, axis_name: AxisName, caller: str) -> Any:
    named, treedef = jax.tree_util.tree_flatten_with_path(x)
    leaves = [jnp.asarray(leaf) for _, leaf in named]
    for (path, _), leaf in zip(named, leaves, strict=True):
        _require_order(caller, path, leaf)
    if axis.is_bound(axis_name) and leaves:
        leaves = _extremes(leaves, axis_name, caller == "max_over_ranks")
    return jax.tree.unflatten(treedef, leaves)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _extremes(leaves: list[jax.Array], axis_name: AxisName, is_max: bool) -> list[jax.Array]:
    """One collective for each type of integers."""
    extreme = lax.pmax if is_max else lax.pmin
    integers = [_as_ordered_integers(leaf, is_max) for leaf in leaves]
    groups = _grouped(map(_kind, integers))
    names = axis.names(axis_name)
    joined = [extreme(_joined([integers[i] for i in group]), names) for group in groups]
    extremes = _parts(integers, groups, joined)
    return [_from_ordered(x, leaf.dtype) for x, leaf in zip(extremes, leaves, strict=True)]


@_extremes.defjvp
def _jvp_of_extremes(
    axis_name: AxisName, is_max: bool, primals: tuple, tangents: tuple
) -> tuple[list, list]:
    (leaves,), (slopes,) = primals, tangents
    extremes = _extremes(leaves, axis_name, is_max)
    slopes = list(slopes)
    floats = [i for i, each in enumerate(leaves) if jnp.issubdtype(each.dtype, jnp.inexact)]
    chosen = [(leaves[i] == extremes[i]) | jnp.isnan(leaves[i]) for i in floats]
    counts = sum_over_ranks(chosen, axis_name=axis_name)
    shares = [
        jnp.where(is_own, slopes[i] / count.astype(slopes[i].dtype), 0)
        for i, is_own, count in zip(floats, chosen, counts, strict=True)
    ]
    for i, slope in zip(floats, sum_over_ranks(shares, axis_name=axis_name), strict=True):
        slopes[i] = slope
    return extremes, slopes


def _as_ordered_integers(x: jax.Array, is_max: bool) -> jax.Array:
    """Return integers ordered like the values; NaN is the extreme."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return _wide(x)
    wide = x if pytrees.num_bits(x.dtype) >= 32 else x.astype(jnp.float32)
    bits = _reordered(lax.bitcast_convert_type(wide, f"int{8 * wide.dtype.itemsize}"))
    limits = jnp.iinfo(bits.dtype)
    return jnp.where(jnp.isnan(wide), limits.max if is_max else limits.min, bits)


def _from_ordered(x: jax.Array, dtype: Any) -> jax.Array:
    if not jnp.issubdtype(dtype, jnp.inexact):
        return x.astype(dtype)
    return lax.bitcast_convert_type(_reordered(x), f"float{8 * x.dtype.itemsize}").astype(dtype)


def _reordered(bits: jax.Array) -> jax.Array:
    """Flip all bits but the sign of negative floats; an involution."""
    limits = jnp.iinfo(bits.dtype)
    return jnp.where(bits < 0, bits ^ limits.max, bits)


def _wide(leaf: Any) -> jax.Array:
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.inexact):
        dtype = jnp.promote_types(dtype, jnp.float32)
    elif pytrees.num_bits(dtype) < 32:
        dtype = jnp.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int32
    return jnp.asarray(leaf).astype(dtype)


def _share(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.float32) if leaf.dtype == jnp.bool_ else leaf


def _float_like(total: jax.Array, leaf: Any) -> jax.Array:
    is_float = jnp.issubdtype(total.dtype, jnp.inexact)
    return total.astype(jnp.result_type(leaf)) if is_float else total


def _require_float(path: tuple, leaf: jax.Array) -> None:
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return
    where, of_tree = "", ""
    if path:
        where = f", at x{jax.tree_util.keystr(path)}"
        of_tree = (
            " Values equal on all ranks, such as a count of steps beside batch statistics, need "
            "no mean: jax.tree.map(lambda x: jdp.mean_over_ranks(x) if jnp.issubdtype(x.dtype, "
            "jnp.floating) else x, stats)."
        )
    raise TypeError(
        f"mean_over_ranks of {leaf.dtype}{list(leaf.shape)}{where}: the mean of integers is not "
        f"an integer. Write jdp.sum_over_ranks(x) for counts, or cast to float32.{of_tree}"
    )


def _require_order(caller: str, path: tuple, leaf: jax.Array) -> None:
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating) or pytrees.is_key(leaf):
        where = f", at x{jax.tree_util.keystr(path)}" if path else ""
        raise TypeError(
            f"{caller} of {leaf.dtype}{list(leaf.shape)}{where}: such values have no order.\n"
            "Write jnp.abs(x) for complex numbers, jax.random.key_data(x) for keys."
        )


def _require_digits(caller: str, leaf: Any) -> None:
    dtype = jnp.result_type(leaf)
    if pytrees.is_key(leaf):
        raise TypeError(
            f"{caller} of {dtype}{list(jnp.shape(leaf))}: random keys have no sum.\n"
            "Write jax.lax.all_gather(jax.random.key_data(x), axis_name) for those of all ranks."
        )
    if pytrees.is_tiny_float(dtype):
        raise TypeError(
            f"{caller} of {dtype}{list(jnp.shape(leaf))}: so few bits hold no sum of several "
            "ranks. Cast to float32 first."
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Per-row outputs of one rank, see `rows`."""

    values: Any
    num_dims: int = field(metadata={"static": True})  # of the values where they were marked


def rows(x: Any) -> Any:
    """Return per-row outputs from a step: predictions, losses of single rows, embeddings.

    Args:
      x: tree of arrays whose first dim is this rank's batch rows.

    Returns:
      The marked tree, to return among the metrics. The caller gets arrays whose first dim is the
      whole batch, in the batch's order.

    Raises:
      ValueError: a first dim is not the number of this rank's rows.

    >>> import jdp, jax.numpy as jnp
    >>> @jdp.eval_step
    ... def predict(params, batch):
    ...     return {"prediction": jdp.rows(batch["x"] * params)}
    """
    step = step_context.innermost()
    for leaf in jax.tree.leaves(x):
        shape = jnp.shape(leaf)
        if not shape or (step is not None and shape[0] != step.num_rows):
            raise ValueError(
                f"jdp.rows(x) got {jnp.result_type(leaf)}{list(shape)}, but the first dim of x "
                f"must be this rank's rows{'' if step is None else f', {step.num_rows} here'}, "
                "because jdp orders outputs by row. Return one value per batch without jdp.rows, "
                "or as jdp.sum_over_ranks(x)."
            )
    return jax.tree.map(lambda leaf: Rows(leaf, jnp.ndim(leaf)), x)


def is_rows(x: Any) -> bool:
    """Whether `rows` made a node of a tree."""
    return isinstance(x, Rows)


def batch_norm_statistics(
    x: jax.Array, mask: Any = None, *, feature_dim: int = -1, axis_name: AxisName = "data"
) -> tuple[jax.Array, jax.Array]:
    """Return mean and variance of each feature over all weighted rows of all ranks.

    The results are those of the whole batch for any number of ranks, and equal on every rank, so a
    state may keep them. Gradients are exact, with the step's weights. A rank with only padding
    contributes nothing. If no row counts, both results are 0. In micro-batches they are those of a
    micro-batch of all ranks.

    Args:
      x: `[rows, ..., features]` float, this rank's rows. Dims between (positions, pixels) count
        like rows.
      mask: `[rows]` or `[rows, positions]`, bool or float >= 0, the weights. Where it is 0, `x` may
        be NaN. Default: equal weights.
      feature_dim: the features' dim in `x`, 1 for `[rows, features, height, width]`.
      axis_name: the data axis.

    Returns:
      (mean, variance), each `[features]` in at least float32. The variance is that of the
      population: sum(w * (x - mean)**2) / sum(w). Without a bound axis, those of `x`.

    Raises:
      TypeError: `x` is not a float array.
      ValueError: `x` has fewer than 2 dims, or the mask does not fit its first dims.

    >>> import jax, jax.numpy as jnp
    >>> x = jnp.array([[[1.0], [3.0]], [[5.0], [jnp.nan]]])     # two rows for each of two ranks
    >>> mask = jnp.array([[True, True], [True, False]])
    >>> jax.vmap(batch_norm_statistics, axis_name="data")(x, mask)[0].tolist()
    [[3.0], [3.0]]
    """
    x = jnp.asarray(x)
    found = f"jdp.batch_norm_statistics(x) got x {x.dtype}{list(x.shape)}"
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{found}, and its dtype has no mean. Cast it to float32.")
    if x.ndim < 2:
        raise ValueError(f"{found}, but it needs a dim of rows and one of features.")
    x = jnp.moveaxis(x, feature_dim, -1)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    weight = _weights(x, mask, found)
    dims = tuple(range(x.ndim - 1))
    # A feature without weight may be NaN, as may its gradient.
    x = jnp.where(weight == 0, 0, x)
    count = jnp.broadcast_to(weight, (*x.shape[:-1], 1)).sum()
    total, count = sum_over_ranks(((weight * x).sum(dims), count), axis_name=axis_name)
    divisor = row_weight.divisor(count)
    # Deviations correct a mean that lost digits.
    shift = lax.stop_gradient(total / divisor)
    deviations = weight * (x - shift)
    sums = deviations.sum(dims), (deviations * (x - shift)).sum(dims)
    moved, squares = sum_over_ranks(sums, axis_name=axis_name)
    moved = moved / divisor
    return shift + moved, jnp.maximum(squares / divisor - moved**2, 0)


def _weights(x: jax.Array, mask: Any, found: str) -> jax.Array:
    mask = jnp.ones(x.shape[:1], x.dtype) if mask is None else jnp.asarray(mask)
    if not 0 < mask.ndim < x.ndim or mask.shape != x.shape[: mask.ndim]:
        raise ValueError(
            f"{found} and a mask {mask.dtype}{list(mask.shape)}. A mask needs one number per "
            f"row, {list(x.shape[:1])}, or one per position of a row, without the features."
        )
    weight = lax.stop_gradient(mask.astype(x.dtype))
    return weight.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))
