"""Means, sums and extremes over ranks, and outputs for each row, as authors write them in steps."""

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdp import axis, pytrees
from jdp.axis import AxisName
from jdp.reduction import integer_sums, row_weight, step_context, weighted_sum


def mean_over_ranks(
    x: Any, *, weight: jax.Array | None = None, axis_name: AxisName = "data"
) -> Any:
    """Average a tree over ranks; what comes back is the same on every rank.

    Ordinary arrays, usable at once: in a `lax.cond`, as batch statistics, as a target. Inside a
    loss its gradient is exact, with the weights of the step, too. As the loss itself use
    `global_mean`, since each rank's gradient through this one is only its own.

    Args:
      x: tree of float arrays, any shapes; booleans count as 0.0 and 1.0: their share of the ranks.
      weight: `[]`, >= 0, how much this rank's value counts; a rank of weight 0 contributes
        nothing, even NaN. Default: that of the step (`train_step(weight=...)`), else equal. A rank
        whose rows weigh nothing in the step has no gradient, whatever it weighs here. In a
        `shard_map` of your own the gradient through this mean is that of ranks that count
        equally: jdp cannot know there that `sync_gradients(weight=...)` follows.
      axis_name: the data axis.

    Returns:
      The tree of sum(w * x) / sum(w), in the dtypes of `x`, of booleans in float32. Where no axis
      is bound, `x`.

    Raises:
      TypeError: if a leaf is an integer: sum it (`sum_over_ranks`) or cast it.
      ValueError: if `axis_name` is a part of the axes of a step with a weight, and `weight` is not
        given.

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
    # Summed in at least float32: these are few bytes, and a float16 sum may pass 65504.
    if weight is None:
        means = lax.pmean([*map(_wide, leaves)], axis.names(axis_name))
    else:
        weights = weighted_sum.weighting(weight, axis_name, mean=True)
        assert weights.forward is not None
        widest = jnp.promote_types(jnp.float32, weights.forward.dtype)
        wide = [leaf.astype(jnp.promote_types(leaf.dtype, widest)) for leaf in leaves]
        means = weighted_sum.summed(wide, axis_name, weights)
    means = [mean.astype(leaf.dtype) for mean, leaf in zip(means, leaves, strict=True)]
    return jax.tree.unflatten(treedef, means)


def sum_over_ranks(x: Any, *, axis_name: AxisName = "data") -> Any:
    """Sum a tree over ranks, for counts and histograms.

    Its gradient is exact, with the weights of the step, too; a rank whose rows weigh nothing in
    the step has none.

    Args:
      x: tree of numeric arrays, any shapes; booleans count as 0 and 1.
      axis_name: the data axis.

    Returns:
      The tree of sums, the same on every rank, booleans and integers of fewer than 32 bits in
      int32 or uint32. Where no axis is bound, `x`.

    Raises:
      TypeError: if a leaf is a float of 8 bits or fewer, or a random key.
      RuntimeError: by a later call of the step, if integers have a sum that their type cannot hold.
        Under a scan, vmap or jit in the step, or in a `shard_map` of your own, such a sum wraps
        around, as `jnp.sum` does.

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
    step = integer_sums.checking_step(axis_name)
    checked = [i for i, x in enumerate(leaves) if step and integer_sums.is_checked(step, x)]
    weights = weighted_sum.weighting(None, axis_name, mean=False)
    terms = [*wide, *(integer_sums.upper_half(wide[i]) for i in checked)]
    sums = weighted_sum.summed(terms, axis_name, weights)
    sums, uppers = sums[: len(leaves)], sums[len(leaves) :]
    if step is not None:
        integer_sums.report(step, [sums[i] for i in checked], uppers, axis_name)
    return sums


