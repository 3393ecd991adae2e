"""Optax transformations that reduce gradients first."""

import inspect
import sys
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdp import axis, collectives, pytrees
from jdp.analysis.marks import SYNCED, mark
from jdp.axis import AxisName
from jdp.collectives import AllReduce, buckets
from jdp.reduction import gradients, mixed_precision


class Replicated(optax.GradientTransformationExtraArgs):
    """The result of `replicated`: an optax transformation with its axis."""

    @property
    def axis_name(self) -> AxisName:
        """The data axis."""
        # on the function, because JAX and nnx rebuild the tuple from its two fields
        return self.update.axis_name  # type: ignore[attr-defined]

    @property
    def reduce_dtype(self) -> np.dtype | None:
        """The dtype of sent gradients; None: their own."""
        return self.update.reduce_dtype  # type: ignore[attr-defined]

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `replicated`, by name."""
        return self.update.options  # type: ignore[attr-defined]


def replicated(
    tx: optax.GradientTransformation,
    *,
    axis_name: AxisName = "data",
    all_reduce: AllReduce = collectives.auto,
    bucket_bytes: int = gradients.BUCKET_BYTES,
    mean: bool = True,
    reduce_dtype: Any = None,
) -> Replicated:
    """Wrap an optimizer so that it sees the mean gradient of all ranks: reduce, then `tx`.

    It must be outermost: wrapped transformations (clipping, schedules, `optax.MultiSteps`,
    `apply_if_finite`, masks) see mean gradients and count optimizer steps; an outer one would see
    local gradients. Works in `train_step`, and in your own `shard_map` or `pmap`. Without a bound
    axis there is one rank.

    Args:
      tx: the complete optimizer.
      axis_name: the data axis: a name, or a tuple of names.
      all_reduce: the algorithm, from `jdp.collectives`.
      bucket_bytes: capacity of one bucket in bytes, > 0.
      mean: average over ranks, or over weights; False gives the sum.
      reduce_dtype: float dtype of sent gradients, such as `jnp.bfloat16`; results keep their own.
        Default: their own.

    Returns:
      An optax transformation. `update(..., synced=True)` passes means directly to `tx`.

    Raises:
      TypeError: if `tx` is not an optax transformation or is already wrapped, `all_reduce` is not a
        function, or `bucket_bytes` is not an integer.
      ValueError: if `reduce_dtype` is not a real float of at least 16 bits; from `update`, if the
        shape of a gradient or of an update is not its parameter's, or inside another optax
        transformation.

    >>> import optax, jax.numpy as jnp
    >>> tx = replicated(optax.chain(optax.clip(1.0), optax.sgd(0.5)))
    >>> state = tx.init({"w": jnp.zeros(2)})
    >>> updates, state = tx.update({"w": jnp.array([3.0, -4.0])}, state)
    >>> updates["w"]
    Array([-0.5,  0.5], dtype=float32)
    """
    axis.names(axis_name)
    buckets.plan([], bucket_bytes)  # Refuse wrong arguments here, not at the first step.
    reduce_dtype = mixed_precision.float_dtype("reduce_dtype", reduce_dtype)
    _require_arguments(tx, all_reduce)
    options: dict[str, Any] = dict(axis_name=axis_name, all_reduce=all_reduce)
    options |= dict(bucket_bytes=bucket_bytes, mean=mean, reduce_dtype=reduce_dtype)
    wrapped = with_extra_args(tx)

    def update(
        updates: Any, state: Any, params: Any = None, *, synced: bool = False, **extra: Any
    ) -> tuple[Any, Any]:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        _require_outermost_call(caller)
        if (on_parts := getattr(update, "on_parts", None)) is not None:  # of `sharded`
            split = on_parts(update, caller, updates, state, params, synced=synced, **extra)
            if split is not None:
                return split
        if not synced:
            if params is not None:
                require_shapes(updates, params)
            updates = gradients.sync_gradients(updates, **options)
        else:
            updates = _marked_as_synced(updates, axis.names(axis_name))
        updates, state = wrapped.update(updates, state, params, **extra)
        require_updates(updates, params)
        return updates, state

    setattr(update, "axis_name", axis_name)  # noqa: B010 - types know no attributes of functions
    setattr(update, "reduce_dtype", reduce_dtype)  # noqa: B010
    setattr(update, "options", {"tx": tx, **options})  # noqa: B010
    return Replicated(wrapped.init, update)


def with_extra_args(tx: Any) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that ignores unknown keywords."""
    if not isinstance(tx, optax.GradientTransformation):  # such as optax.MultiSteps
        parameters = inspect.signature(tx.update).parameters.values()
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
            return optax.GradientTransformationExtraArgs(tx.init, tx.update)
    return optax.with_extra_args_support(tx)


