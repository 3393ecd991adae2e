"""Whole arrays inside a step, and this rank's shards of them.

Sharded state is gathered before the author's function runs. The step's scope maps whole arrays to
shards, on which jdp works where it can, and XLA drops unused gathers. The shard of an author's
array is this rank's slice.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.extend.core
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jdp import axis, pytrees
from jdp.analysis.marks import MEAN, PART, SHARD, WHOLE, mark
from jdp.axis import AxisName, FurtherSpec
from jdp.collectives import buckets, shards
from jdp.reduction import mixed_precision, step_context

# In the proof, a slice at the rank's position would differ from rank to rank. So it is a primitive
# with its operand's class, and combined shards are marked.


def own_slice(whole: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    """Return an equal array's slice along `dim` for this rank."""
    return own_slice_p.bind(whole, dim=dim, axes=tuple(axes), size=lax.axis_size(axes))


def part_of_whole(part: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Mark this rank's shard, as its computation ensures."""
    return mark(part, kind=SHARD, path="", axes=tuple(axes))


def checked_slice(part: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Mark this rank's shard; the proof refuses a step where it may not be one."""
    return mark(part, kind=PART, path="", axes=tuple(axes))


def joined_slices(whole: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Mark the value gathered from checked shards."""
    return mark(whole, kind=WHOLE, path="", axes=tuple(axes))


def combined_parts(total: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Mark the sum over ranks of sums over checked shards."""
    return mark(total, kind=MEAN, path="", axes=tuple(axes))


own_slice_p = Primitive("jdp_own_slice")


def _slice(x: jax.Array, *, dim: int, axes: tuple[str, ...], size: int) -> jax.Array:
    length = x.shape[dim] // size
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * length, length, dim)


@own_slice_p.def_abstract_eval
def _sliced_type(x: Any, *, dim: int, axes: tuple[str, ...], size: int) -> Any:
    shape = (*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :])
    return jax.core.ShapedArray(shape, x.dtype)


def _batch(args: tuple, dims: tuple, *, dim: int, **params: Any) -> tuple[Any, int]:
    (x,), (batched,) = args, dims
    moved = dim + 1 if batched <= dim else dim
    return own_slice_p.bind(x, dim=moved, **params), batched


def _transpose(cotangent: Any, x: Any, *, dim: int, axes: tuple[str, ...], size: int) -> list[Any]:
    # The step's cotangent is the ranks' mean, so the result is 1 / n of the joined cotangents.
    return [lax.all_gather(cotangent, axes, axis=dim, tiled=True) / size]


ad.deflinear2(own_slice_p, _transpose)
batching.primitive_batchers[own_slice_p] = _batch
mlir.register_lowering(own_slice_p, mlir.lower_fun(_slice, multiple_results=False))


# JAX's trace, and the arrays remembered in it, see `recorded`.
_record: ContextVar[tuple[Any, list[Any]] | None] = ContextVar("jdp_shard_registry", default=None)


class Shard(NamedTuple):
    """This rank's part of an array.

    Attributes:
      value: the slice `[..., size / n, ...]`.
      owner: from stage 2 on, the optimizer of a parameter with a split gradient.
      trains: whether that optimizer updates it.
      is_kept: whether the whole array exists throughout the step.
      gather_dtype: None: its own.
      reduce_dtype: of its sent gradient; None: its own.
      all_reduce: the algorithm of its owner, from stage 2 on.
    """

    value: jax.Array
    dim: int
    axes: tuple[str, ...]
    owner: Any = None
    trains: bool = True
    is_kept: bool = False
    gather_dtype: Any = None
    reduce_dtype: Any = None
    all_reduce: Any = None
    further: FurtherSpec = ()


def gathered(
    found: Sequence[Shard],
    bucket_bytes: int = 4 * buckets.MiB,
    overwrite: Sequence[jax.Array | None] = (),
) -> list[jax.Array]:
    """Return whole arrays, in buckets; the step remembers the shards."""
    if not found:
        return []
    axes = found[0].axes
    sent = [mixed_precision.cast(part.value, part.gather_dtype) for part in found]
    plan = buckets.plan(sent, bucket_bytes)
    marked = [checked_slice(value, axes) for value in sent]
    values = [[marked[i] for i in bucket] for bucket in plan]
    dims = [[found[i].dim for i in bucket] for bucket in plan]
    scope = step_context.innermost()
    mesh = None if scope is None else scope.mesh
    places = [[overwrite[i] if overwrite else None for i in bucket] for bucket in plan]
    specs = [[found[i].further for i in bucket] for bucket in plan]
    results = shards.all_gather(values, dims, axes, mesh=mesh, overwrite=places, further=specs)
    return list(map(remember, buckets.in_order(results, plan), found))


def further_spec(array: Any, axis_name: AxisName) -> FurtherSpec:
    """Return how the compiler splits an array along further axes, if known."""
    scope = step_context.innermost()
    if scope is None or not isinstance(array, jax.core.Tracer):
        return axis.further_spec(array, axis_name)
    part = known(array)
    return part.further if part is not None else scope.further.get(id(array), (array, ()))[1]


def remember_further(arrays: Iterable[Any], specs: Iterable[FurtherSpec]) -> None:
    """Record how the compiler splits traced arrays."""
    scope = step_context.innermost()
    for array, spec in zip(arrays, specs, strict=True):
        if spec and scope is not None and len(spec) <= np.ndim(array):
            scope.further[id(array)] = array, spec


def remember_further_like(tree: Any, like: Any, axis_name: AxisName) -> None:
    """Record that the compiler splits a tree's arrays as those of equal shape in another."""
    leaves, treedef = jax.tree.flatten(tree)
    others, other_treedef = jax.tree.flatten(like)
    if treedef == other_treedef:
        pairs = [(x, y) for x, y in zip(leaves, others, strict=True) if np.shape(x) == np.shape(y)]
        remember_further([x for x, _ in pairs], [further_spec(y, axis_name) for _, y in pairs])


def dim_of(owner: Any, array: Any, num_shards: int) -> int | None:
    """Return an array's split dim; shards of a dim split over further axes would be no slices."""
    spec = further_spec(array, owner.axis_name)
    return owner.sharding.dim(array, num_shards, [i for i, part in enumerate(spec) if part])


def are_native(found: Iterable[Shard]) -> bool:
    """Whether native calls gather these shards and scatter gradients."""
    scope = step_context.innermost()
    mesh = None if scope is None else scope.mesh
    return all(shards.is_native(axes, mesh) for axes in {part.axes for part in found})


def remember(whole: jax.Array, part: Shard) -> jax.Array:
    """Return a whole array, and remember this rank's shard `part`."""
    whole = mark(whole, kind=WHOLE, path="", axes=part.axes)
    scope = step_context.innermost()
    if scope is not None:
        scope.shards[id(whole)] = whole, part  # kept, so that its id stays its own
    if (record := _record.get()) is not None and whole.dtype == part.value.dtype:
        trace, found = record
        if trace == jax.extend.core.get_opaque_trace_state():
            found.append((whole, part))
    return whole


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[jax.Array, Shard]]]:
    """Record the arrays remembered in the `with`, in this trace, except narrow gathers."""
    found: list[tuple[jax.Array, Shard]] = []
    token = _record.set((jax.extend.core.get_opaque_trace_state(), found))
    try:
        yield found
    finally:
        _record.reset(token)