def max_over_ranks(x: Any, *, axis_name: AxisName = "data") -> Any:
    """Return the elementwise maximum of a tree over ranks; a NaN of any rank is the result.

    `lax.pmax` loses NaN on CPUs, and between processes returns another number for another rank of
    the NaN. The gradient is exact, with the weights of the step, too: ranks that share the maximum
    share the gradient.

    Args:
      x: tree of arrays of floats, integers or booleans, any shapes. A rank of weight 0 counts too:
        give padding the value -inf.
      axis_name: the data axis.

    Returns:
      The tree of maxima, in the dtypes of `x`, the same on every rank; 0.0 is greater than -0.0.
      Where no axis is bound, `x`.

    Raises:
      TypeError: if a leaf has no order: complex numbers, typed random keys.

    >>> import jax, jdp
    >>> jax.vmap(lambda x: max_over_ranks(x), axis_name="data")(jax.numpy.array([1, 3, 2]))
    Array([3, 3, 3], dtype=int32)
    """
    return _extremes_of(x, axis_name, "max_over_ranks")


def min_over_ranks(x: Any, *, axis_name: AxisName = "data") -> Any:
    """Return the elementwise minimum of a tree over ranks, as `max_over_ranks` the maximum.

    Args:
      x: tree of arrays of floats, integers or booleans, any shapes. A rank of weight 0 counts too:
        give padding the value inf.
      axis_name: the data axis.

    Returns:
      The tree of minima, in the dtypes of `x`, the same on every rank; -0.0 is less than 0.0. Where
      no axis is bound, `x`.

    Raises:
      TypeError: if a leaf has no order: complex numbers, typed random keys.

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
    """Return the maxima or minima of arrays over ranks, in one collective for each integer type."""
    extreme = lax.pmax if is_max else lax.pmin
    integers = [_as_ordered_integers(leaf, is_max) for leaf in leaves]
    extremes: list[Any] = [None] * len(leaves)
    for dtype in dict.fromkeys(each.dtype for each in integers):
        chosen = [i for i, each in enumerate(integers) if each.dtype == dtype]
        flat = extreme(
            jnp.concatenate([integers[i].ravel() for i in chosen]), axis.names(axis_name)
        )
        ends = np.cumsum([leaves[i].size for i in chosen])[:-1]
        for i, part in zip(chosen, jnp.split(flat, ends), strict=True):
            extremes[i] = _from_ordered(part.reshape(leaves[i].shape), leaves[i].dtype)
    return extremes


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
    """Return integers in the order of the values; NaN is the greatest, or least for a minimum."""
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
    """Flip the bits of a negative float but for its sign; the same again undoes it."""
    limits = jnp.iinfo(bits.dtype)
    return jnp.where(bits < 0, bits ^ limits.max, bits)


def _wide(leaf: Any) -> jax.Array:
    """Return a term of a sum in a dtype that holds the sum, or takes it with more digits."""
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
            " One that all ranks have the same, such as a count of steps beside batch statistics, "
            "needs no mean: jax.tree.map(lambda x: jdp.mean_over_ranks(x) if "
            "jnp.issubdtype(x.dtype, jnp.floating) else x, stats)."
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
    """Per-row outputs of one rank, made by `rows`."""

    values: Any
    num_dims: int = field(metadata={"static": True})  # of the values where they were marked


def rows(x: Any) -> Any:
    """Return per-row outputs from a step: predictions, losses of single rows, embeddings.

    Args:
      x: tree of arrays whose first dim is this rank's rows of the batch.

    Returns:
      The tree, marked. Hand it out among the metrics: the caller gets arrays whose first dim is
      the whole batch, in the order of the batch.

    Raises:
      ValueError: if a first dim is not the number of this rank's rows.

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
                f"must be this rank's rows{'' if step is None else f', {step.num_rows} here'}: "
                "outputs are put in the order of the rows. Return one value per batch without "
                "jdp.rows, or as jdp.sum_over_ranks(x)."
            )
    return jax.tree.map(lambda leaf: Rows(leaf, jnp.ndim(leaf)), x)


def is_rows(x: Any) -> bool:
    """Whether a node of a tree was made by `rows`."""
    return isinstance(x, Rows)