def _require_arguments(tx: Any, all_reduce: Any) -> None:
    _require_transformation(tx)
    if not callable(all_reduce):
        raise TypeError(
            f"all_reduce={all_reduce!r} is not a function. Write all_reduce=jdp.collectives.auto, "
            "or another function of jdp.collectives."
        )


def _require_transformation(tx: Any) -> None:
    if isinstance(tx, Replicated):
        raise TypeError(
            "the optimizer is already in jdp.replicated(...) or jdp.sharded(...), so it would "
            "reduce its gradients twice and shard no state. Write one of the two, outermost: "
            "jdp.sharded(optax.adam(1e-3))."
        )
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"jdp.replicated got a {type(tx).__name__}, which is not an optax transformation (no "
            "init and update). Write jdp.replicated(optax.sgd(0.1))."
        )


def _marked_as_synced(grads: Any, axes: tuple[str, ...]) -> Any:
    def noted(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return mark(leaf, kind=SYNCED, path=jax.tree_util.keystr(path), axes=axes)

    return jax.tree_util.tree_map_with_path(noted, grads)


def has_optimizer(node: Any) -> bool:
    """Whether a state's node has a jdp optimizer, its `tx`."""
    return isinstance(getattr(node, "tx", None), Replicated)


def reduce_dtype_of(state: Any) -> np.dtype | None:
    """Return the common dtype in which optimizers send gradients, or None."""
    nodes = filter(has_optimizer, jax.tree.leaves(state, is_leaf=has_optimizer))
    found: set[np.dtype | None] = {node.tx.reduce_dtype for node in nodes}
    return found.pop() if len(found) == 1 else None


def require_outermost(tx: Any) -> None:
    """Refuse an optimizer that is not `replicated(...)`."""
    if isinstance(tx, Replicated):
        return
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"tx is {pytrees.kind_of(tx)}, which is not an optimizer. Write "
            "TrainState.create(params, jdp.replicated(optax.sgd(0.1))), with the parameters "
            "first."
        )
    made_by = getattr(getattr(tx, "update", None), "__qualname__", type(tx).__name__).split(".")[0]
    raise TypeError(
        f"the optimizer (made by {made_by!r}) is not wrapped in jdp.replicated, so ranks would "
        "apply local gradients and drift apart. Write jdp.replicated(...) around the whole "
        "optimizer, outermost: inside a chain, clipping would see local gradients."
    )


def _require_outermost_call(caller: str) -> None:
    # nnx does not keep the type of the optimizer's state.
    if caller.split(".")[0] == "optax":
        raise ValueError(
            f"jdp.replicated(...) is inside another optax transformation ({caller} called it), "
            "which would clip or scale each rank's own gradient instead of the mean. Write "
            "jdp.replicated(optax.chain(...)), outermost."
        )


def require_shapes(grads: Any, params: Any) -> None:
    """Refuse gradients with other shapes than their parameters."""
    grad_leaves, grad_tree = jax.tree_util.tree_flatten_with_path(grads)
    param_leaves, param_tree = jax.tree.flatten(params)
    if grad_tree != param_tree:
        return  # optax.lookahead, with gradients of half of its parameters
    for (path, grad), param in zip(grad_leaves, param_leaves, strict=True):
        if jnp.shape(grad) != jnp.shape(param):
            raise ValueError(
                f"the gradient of `{jax.tree_util.keystr(path)}` is {list(jnp.shape(grad))}, but "
                f"the parameter is {list(jnp.shape(param))}. If these are per-row gradients, row "
                "i of one rank would be averaged with row i of another. Average them on each "
                "rank first: grads.mean(0). For DP-SGD clip each row before that (docs/steps.md)."
            )


