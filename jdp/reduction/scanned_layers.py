"""`scan_layers`: `lax.scan` over layers with reduced gradients."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
from jax import lax

from jdp import axis, collectives
from jdp.analysis import jaxprs
from jdp.analysis.marks import LATE_ELSEWHERE, LATE_HERE, LATE_ON_MORE_RANKS, SHARED, mark
from jdp.axis import AxisName
from jdp.collectives import AllReduce
from jdp.reduction import declared_reductions, layer_scan, step_context
from jdp.reduction.layer_hooks import Hooks, floats_of, is_float

NAME = "jdp.scan_layers"

# Whether another scan of layers, which reduces, is being traced.
_is_inside: ContextVar[bool] = ContextVar("jdp_scan_layers", default=False)


def scan_layers(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    params: Any,
    xs: Any = None,
    *,
    reverse: bool = False,
    unroll: int | bool = 1,
    axis_name: AxisName = "data",
    all_reduce: AllReduce = collectives.xla,
    late: bool | None = None,
) -> tuple[Any, Any]:
    """Run `lax.scan(f, init, params)` over the stacked parameters of equal layers.

    The gradient of `lax.scan` is complete only after its backward loop, too late to hide its
    reduction. Here each iteration of that loop reduces the gradient of the layer before, while it
    computes its own. In a `train_step`, `sync_gradients` does not send this mean again; in your own
    `shard_map` it does, with the same result. It is sent in the common `reduce_dtype` of the
    state's optimizers, if any.

    Under `jdp.sharded(stage=3)` each layer's shards are gathered while the layer before is
    computed, and the backward pass recomputes layers. At stage 2 layers are whole, and the gradient
    of each is scattered while the next one is computed.

    Args:
      f: `f(carry, layer) -> (carry, y)`; with `xs` `f(carry, (layer, x)) -> (carry, y)`. It may
        capture traced values, which have gradients; `jax.checkpoint(f)` works.
      init: the first carry, any tree.
      params: tree of arrays `[layers, ...]`, equal on every rank. Only floats are reduced.
      xs: tree of arrays `[layers, ...]` that are not parameters and may differ from rank to
        rank: keys, masks, inputs.
      reverse: run the last layer first.
      unroll: as in `lax.scan`.
      axis_name: the data axis.
      all_reduce: the algorithm, from `jdp.collectives`.
      late: reduce in the backward loop. Default: on GPUs, since a CPU cannot hide it, and
        everywhere at stages 2 and 3. False also gathers shards, and scatters gradients, at once.

    Returns:
      `(carry, ys)`. Where it reduces, the gradient of `params` is the mean over ranks (weighted as
      the step is), other gradients are this rank's own, and only reverse mode is defined. It is
      plain `lax.scan` in micro-batches (`jdp.value_and_grad(accumulate=)`) at stage 1 or without
      stages; in the layers of another `scan_layers`; in `shard_map(check_vma=True)`; and on one
      rank.

    Raises:
      ValueError: from `train_step`, if `params` may differ from rank to rank; if `params` have
        Flax's `_overwrite_with_gradient`, whose gradients are maxima.

    >>> import jax.numpy as jnp, jdp
    >>> jdp.scan_layers(lambda x, w: (w * x, x), jnp.float32(1), jnp.array([2.0, 3.0, 4.0]))
    (Array(24., dtype=float32), Array([1., 2., 6.], dtype=float32))
    """
    declared_reductions.require_none(params, NAME)
    axes = axis.in_mesh_order(axis_name)
    step = step_context.innermost()
    if late is not False and not _is_inside.get() and step is not None and step.shards:
        parts = layer_scan.split_parts(params, axes)
        if any(parts):
            is_kept = all(part is None or part.is_kept for part in parts)
            scan = layer_scan.scan_whole if is_kept else layer_scan.scan_sharded
            options: Any = {"axes": axes, "reverse": reverse, "unroll": unroll}
            step.reverse_only.add(NAME)
            return scan(_inner(f), init, params, xs, parts, **options)
    num_layers = max((x.shape[0] if x.ndim else 1 for x in floats_of(params)), default=0)
    is_late, note = _is_late(late, axis_name) if num_layers else (False, "")
    if note:  # JAX may have traced the caller for another step
        params = jax.tree.map(lambda leaf: mark(leaf, kind=note, path="", axes=()), params)
    if not is_late:
        stacked = params if xs is None else (params, xs)
        return lax.scan(f, init, stacked, reverse=reverse, unroll=unroll)
    if step is not None:
        step.reverse_only.add(NAME)
        if step.choices.late:  # for the proof alone, and perhaps on another platform
            all_reduce = collectives.xla
    params = _shared(params, axes)
    hooks = Hooks(floats_of(params), axes, all_reduce, reverse)
    return _reduced_late(_inner(f), init, params, xs, hooks, reverse=reverse, unroll=unroll)


def _reduced_late(
    f: Callable[..., Any], init: Any, params: Any, xs: Any, hooks: Hooks, **options: Any
) -> tuple[Any, Any]:
    leaves, treedef = jax.tree.flatten(params)
    others = [None if is_float(leaf) else leaf for leaf in leaves]
    floats, slot = hooks.enter(floats_of(params))

    def body(state: tuple[Any, Any], x: Any) -> tuple[tuple[Any, Any], Any]:
        (carry, slot), (floats, others, x) = state, x
        floats, carry, slot, tokens = hooks.begin(floats, carry, slot)
        left = iter(floats)
        layer = treedef.unflatten([next(left) if leaf is None else leaf for leaf in others])
        carry, y = f(carry, layer if xs is None else (layer, x))
        return hooks.end(carry, slot, tokens), y

    x: Any = (floats, others, xs)
    (carry, _), ys = lax.scan(body, (init, slot), x, **options)
    return carry, ys


# By platform; None: only on more ranks.
_CHOICES = {LATE_HERE: True, LATE_ELSEWHERE: False, LATE_ON_MORE_RANKS: None}


def late_choices(jaxpr: Any) -> set[bool | None]:
    """Return the choices of `scan_layers`: late or not, None: on more ranks."""
    eqns = (body.eqns for body in jaxprs.with_bodies(jaxpr))
    marks = [each for body in eqns for each in body if each.primitive.name == "jdp_mark"]
    return {_CHOICES[eqn.params["kind"]] for eqn in marks if eqn.params["kind"] in _CHOICES}


def _is_late(late: bool | None, axis_name: AxisName) -> tuple[bool, str]:
    """Return whether to reduce late, and a different choice's mark."""
    step = step_context.innermost()
    if step is None and axis.size(axis_name) == 1:
        return False, ""
    if _is_inside.get() or axis.is_typed(axis_name) or (step is not None and step.is_part):
        return False, ""
    if step is not None and step.choices.late is not None:
        return step.choices.late if late is None else late, ""
    has_others = axis.size(axis_name) > 1
    if late is not None:
        is_late, note = late and has_others, LATE_ON_MORE_RANKS if late and not has_others else ""
    else:
        is_late = has_others and step_context.platform() == "gpu"
        note = LATE_HERE if is_late else LATE_ELSEWHERE
    return is_late, "" if step is None else note


def _inner(f: Callable[..., Any]) -> Callable[..., Any]:
    """Another `scan_layers` in it does not reduce."""

    def layer(*args: Any) -> Any:
        token = _is_inside.set(True)
        try:
            return f(*args)
        finally:
            _is_inside.reset(token)

    return layer


# The analysis refuses other values than parameters: their gradients must not be means.
def _shared(params: Any, axes: tuple[str, ...]) -> Any:
    def noted(path: Any, leaf: Any) -> jax.Array:
        return mark(leaf, kind=SHARED, path=jax.tree_util.keystr(path), axes=axes)

    return jax.tree_util.tree_map_with_path(noted, params)
