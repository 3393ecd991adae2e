"""`sync_gradients`: the mean of local gradients over ranks."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.sharding import Mesh

from jdp import axis, collectives, pytrees
from jdp.analysis.marks import ALL_REDUCED, MEAN, OWN_WEIGHT, SUMMED, mark
from jdp.axis import AxisName
from jdp.collectives import AllReduce, buckets
from jdp.reduction import (
    bucket_order,
    declared_reductions,
    mixed_precision,
    nonfinite,
    row_weight,
    shard_registry,
    step_context,
    step_metrics,
    weighted_sum,
)
from jdp.reduction.step_context import Reduction, Scope


def _require_local(paths: Sequence[str], leaves: Sequence[jax.Array], axis_name: AxisName) -> None:
    if not axis.is_typed(axis_name):
        return
    for path, leaf in zip(paths, leaves, strict=True):
        if not set(axis.names(axis_name)) <= axis.varying_axes(leaf):
            raise ValueError(
                f"the gradient `grads{path}` {leaf.dtype}{list(leaf.shape)} was already summed "
                f"over {axis_name!r} by JAX, as shard_map(check_vma=True) does for unvarying "
                f"parameters. Averaged now it would be {axis.size(axis_name)} times too large. "
                "Write jdp.value_and_grad(loss_fn)(params, batch), which keeps it local."
            )


def require_unreduced(paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Refuse gradients known to be means over ranks."""
    means = shard_registry.means()
    for path, leaf in zip(paths, leaves, strict=True):
        if id(leaf) in means:
            raise ValueError(
                f"the gradient `grads{path}` is already the mean over ranks. With "
                "jdp.sharded(stage=2) or stage=3, jdp.value_and_grad averages by the weight of "
                "the step, so another weight= or mean=False would not apply. Write "
                "jdp.train_step(weight=...), or jax.value_and_grad, which keeps gradients local."
            )


# No effect on `collectives.xla` on CPU, where XLA merges all psums; a guess for GPUs.
BUCKET_BYTES = 4 * buckets.MiB


def sync_gradients(
    grads: Any,
    *,
    weight: jax.Array | None = None,
    axis_name: AxisName = "data",
    all_reduce: AllReduce = collectives.auto,
    bucket_bytes: int = BUCKET_BYTES,
    mean: bool = True,
    mesh: Mesh | None = None,
    reduce_dtype: Any = None,
) -> Any:
    """Average a tree of gradients over ranks, in buckets, last leaf first.

    `replicated(tx)` calls it. Call it for a metric of the mean gradient, followed by
    `state.apply_gradients(grads, synced=True)`, or in your own `shard_map` or `pmap`.

    Args:
      grads: tree of complex arrays, or floats of at least 16 bits: each rank's own gradient of its
        rows' mean loss.
      weight: `[]`, >= 0, of this rank's rows, such as `mask.sum()`; weight 0 drops even NaN.
        Default: that of the step (`train_step(weight=...)`), else equal. A step with another weight
        is refused if its loss has means or sums over ranks, whose gradients use the default.
      axis_name: the data axis: a name, or a tuple of names.
      all_reduce: the algorithm, from `jdp.collectives`.
      bucket_bytes: capacity of one bucket in bytes, > 0. Leaves are not split.
      mean: divide by the number of ranks, or by the sum of weights; False gives sum(w * g).
      mesh: the mesh, for your own `shard_map` on several processes, so `collectives.auto` knows
        which share a host.
      reduce_dtype: float dtype of sent gradients, such as `jnp.bfloat16`; results keep their own.
        Default: their own, as for complex gradients.

    Returns:
      A tree like `grads`, with equal bits on every rank. Means of `value_and_grad` stay unchanged,
      and Flax's `_overwrite_with_gradient` has the maximum over ranks.

    Raises:
      ValueError: JAX has already summed a leaf (in a `shard_map` with check_vma=True); only another
        axis is bound; `axis_name` is a part of a weighted step's axes, without `weight`.
      TypeError: a leaf is an integer, float0 or float8 gradient, or `bucket_bytes` not an
        integer.

    >>> import jax, jax.numpy as jnp, jdp
    >>> local = {"w": jnp.array([[1.0, 2.0], [3.0, 6.0]])}        # a row for each of two ranks
    >>> jax.vmap(jdp.sync_gradients, axis_name="data")(local)["w"]
    Array([[2., 4.],
           [2., 4.]], dtype=float32)
    """
    buckets.plan([], bucket_bytes)  # Refuses a wrong size, also without a bound axis.
    named, treedef = jax.tree_util.tree_flatten_with_path(grads)
    known = shard_registry.means() if weight is None and mean else {}
    left = [i for i, (_, leaf) in enumerate(named) if id(leaf) not in known]
    if maxima := {i: "max" for i in left if pytrees.is_overwritten(named[i][0])}:
        combined = declared_reductions.over_ranks(grads, maxima, axis_name)
        named = jax.tree_util.tree_leaves_with_path(combined)
        left = [i for i in left if i not in maxima]
    means = reduced(
        [jax.tree_util.keystr(named[i][0]) for i in left],
        [named[i][1] for i in left],
        weight=weight,
        axis_name=axis_name,
        all_reduce=all_reduce,
        bucket_bytes=bucket_bytes,
        mean=mean,
        mesh=mesh,
        reduce_dtype=mixed_precision.float_dtype("reduce_dtype", reduce_dtype),
    )
    found = dict(zip(left, means, strict=True))
    return treedef.unflatten([found.get(i, leaf) for i, (_, leaf) in enumerate(named)])


