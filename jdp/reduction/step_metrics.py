"""The metrics that a step returns."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jdp import axis, collectives, pytrees
from jdp.analysis.marks import ALL_REDUCED, mark
from jdp.axis import AxisName
from jdp.collectives import AllReduce
from jdp.reduction import row_weight, step_context
from jdp.reduction.metrics import is_rows
from jdp.reduction.step_context import Scope


# Losses are averaged with the gradients, without another collective.
def offer_mean(step: Scope | None, value: Any) -> None:
    """Record a loss, once, for the step's next reduction."""
    if step is None or not step.is_here():
        return
    for leaf in jax.tree.leaves(value):
        is_new = id(leaf) not in step.loss_means and all(leaf is not x for x in step.losses)
        if is_new and _is_loss(leaf):
            step.losses.append(leaf)


def take_means(
    step: Scope | None, weight: jax.Array | None, all_reduce: AllReduce, mesh: Mesh | None
) -> list[jax.Array]:
    """Return the losses to send with an all-reduce of gradients.

    Empty if it has another weight than the step, may round, is outside the step's trace, or starts
    each bucket when complete, because aux may be ready late.
    """
    if step is None or not step.is_here() or weight is not step.weight:
        return []
    if not _is_exact_mean(all_reduce) or collectives.starts_when_ready(all_reduce, mesh):
        return []
    losses = [*step.losses]
    step.losses.clear()
    return losses


def _is_exact_mean(all_reduce: Any) -> bool:
    while isinstance(all_reduce, functools.partial):
        all_reduce = all_reduce.func
    return all_reduce in collectives.ALGORITHMS


def packed_means(losses: Sequence[jax.Array]) -> list[jax.Array]:
    """Return losses as one float32 or wider array, or an empty list."""
    if not losses:
        return []
    widest = jnp.result_type(jnp.float32, *(x.dtype for x in losses))
    wide = [x.astype(widest) for x in losses]
    return wide if len(wide) == 1 else [jnp.stack(wide)]


def record_means(
    step: Scope | None, losses: Sequence[jax.Array], means: Sequence[jax.Array]
) -> None:
    """Record means of losses, in the form of `packed_means`."""
    for mean in means:
        assert step is not None
        found = [mean] if len(losses) == 1 else mean
        step.loss_means.update((id(x), (x, y)) for x, y in zip(losses, found, strict=True))


def known_mean(step: Scope | None, leaf: Any) -> jax.Array | None:
    """Return a sent loss's mean over ranks."""
    if step is None or not step.is_here():
        return None
    loss, mean = step.loss_means.get(id(leaf), (None, None))
    return None if loss is None else mean


def _is_loss(leaf: Any) -> bool:
    if not isinstance(leaf, jax.core.Tracer) or leaf.shape:
        return False
    return jnp.issubdtype(leaf.dtype, jnp.floating) and not pytrees.is_tiny_float(leaf.dtype)


def take_rows(tree: Any) -> tuple[Any, list[jax.Array]]:
    """Split `rows` from a tree; `pytrees.put_nodes` restores them."""
    for leaf in jax.tree.leaves(tree, is_leaf=is_rows):
        if is_rows(leaf) and jnp.ndim(leaf.values) != leaf.num_dims:
            raise ValueError(
                f"jdp.rows(x) marked an array of {leaf.num_dims} dim(s), and a scan or vmap "
                f"stacked it to {jnp.result_type(leaf.values)}{list(jnp.shape(leaf.values))}. "
                "Its first dim is no longer this rank's rows, so jdp cannot order the outputs. "
                "Return x itself from the scan or vmap, move its rows to the first dim, and "
                "return jdp.rows(x) from the step."
            )
    return pytrees.take_nodes(tree, is_rows)


def has_rows(tree: Any) -> bool:
    """Whether a tree holds `rows`."""
    return any(map(is_rows, jax.tree.leaves(tree, is_leaf=is_rows)))


