"""Values that a step reports: means, sums and rows over all ranks."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax import lax

from jdp import axis, collectives, pytrees
from jdp.axis import AxisName
from jdp.reduction import row_weight, step_context, weighted_sum


def mean_over_ranks(
    x: Any, *, weight: jax.Array | None = None, axis_name: AxisName = "data"
) -> Any:
    """Average a tree over ranks; what comes back is the same on every rank.

    Ordinary arrays, usable at once: in a `lax.cond`, as batch statistics, as a target. Inside a
    loss its gradient is exact, with the weights of the step, too. As the loss itself use
    `global_mean`, since each rank's gradient through this one is only its own.

    Args:
      x: tree of float arrays, any shapes.
      weight: `[]`, >= 0, how much this rank's value counts; a rank of weight 0 contributes
        nothing, even NaN. Default: that of the step (`train_step(weight=...)`), else equal. A rank
        whose rows weigh nothing in the step has no gradient, whatever it weighs here. In a
        `shard_map` of your own the gradient through this mean is that of ranks that count
        equally: jdp cannot know there that `sync_gradients(weight=...)` follows.
      axis_name: the data axis.

    Returns:
      The tree of sum(w * x) / sum(w), in the dtypes of `x`. Where no axis is bound, `x`.

    Raises:
      TypeError: if a leaf is not a float: sum it (`sum_over_ranks`) or cast it.
      ValueError: if `axis_name` is a part of the axes of a step with a weight, and `weight` is not
        given.

    >>> import jax, jdp
    >>> jax.vmap(lambda x: mean_over_ranks(x), axis_name="data")(jax.numpy.arange(4.0))
    Array([1.5, 1.5, 1.5, 1.5], dtype=float32)
    """
    leaves, treedef = jax.tree.flatten(x)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    for leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise TypeError(
                f"mean_over_ranks of {leaf.dtype}{list(leaf.shape)}: the mean of integers is not "
                "an integer. Write jdp.sum_over_ranks(x) for counts, or cast to float32."
            )
        _require_digits("mean_over_ranks", leaf)
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
      TypeError: if a leaf is a float of 8 bits or fewer.

    >>> import jax, jdp
    >>> jax.vmap(lambda x: sum_over_ranks(x), axis_name="data")(jax.numpy.arange(3))
    Array([3, 3, 3], dtype=int32)
    """
    for leaf in jax.tree.leaves(x):
        _require_digits("sum_over_ranks", leaf)
    wide = jax.tree.map(_wide, x)
    if axis.is_bound(axis_name):
        weights = weighted_sum.weighting(None, axis_name, mean=False)
        wide = weighted_sum.summed(wide, axis_name, weights)
    return jax.tree.map(_float_like, wide, x)


def _wide(leaf: Any) -> jax.Array:
    """Return a term of a sum in a dtype that holds the sum, or takes it with more digits."""
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.inexact):
        dtype = jnp.promote_types(dtype, jnp.float32)
    elif pytrees.num_bits(dtype) < 32:
        dtype = jnp.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int32
    return jnp.asarray(leaf).astype(dtype)


def _float_like(total: jax.Array, leaf: Any) -> jax.Array:
    is_float = jnp.issubdtype(total.dtype, jnp.inexact)
    return total.astype(jnp.result_type(leaf)) if is_float else total


def _require_digits(caller: str, leaf: Any) -> None:
    dtype = jnp.result_type(leaf)
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


def take_rows(tree: Any) -> tuple[Any, list[jax.Array]]:
    """Take the values of `rows` out of a tree; `pytrees.put_nodes` puts them back.

    Raises:
      ValueError: if a scan or vmap has stacked them since: rows are no longer their first dim.
    """
    for leaf in jax.tree.leaves(tree, is_leaf=is_rows):
        if is_rows(leaf) and jnp.ndim(leaf.values) != leaf.num_dims:
            raise ValueError(
                f"jdp.rows(x) marked an array of {leaf.num_dims} dim(s), and a scan or vmap "
                f"stacked it to {jnp.result_type(leaf.values)}{list(jnp.shape(leaf.values))}: its "
                "first dim is no longer this rank's rows, so that the outputs cannot be put in the "
                "order of the rows. Return x itself from the scan or vmap, move its rows to the "
                "first dim, and return jdp.rows(x) from the step."
            )
    return pytrees.take_nodes(tree, is_rows)


def unmarked(tree: Any) -> Any:
    """Replace every `rows` of a tree by its plain array."""
    return jax.tree.map(lambda x: x.values if is_rows(x) else x, tree, is_leaf=is_rows)


def is_rows(x: Any) -> bool:
    """Whether a node of a tree was made by `rows`."""
    return isinstance(x, Rows)


