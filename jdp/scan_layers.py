"""`scan_layers`: `lax.scan` over stacked layers, with their gradients reduced on the way back."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
from jax import lax

from jdp import axis, collectives, scope
from jdp.axis import AxisName
from jdp.collectives import AllReduce
from jdp.late_reduction import Hooks, floats_of, is_float
from jdp.mark import SHARED, mark

# Whether the layers of another scan are being traced, which reduces what is in them.
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

    The gradient that `lax.scan` gives is whole only after its backward loop, too late to hide its
    reduction. Here each iteration of that loop reduces the gradient of the layer before, while
    it computes its own. In a `train_step`, `sync_gradients` sees that it is a mean and does not
    send it again; in a `shard_map` of your own it does, which is right, only wasteful.

    Args:
      f: `f(carry, layer) -> (carry, y)`; with `xs` `f(carry, (layer, x)) -> (carry, y)`. It may
        close over traced values, which have their gradients; `jax.checkpoint(f)` works.
      init: the carry that goes in, any tree.
      params: tree of arrays `[layers, ...]`, the same on every rank. Only floats are reduced.
      xs: tree of arrays `[layers, ...]` that are no parameters and may differ from rank to
        rank: keys, masks, inputs.
      reverse: run the last layer first.
      unroll: as in `lax.scan`.
      axis_name: the data axis.
      all_reduce: the algorithm, from `jdp.collectives`.
      late: reduce in the backward loop. Default: on GPUs, as a CPU has nothing to hide it behind.

    Returns:
      `(carry, ys)`. Where it reduces, the gradient of `params` is the mean over ranks (weighted
      as the step is), that of everything else this rank's own, and only reverse mode is
      defined. It is plain `lax.scan` in micro-batches (`jdp.value_and_grad(accumulate=)`), in
      the layers of another `scan_layers`, in `shard_map(check_vma=True)`, and on one rank.

    Raises:
      ValueError: from `train_step`, if `params` may differ from rank to rank.

    >>> import jax.numpy as jnp, jdp
    >>> jdp.scan_layers(lambda x, w: (w * x, x), jnp.float32(1), jnp.array([2.0, 3.0, 4.0]))
    (Array(24., dtype=float32), Array([1., 2., 6.], dtype=float32))
    """
    num_layers = max((x.shape[0] if x.ndim else 1 for x in floats_of(params)), default=0)
    if not num_layers or not _is_late(late, axis_name):
        stacked = params if xs is None else (params, xs)
        return lax.scan(f, init, stacked, reverse=reverse, unroll=unroll)
    axes = axis.in_mesh_order(axis_name)
    params = _shared(params, axes)
    hooks = Hooks(floats_of(params), axes, all_reduce, reverse)
    leaves, treedef = jax.tree.flatten(params)
    others = [None if is_float(leaf) else leaf for leaf in leaves]
    floats, slot = hooks.enter(floats_of(params))

    def body(state: tuple[Any, Any], x: Any) -> tuple[tuple[Any, Any], Any]:
        (carry, slot), (floats, others, x) = state, x
        floats, carry, slot, tokens = hooks.begin(floats, carry, slot)
        left = iter(floats)
        layer = treedef.unflatten([next(left) if leaf is None else leaf for leaf in others])
        with _inside():
            carry, y = f(carry, layer if xs is None else (layer, x))
        return hooks.end(carry, slot, tokens), y

    x: Any = (floats, others, xs)
    (carry, _), ys = lax.scan(body, (init, slot), x, reverse=reverse, unroll=unroll)
    return carry, ys


def _is_late(late: bool | None, axis_name: AxisName) -> bool:
    if axis.size(axis_name) == 1 or _is_inside.get() or axis.is_typed(axis_name):
        return False
    step = scope.innermost()
    if step is not None and step.is_part:
        return False
    return scope.platform() == "gpu" if late is None else late


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    token = _is_inside.set(True)
    try:
        yield
    finally:
        _is_inside.reset(token)


# So that the analysis refuses what is no parameter, of which a mean would be the wrong gradient.
def _shared(params: Any, axes: tuple[str, ...]) -> Any:
    def noted(path: Any, leaf: Any) -> jax.Array:
        return mark(leaf, kind=SHARED, path=jax.tree_util.keystr(path), axes=axes)

    return jax.tree_util.tree_map_with_path(noted, params)