@contextlib.contextmanager
def forgotten_after() -> Iterator[None]:
    """Forget the arrays remembered in the `with`: its trace may end."""
    scope = step_context.innermost()
    records: list[dict] = []
    if scope is not None:
        records = [scope.shards, scope.whole_owners, scope.means, scope.further]
    before = [dict(record) for record in records]
    try:
        yield
    finally:
        for record, old in zip(records, before, strict=True):
            record.clear()
            record.update(old)


def claim(params: Any, flags: Sequence[bool], owner: Any) -> None:
    """Record parameters' optimizer if it splits their gradients."""
    scope = step_context.innermost()
    if scope is None:
        return
    given = zip(jax.tree_util.tree_leaves_with_path(params), flags, strict=True)
    # The optimizer does not update statistics of Flax.
    chosen = [(x, flag) for (path, x), flag in given if not pytrees.is_overwritten(path)]
    mixed_precision.claim([leaf for leaf, _ in chosen], owner)
    axes = axis.in_mesh_order(owner.sharding.axes or owner.axis_name)
    is_here = step_context.current(owner.axis_name) is not None
    for leaf, flag in chosen:
        part = known(leaf)
        dim = dim_of(owner, leaf, axis.size(axes)) if is_here else None
        if part is None and owner.sharding.stage < 3 and dim is not None:
            further = further_spec(leaf, owner.axis_name)
            part = Shard(own_slice(leaf, dim, axes), dim, axes, further=further)
        if part is not None:
            owned = {"owner": owner, "trains": flag, "is_kept": owner.sharding.keeps_params}
            scope.shards[id(leaf)] = leaf, part._replace(**owned)
        elif is_here and dim is None and flag:
            scope.whole_owners[id(leaf)] = leaf, owner


def owner_of_whole(leaf: Any) -> Any:
    """Return an unsharded parameter's optimizer, or None."""
    scope = step_context.innermost()
    found = None if scope is None else scope.whole_owners.get(id(leaf))
    return None if found is None else found[1]


def remember_mean(gradient: jax.Array, path: str) -> jax.Array:
    """Return a gradient, and remember it as a mean."""
    scope = step_context.innermost()
    if scope is not None:
        scope.means[id(gradient)] = gradient
        scope.averaged.add(path)
    return gradient


def means() -> Mapping[int, jax.Array]:
    """Return gradients remembered as means, by id."""
    scope = step_context.innermost()
    return {} if scope is None else scope.means


def known(whole: Any) -> Shard | None:
    """Return this rank's shard of an array."""
    scope = step_context.innermost()
    found = None if scope is None else scope.shards.get(id(whole))
    return None if found is None else found[1]


def are_of(owner: Any) -> bool:
    """Whether an optimizer updates the step's sharded arrays."""
    scope = step_context.innermost()
    found = () if scope is None else scope.shards.values()
    owners = (part.owner for _, part in found if part.owner is not None)
    return any(each.update is owner.update for each in owners)


def own(whole: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    """Return the shard along `dim`, or slice an equal array."""
    found = known(whole)
    if found is not None and found.dim == dim and found.axes == axes:
        return found.value
    return own_slice(whole, dim, axes)


def entering(value: jax.Array, dim: int, axes: tuple[str, ...], further: FurtherSpec) -> Shard:
    """Mark the shard of a state's leaf for the proof."""
    return Shard(mark(value, kind=SHARD, path="", axes=axes), dim, axes, further=further)
