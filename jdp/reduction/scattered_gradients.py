"""Gradients of parameters whose optimizer is sharded: reduced, and split over the ranks."""

from collections.abc import Sequence

import jax

from jdp import axis
from jdp.analysis.marks import LOCAL, MEAN, SHARD, SUMMED, mark
from jdp.collectives import buckets, shards
from jdp.reduction import gradients, known_shards, mixed_precision, step_context, weighted_sum
from jdp.reduction.sharding import Sharded


def scattered(
    paths: Sequence[str], leaves: Sequence[jax.Array], dims: Sequence[int], tx: Sharded
) -> list[jax.Array]:
    """Return this rank's slice of the mean of each local gradient over all ranks.

    Args:
      paths: names of the gradients.
      leaves: this rank's gradients.
      dims: the dim of each that is split.
      tx: the optimizer.
    """
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
        i: known_shards.own(local[i], dims[i], over) for i, p in enumerate(paths) if p in uniform
    }
    to_send = [i for i in range(len(local)) if i not in found]
    dtype = tx.reduce_dtype
    terms = [mixed_precision.cast(weights.term(local[i]), dtype) for i in to_send]
    plan = buckets.plan(terms, sharding.bucket_bytes)
    send = [[terms[i] for i in bucket] for bucket in plan]
    places = [[dims[to_send[i]] for i in bucket] for bucket in plan]
    others = tuple(name for name in every if name not in over)
    with weights.named():
        sums = shards.reduce_scatter(send, places, over, scale=scale, mesh=step.mesh)
        if others:
            sums = [axis.psum(parts, others, axis.platform(step.mesh)) for parts in sums]
    for bucket, parts in zip(plan, sums, strict=True):
        for i, part in zip(bucket, parts, strict=True):
            part = weights.total(mixed_precision.cast(part, local[to_send[i]].dtype))
            found[to_send[i]] = proved(part, every, mean=sharding.mean)
    gradients.record(step, sharding.all_reduce, terms)
    return [found[i] for i in range(len(local))]


def proved(part: jax.Array, axes: tuple[str, ...], *, mean: bool) -> jax.Array:
    """Return a shard of a mean or sum over the ranks of some axes, marked for the proof.

    Args:
      part: this rank's slice of the mean or sum.
      axes: names of the mesh axes of the ranks.
      mean: whether it is a mean.
    """
    part = mark(part, kind=SHARD, path="", axes=axes)
    return mark(part, kind=MEAN if mean else SUMMED, path="", axes=axes)