def reduced(
    paths: Sequence[str],
    leaves: Sequence[Any],
    *,
    weight: jax.Array | None = None,
    axis_name: AxisName,
    all_reduce: AllReduce,
    bucket_bytes: int,
    mean: bool,
    mesh: Mesh | None = None,
    reduce_dtype: Any = None,
) -> list[jax.Array]:
    """Return the means of gradients; see `sync_gradients`."""
    leaves = _checked(paths, leaves, axis_name, is_mean_of_step=weight is None and mean)
    bound, step = axis.is_bound(axis_name), step_context.current(axis_name)
    weight = _valid_weight(weight, axis_name)
    to_send = bucket_order.to_send(paths, step, weight, mean)
    leaves = _marked(paths, leaves, step, weight, axis_name)
    weights, scale = weighted_sum.factors(weight, axis_name, mean=mean)
    for i in to_send:  # Divided before the sum, or float16 would overflow.
        leaves[i] = weights.term(leaves[i])
    axes = axis.in_mesh_order(axis_name)
    if step is not None and not collectives.starts_when_ready(all_reduce, step.mesh):
        watched = nonfinite.watch(step, [leaves[i] for i in to_send])
        for i, leaf in zip(to_send, watched, strict=True):
            leaves[i] = leaf
    if bound and step is not None and is_alone(axes, all_reduce):
        leaves = [mark(leaf, kind=ALL_REDUCED, path="", axes=axes) for leaf in leaves]
    elif bound:
        mesh = mesh_of_step(axes) if mesh is None else mesh
        if step is not None and collectives.starts_when_ready(all_reduce, mesh):
            to_send = bucket_order.as_ready(paths, to_send, step)
        sent = [mixed_precision.cast(leaves[i], reduce_dtype) for i in to_send]
        losses = step_metrics.take_means(step, weight, all_reduce, mesh) if mean and sent else []
        along = [weights.term(x) for x in step_metrics.packed_means(losses)]
        reduce = functools.partial(all_reduce, scale=scale, mesh=mesh)
        with weights.named():
            sums = buckets.summed(sent, bucket_bytes, reduce, axes, along)
        for i, value in zip(to_send, sums, strict=False):
            if reduce_dtype is not None:
                value = mixed_precision.cast(value, leaves[i].dtype)
            leaves[i] = weights.total(value)
        step_metrics.record_means(step, losses, [weights.total(x) for x in sums[len(sent) :]])
        record(step, all_reduce, sent)
    return _marked_total(leaves, weight, axes, mean=mean) if bound else leaves


def _checked(
    paths: Sequence[str], leaves: Sequence[Any], axis_name: AxisName, *, is_mean_of_step: bool
) -> list[jax.Array]:
    floats = [require_float(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    # A jdp step is never typed, and asking takes time.
    if axis.is_bound(axis_name) and step_context.current(axis_name) is None:
        _require_local(paths, floats, axis_name)
    if not is_mean_of_step:
        require_unreduced(paths, floats)
    return floats


def is_alone(axes: tuple[str, ...], all_reduce: AllReduce) -> bool:
    """Whether one rank needs no call of a jdp algorithm, and no copies of XLA's psum."""
    return axis.size(axes) == 1 and all_reduce in collectives.ALGORITHMS


def mesh_of_step(axes: tuple[str, ...]) -> Mesh | None:
    """Return the mesh of the traced step, or None."""
    around = step_context.around(axes)  # also for some of the step's axes
    return None if around is None else around.mesh


def _valid_weight(weight: jax.Array | None, axis_name: AxisName) -> jax.Array | None:
    if weight is not None:
        return row_weight.valid(weight)
    return step_context.default_weight(axis_name, "jdp.sync_gradients")


def _marked(
    paths: Sequence[str],
    leaves: list[jax.Array],
    step: Scope | None,
    weight: jax.Array | None,
    axis_name: AxisName,
) -> list[jax.Array]:
    axes = axis.in_mesh_order(axis_name)
    named = zip(paths, leaves, strict=True)
    leaves = [mark(leaf, kind="local", path=path, axes=axes) for path, leaf in named]
    if step is None:
        return leaves
    step.marked.update(paths)
    if weight is not None and weight is not step.weight:
        own = {"kind": OWN_WEIGHT, "axes": axes}
        leaves = [mark(x, path=path, **own) for path, x in zip(paths, leaves, strict=True)]
    return leaves


def record(step: Scope | None, all_reduce: AllReduce, leaves: Sequence[jax.Array]) -> None:
    """Record the step's reduction."""
    if step is None:
        return
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    trace = jax.extend.core.get_opaque_trace_state()
    step.reductions.append(Reduction(all_reduce, trace, num_bytes))


def _marked_total(
    leaves: list[jax.Array], weight: jax.Array | None, axes: tuple[str, ...], *, mean: bool
) -> list[jax.Array]:
    """Mark reduced gradients if the analysis cannot see that they are means."""
    if not mean:
        return [mark(leaf, kind=SUMMED, path="", axes=axes) for leaf in leaves]
    if weight is None and axis.size(axes) == 1:  # no division shows it
        return [mark(leaf, kind=MEAN, path="", axes=axes) for leaf in leaves]
    return leaves


def require_float(path: str, leaf: Any) -> jax.Array:
    """Return an array; refuse a gradient without a mean."""
    dtype = leaf.dtype if isinstance(leaf, jax.Array) else jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 16:
        return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    name = "float0" if dtype == jax.dtypes.float0 else dtype
    found = f"the gradient `grads{path}` is {name}{list(jnp.shape(leaf))}"
    if jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{found}, and a sum over ranks in fewer than 16 bits rounds small gradients to 0. "
            f"Keep the parameter in float32 or bfloat16, and cast it to {dtype} in the loss."
        )
    raise TypeError(
        f"{found}, but only float gradients can be averaged. Differentiate with respect to float "
        "leaves; TrainState leaves integer parameters unchanged."
    )