def require_numbers(tree: Any) -> None:
    """Refuse metrics that a compiled step cannot return.

    Raises:
      TypeError: naming the first one that is not an array or a number, or is a float scalar of 8
        bits or fewer.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not pytrees.is_array(leaf) and not hasattr(leaf, "__jax_array__"):
            raise TypeError(
                f"`metrics{jax.tree_util.keystr(path)}` is {leaf!r}, of type "
                f"{type(leaf).__name__}, but a compiled step returns only arrays and numbers. "
                "Leave it out, and add it to the metrics after the call of the step."
            )
        if not jnp.shape(leaf) and pytrees.is_tiny_float(jnp.result_type(leaf)):
            raise TypeError(
                f"`metrics{jax.tree_util.keystr(path)}` is {jnp.result_type(leaf)}[], but float "
                "scalars are averaged over ranks, and 8 bits are too few for a mean. Cast it to "
                "float32."
            )


def float_scalars(tree: Any) -> list[jax.Array]:
    """Return the leaves that `averaged` averages."""
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if _is_float_scalar(leaf)]


def with_own(tree: Any, own: Sequence[jax.Array], is_uniform: Sequence[bool]) -> Any:
    """Put back what was the same on every rank before it was averaged, to the bit.

    Args:
      tree: what `averaged` gave.
      own: the `float_scalars` of what it was given.
      is_uniform: which of those are the same on every rank.
    """
    left = iter(zip(own, is_uniform, strict=True))

    def chosen(leaf: jax.Array) -> jax.Array:
        if not _is_float_scalar(leaf):
            return leaf
        value, stays = next(left)
        return value if stays else leaf

    return jax.tree.map(chosen, tree)


def _is_float_scalar(leaf: Any) -> bool:
    return not jnp.shape(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def averaged_and_summed(tree: Any, axis_name: AxisName, summed: jax.Array) -> tuple[Any, jax.Array]:
    """Average a tree as `averaged` does, and sum a vector over ranks, all by one collective.

    Args:
      tree: metrics of one rank; python floats count as arrays.
      axis_name: the data axis of the step being traced.
      summed: `[k]` float32, whole numbers whose sum float32 holds.
    """
    sums: list[jax.Array] = []

    def together(x: jax.Array) -> jax.Array:
        means, total = _averaged_with(x.reshape(-1), summed, axis_name)
        sums.append(total)
        return means.reshape(x.shape)

    tree = averaged(tree, axis_name, together)
    if not sums:
        together(jnp.zeros(0, jnp.float32))
    return tree, sums[0]


def averaged(
    tree: Any, axis_name: AxisName, average: Callable[[jax.Array], jax.Array] | None = None
) -> Any:
    """Average the float scalars of a tree, all by one collective; keep the other leaves.

    Args:
      tree: metrics of one rank; python floats count as arrays.
      axis_name: the data axis of the step being traced.
      average: averages an array. Default: as the gradients went.
    """
    average = average or functools.partial(_like_gradients, axis_name=axis_name)
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    is_scalar = [_is_float_scalar(x) for x in leaves]
    scalars = [x for x, chosen in zip(leaves, is_scalar, strict=True) if chosen]
    if not scalars:
        return jax.tree.unflatten(treedef, leaves)
    if len(scalars) > 1:
        widest = jnp.result_type(jnp.float32, *(x.dtype for x in scalars))
        together = jnp.stack([x.astype(widest) for x in scalars])
        means = iter(average(together))
    else:  # most steps report a loss, and a stack takes a while to trace
        means = iter([average(scalars[0])])
    return jax.tree.unflatten(
        treedef,
        [
            next(means).astype(x.dtype) if chosen else x
            for x, chosen in zip(leaves, is_scalar, strict=True)
        ],
    )


# As the gradients went: a collective of XLA's beside jdp's own costs a wake-up of all ranks on CPU,
# and on GPU the first JAX puts off all reductions to hide that one.
def _like_gradients(x: jax.Array, axis_name: AxisName) -> jax.Array:
    step, before = _last_reduction(axis_name)
    if step is None or before is None:
        return mean_over_ranks(x, axis_name=axis_name)
    wide, scale = x.astype(jnp.promote_types(x.dtype, jnp.float32)), 1.0 / axis.size(axis_name)
    if step.weight is not None:
        wide, scale = step_context.weighed(wide, step_context.share_of(step.weight, axis_name)), 1.0
    axes = axis.names(axis_name)
    ((mean,),) = before.all_reduce([[wide]], axes, scale=scale, mesh=step.mesh)
    return mean.astype(x.dtype)


def _averaged_with(
    x: jax.Array, summed: jax.Array, axis_name: AxisName
) -> tuple[jax.Array, jax.Array]:
    step, before = _last_reduction(axis_name)
    wide, scale = x.astype(jnp.promote_types(x.dtype, jnp.float32)), 1.0 / axis.size(axis_name)
    if step is not None and step.weight is not None:
        wide, scale = step_context.weighed(wide, step_context.share_of(step.weight, axis_name)), 1.0
    together, axes = jnp.concatenate([wide, summed.astype(wide.dtype)]), axis.names(axis_name)
    if step is None or before is None:
        total = lax.psum(together, axes)
    else:
        ((total,),) = before.all_reduce([[together]], axes, scale=1.0, mesh=step.mesh)
    return (total[: x.size] * scale).astype(x.dtype), total[x.size :]


def _last_reduction(
    axis_name: AxisName,
) -> tuple[step_context.Scope | None, step_context.Reduction | None]:
    step = step_context.current(axis_name)
    before = step.reductions[-1] if step is not None and step.reductions else None
    if before is not None and not (_is_exact(before.all_reduce) and _is_here(before.trace)):
        before = None
    return step, before


def _is_exact(all_reduce: Any) -> bool:
    # One of the author's own may round what it sends, as gradients may be rounded.
    while isinstance(all_reduce, functools.partial):
        all_reduce = all_reduce.func
    return all_reduce in collectives.ALGORITHMS


def _is_here(trace: Any) -> bool:
    return trace == jax.extend.core.get_opaque_trace_state()