def unmarked(tree: Any) -> Any:
    """Replace every `rows` of a tree by its plain array."""
    return jax.tree.map(lambda x: x.values if is_rows(x) else x, tree, is_leaf=is_rows)


def require_numbers(tree: Any) -> None:
    """Refuse metrics that a compiled step cannot return."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not pytrees.is_array(leaf) and not hasattr(leaf, "__jax_array__"):
            raise TypeError(
                f"`metrics{jax.tree_util.keystr(path)}` is {leaf!r}, of type "
                f"{type(leaf).__name__}, but a compiled step returns only arrays and numbers. "
                "Add it to the metrics after the call of the step."
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


def with_uniform(tree: Any, own: Sequence[jax.Array], is_uniform: Sequence[bool]) -> Any:
    """Replace means of equal values by these, to the bit."""
    left = iter(zip(own, is_uniform, strict=True))

    def chosen(leaf: jax.Array) -> jax.Array:
        if not _is_float_scalar(leaf):
            return leaf
        value, stays = next(left)
        return value if stays else leaf

    return jax.tree.map(chosen, tree)


def _is_float_scalar(leaf: Any) -> bool:
    return not jnp.shape(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def averaged(
    tree: Any, axis_name: AxisName, summed: jax.Array | None = None
) -> tuple[Any, jax.Array | None]:
    """Average float scalars, and sum whole numbers, `[k]` float32, in one collective."""
    given, treedef = jax.tree.flatten(tree)
    leaves = [jnp.asarray(leaf) for leaf in given]
    step = step_context.current(axis_name)
    scalars = {}
    for i, leaf in enumerate(leaves):
        if (mean := known_mean(step, given[i])) is not None:
            leaves[i] = mean.astype(leaf.dtype)
        elif _is_float_scalar(leaf):
            scalars[i] = leaf
    if scalars or summed is not None:
        means, summed = _reduced([*scalars.values()], axis_name, summed)
        for i, mean in zip(scalars, means, strict=True):
            leaves[i] = mean.astype(leaves[i].dtype)
    return jax.tree.unflatten(treedef, leaves), summed


def _reduced(
    scalars: list[jax.Array], axis_name: AxisName, summed: jax.Array | None
) -> tuple[list[jax.Array], jax.Array | None]:
    step, num = step_context.current(axis_name), len(scalars)
    widest = jnp.result_type(jnp.float32, *(x.dtype for x in scalars))
    wide = [x.astype(widest) for x in scalars]
    is_single = num == 1 and summed is None  # a stack traces slowly
    terms = wide[0] if is_single else jnp.stack(wide) if wide else jnp.zeros(0, widest)
    is_weighed = step is not None and step.weight is not None
    if step is not None and step.weight is not None:
        terms = row_weight.weighed(terms, step_context.share_of(step.weight, axis_name))
    if summed is not None:
        terms = jnp.concatenate([terms, summed.astype(terms.dtype)])
    total = _summed(terms, axis_name, step)
    means = total if summed is None else total[:num]
    means = means if is_weighed else means / axis.size(axis_name)
    return [means] if is_single else [*means], None if summed is None else total[num:]


def _summed(x: jax.Array, axis_name: AxisName, step: Scope | None) -> jax.Array:
    axes = axis.names(axis_name)
    if step is not None and axis.size(axes) == 1:  # XLA keeps a sum over one rank
        return mark(x, kind=ALL_REDUCED, path="", axes=axis.in_mesh_order(axes))
    # On CPU another collective wakes all ranks again; on GPU the first one makes JAX delay all
    # reductions to hide it.
    if step is not None and step.reductions:
        last = step.reductions[-1]
        is_here = last.trace == jax.extend.core.get_opaque_trace_state()
        if is_here and _is_exact_mean(last.all_reduce):
            ((total,),) = last.all_reduce([[x]], axes, scale=1.0, mesh=step.mesh)
            return total
    return lax.psum(x, axes) if axis.is_bound(axis_name) else x
