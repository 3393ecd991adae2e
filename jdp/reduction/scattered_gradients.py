"""Gradients for sharded optimizers: reduced, and split over the ranks."""

from collections.abc import Sequence
from typing import Any

import jax

from jdp import axis, collectives
from jdp.analysis.marks import LOCAL, MEAN, SHARD, SUMMED, mark
from jdp.axis import FurtherSpec
from jdp.collectives import buckets, shards
from jdp.reduction import (
    gradients,
    mixed_precision,
    nonfinite,
    shard_registry,
    step_context,
    step_metrics,
    weighted_sum,
)
from jdp.reduction.optimizer import Sharded

# They sum as a native reduce-scatter does.
_AS_SCATTERED = (collectives.auto, collectives.native)
# Of whole leaves a process reads those of every other process, in an all-reduce only its share.
_MAX_WHOLE_BYTES = 2**16


def takes_along(leaves: Sequence[Any], tx: Sharded) -> bool:
    """Whether the calls that scatter gradients also reduce whole ones."""
    step = step_context.current(tx.axis_name)
    if step is None or tx.sharding.all_reduce not in _AS_SCATTERED:
        return False
    every = axis.in_mesh_order(tx.axis_name)
    # The sum of shards over further axes rounds twice in 16 bits.
    if axis.in_mesh_order(tx.sharding.axes or every) != every:
        return False
    num_bytes = sum(x.size * (tx.reduce_dtype or x.dtype).itemsize for x in leaves)
    return num_bytes <= _MAX_WHOLE_BYTES and shards.is_native(every, step.mesh)


def scattered(
    paths: Sequence[str],
    leaves: Sequence[jax.Array],
    dims: Sequence[int | None],
    tx: Sharded,
    further: Sequence[FurtherSpec],
) -> list[jax.Array]:
    """Return this rank's slices of local gradients' means."""
    sharding = tx.sharding
    every = axis.in_mesh_order(tx.axis_name)
    over = axis.in_mesh_order(sharding.axes or every)
    step = step_context.current(tx.axis_name)
    assert step is not None
    step.marked.update(paths)
    weight = step_context.default_weight(tx.axis_name, "jdp.sharded")
    weights, scale = weighted_sum.factors(weight, tx.axis_name, mean=sharding.mean)
    named = zip(paths, leaves, strict=True)
    local = [mark(leaf, kind=LOCAL, path=path, axes=every) for path, leaf in named]
    uniform = (step.choices.uniform if sharding.mean else None) or frozenset()
    found = {
        i: value if dim is None else shard_registry.own(value, dim, over)
        for i, (path, value, dim) in enumerate(zip(paths, local, dims, strict=True))
        if path in uniform
    }
    to_send = [i for i in range(len(local)) if i not in found]
    terms = [mixed_precision.cast(weights.term(local[i]), tx.reduce_dtype) for i in to_send]
    terms = nonfinite.watch(step, terms)
    # XLA sends a loss with the whole gradients.
    takes = bool(terms) and sharding.mean and shards.is_native(over, step.mesh)
    losses = step_metrics.take_means(step, weight, sharding.all_reduce, step.mesh) if takes else []
    along = [weights.term(x) for x in step_metrics.packed_means(losses)]
    with weights.named():
        own = [dims[i] for i in to_send], [further[i] for i in to_send]
        sums = _summed(terms, along, *own, scale, tx)
    for i, part in zip(to_send, sums, strict=False):
        part = weights.total(mixed_precision.cast(part, local[i].dtype))
        if dims[i] is not None:
            part = proved(part, every, mean=sharding.mean)
        elif not sharding.mean:
            part = mark(part, kind=SUMMED, path="", axes=every)
        found[i] = part
    step_metrics.record_means(step, losses, [weights.total(x) for x in sums[len(terms) :]])
    gradients.record(step, sharding.all_reduce, terms)
    return [found[i] for i in range(len(local))]


def _summed(
    terms: Sequence[jax.Array],
    along: Sequence[jax.Array],
    dims: Sequence[int | None],
    further: Sequence[FurtherSpec],
    scale: Any,
    tx: Sharded,
) -> list[jax.Array]:
    every = axis.in_mesh_order(tx.axis_name)
    over = axis.in_mesh_order(tx.sharding.axes or every)
    others = tuple(name for name in every if name not in over)
    step = step_context.current(tx.axis_name)
    mesh = None if step is None else step.mesh
    plan = buckets.plan_with(terms, tx.sharding.bucket_bytes, along)
    leaves, dims = [*terms, *along], [*dims, *[None] * len(along)]
    further = [*further, *[()] * len(along)]
    send = [[leaves[i] for i in bucket] for bucket in plan]
    places = [[dims[i] for i in bucket] for bucket in plan]
    specs = [[further[i] for i in bucket] for bucket in plan]
    options = {"mesh": mesh, "further": specs, "all_reduce": tx.sharding.all_reduce}
    sums = shards.reduce_scatter(send, places, over, scale=scale, **options)
    if others:
        sums = [axis.psum(parts, others, axis.platform(mesh)) for parts in sums]
    return buckets.in_order(sums, plan)


def proved(part: jax.Array, axes: tuple[str, ...], *, mean: bool) -> jax.Array:
    """Mark a shard of a mean or sum for the proof."""
    part = mark(part, kind=SHARD, path="", axes=axes)
    return mark(part, kind=MEAN if mean else SUMMED, path="", axes=axes)