def require_updates(updates: Any, params: Any) -> None:
    """Refuse updates that do not add elementwise to parameters."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(updates)
    param_leaves, param_tree = jax.tree.flatten(params)
    if tree != param_tree:
        return  # Without params, or such as optax.lookahead.
    for (path, update), param in zip(leaves, param_leaves, strict=True):
        name = jax.tree_util.keystr(path)
        if jnp.shape(update) != jnp.shape(param):
            raise ValueError(
                f"the optimizer's update of `{name}` is {list(jnp.shape(update))}, but the "
                f"parameter is {list(jnp.shape(param))}, so their sum would broadcast. "
                "optax.contrib.dpsgd and differentially_private_aggregate treat the first dim of "
                "a gradient as rows. Clip each row on its rank, average, and add the noise in "
                "the optimizer (docs/steps.md, The optimizer)."
            )
        if jnp.iscomplexobj(update) and not jnp.iscomplexobj(param):
            raise ValueError(
                f"the optimizer's update of `{name}` is complex, but the parameter is "
                f"{param.dtype}, so their sum would drop the imaginary part. Pass the real part "
                "of the gradient: grads.real."
            )


# Splitting a smaller leaf saves less than a transfer's start costs.
MIN_SIZE = 2**12


@dataclass(frozen=True)
class Sharding:
    """The options of `sharded`.

    Attributes:
      stage: 1: optimizer state. 2: gradients, too. 3: parameters, too.
      axes: the mesh axes of the shards; None: all axes of the optimizer.
      gather_dtype: at stage 3, dtype of parameters in a loss; None: their own.
    """

    stage: int
    min_size: int
    axes: tuple[str, ...] | None
    all_reduce: AllReduce
    bucket_bytes: int
    mean: bool
    keep_gathered: bool = False
    gather_dtype: np.dtype | None = None

    @property
    def keeps_params(self) -> bool:
        """Whether whole parameters exist throughout a step."""
        return self.stage < 3 or self.keep_gathered

    def dim(self, leaf: Any, num_shards: int, taken: Container[int] = ()) -> int | None:
        """Return the dim along which a leaf is split, None if it stays whole.

        It is the largest that divides and is not `taken`, or the one before the last if that has
        whole tiles of rows for each rank: XLA for TPUs scatters rows, but may sum a slice of
        columns whole (v5e:2x4, bfloat16 `[1024, 1024]`).
        """
        shape = np.shape(leaf)
        if num_shards == 1 or np.prod(shape) < self.min_size:
            return None
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            return None
        dims = [
            i for i, size in enumerate(shape) if size and size % num_shards == 0 and i not in taken
        ]
        largest = max(dims, key=lambda i: (shape[i], -i), default=None)
        rows = len(shape) - 2
        # A TPU's tile has 8 rows. Fewer than 128 may be vectors of stacked layers.
        if largest == rows + 1 and rows in dims and shape[rows] >= 128:
            return rows if shape[rows] % (8 * num_shards) == 0 else largest
        return largest


class Sharded(Replicated):
    """The result of `sharded`: an optax transformation with its `Sharding`."""

    @property
    def sharding(self) -> Sharding:
        """The options of the sharding."""
        return self.update.sharding  # type: ignore[attr-defined]

    @property
    def wrapped(self) -> optax.GradientTransformationExtraArgs:
        """The wrapped optimizer, which sees mean gradients."""
        return self.update.wrapped  # type: ignore[attr-defined]


def sharding_of(tx: Any) -> Sharding | None:
    """Return the `Sharding` of an optimizer, or None."""
    return tx.sharding if isinstance(tx, Sharded) else None
