"""`sharded`: optimizers with split state, gradients and parameters."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdp import axis, collectives, pytrees
from jdp.axis import AxisName
from jdp.collectives import AllReduce
from jdp.distributed.this_process import log_once
from jdp.reduction import gradients, mixed_precision, shard_registry, step_context
from jdp.reduction.optimizer import (
    MIN_SIZE,
    Sharded,
    Sharding,
    replicated,
    require_shapes,
    with_extra_args,
)
from jdp.reduction.sharded_update import Update, shard_axes
from jdp.validation import int_at_least, integer

# The file with the updates of a `TrainState`.
UPDATE_OF_STATE = "jdp.reduction.sharded_update"


def _log_unsplit(sharding: Any, axis_name: AxisName, caller: str, state: Any, params: Any) -> None:
    is_in_step = step_context.current(axis_name) is not None
    if caller == UPDATE_OF_STATE and is_in_step:
        return
    num_ranks = axis.size(sharding.axes or axis_name)
    named = {"optimizer state": state, "parameters": params if sharding.stage == 3 else ()}
    whole = {name: _split_elsewhere(sharding, tree, num_ranks) for name, tree in named.items()}
    arrays = [x for found in whole.values() for x in found]
    if not arrays:
        return
    num_bytes = sum(x.size * x.dtype.itemsize for x in arrays)
    message = (
        f"jdp.sharded(stage={sharding.stage}) does not shard {len(arrays)} arrays of "
        f"{' and '.join(name for name, found in whole.items() if found)} here, {num_bytes:,} "
        f"bytes on each of {num_ranks} ranks. A jdp.train_step shards a jdp.TrainState, Flax's "
        "TrainState, and an nnx.Optimizer with its model. Write state = "
        "jdp.TrainState.create(params, tx) and, in the step, state.apply_gradients(grads)."
    )
    log_once(logging.WARNING, message)


def _split_elsewhere(sharding: Any, tree: Any, num_ranks: int) -> list[jax.Array]:
    arrays = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if pytrees.is_array(leaf)]
    return [x for x in arrays if sharding.dim(x, num_ranks) is not None]


def updated_by_others(
    update: Any, caller: str, grads: Any, opt_state: Any, params: Any, *, synced: bool, **extra: Any
) -> tuple[Any, Any] | None:
    """Return the gathered updates and the new state, None if it is not split here."""
    tx = Sharded(update.wrapped.init, update)
    axes = shard_axes(tx)
    if caller != UPDATE_OF_STATE:
        mixed_precision.mark_gradients(grads, tx)
    is_split = axes is not None and any(map(shard_registry.known, jax.tree.leaves(opt_state)))
    has_parts = shard_registry.are_of(tx) or any(map(shard_registry.known, jax.tree.leaves(params)))
    whole = () if is_split else opt_state, () if has_parts else params
    _log_unsplit(tx.sharding, tx.axis_name, caller, *whole)
    if axes is None or not is_split:
        return None
    if not synced and params is not None:
        require_shapes(grads, params)
    shard_registry.remember_further_like(grads, params, tx.axis_name)
    parts = Update(tx, axes, jax.tree.structure(grads), applies=False)
    return parts.run(parts.means(grads, synced), opt_state, params, extra)


def sharded(
    tx: optax.GradientTransformation,
    *,
    stage: int = 1,
    min_size: int = MIN_SIZE,
    over: AxisName | None = None,
    axis_name: AxisName = "data",
    all_reduce: AllReduce = collectives.auto,
    bucket_bytes: int = gradients.BUCKET_BYTES,
    mean: bool = True,
    keep_gathered: bool = False,
    gather_dtype: Any = None,
    reduce_dtype: Any = None,
) -> Sharded:
    """Wrap an optimizer as `jdp.replicated` does, and split its state over the ranks (ZeRO).

    Model, loss, step and loop stay unchanged. Each rank updates its part of the parameters, exactly
    as one device would: values across elements (global norms, trust ratios, factored means) are
    computed over all parts. Between steps arrays have their logical shapes, and a `NamedSharding`
    over the data axis.

    Stage 1 splits the optimizer state, and the gradients after `jdp.value_and_grad`. Stage 2 splits
    gradients as `jdp.value_and_grad` computes them and adds them up over micro-batches. Stage 3
    also splits the parameters, which are gathered per step: with `jdp.value_and_grad` each where it
    is used, with `jax.value_and_grad` all at once. A leaf is split along its largest dim that the
    number of ranks divides; without one, or below `min_size`, it stays whole.

    It splits a `jdp.TrainState`, another state with `params`, `tx` and `opt_state`, such as Flax's,
    and an `nnx.Optimizer` with the variables that it updates in models beside it. In a step with
    another state, or in your own `shard_map`, it is `jdp.replicated(tx)`.

    Args:
      tx: the complete optimizer.
      stage: 1, 2 or 3.
      min_size: leaves with fewer numbers stay whole, >= 1.
      over: the mesh axis, or axes, of the split, among `axis_name`; parts are replicated over the
        others. Default: all of `axis_name`.
      axis_name: the data axis: a name, or a tuple of names.
      all_reduce: the algorithm for whole leaves, from `jdp.collectives`; `quantized` also sends
        the gradients of split leaves in 8 bits, unless a further axis splits them.
      bucket_bytes: capacity of one bucket in bytes, > 0.
      mean: average over ranks, or over weights; False gives the sum.
      keep_gathered: at stage 3 gather the parameters once per step, and keep them until it ends.
        Sends less, above all with micro-batches, and needs memory for all parameters.
      gather_dtype: at stage 3, dtype such as `jnp.bfloat16` in which `jdp.value_and_grad` gathers
        float parameters of more bits for the loss. Default, and for the rest of the step: the
        state's dtype.
      reduce_dtype: float dtype of sent gradients; results keep their own. Default: their own.

    Returns:
      An optax transformation for `TrainState.create`.

    Raises:
      TypeError: `tx` is not an optax transformation, or a number is not an integer.
      ValueError: `stage` is not 1, 2 or 3, `min_size` is below 1, `over` is not among
        `axis_name`, a dtype is not a real float of at least 16 bits, or `gather_dtype` is given at
        another stage than 3.

    Source: Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054.

    >>> import jax.numpy as jnp, optax, jdp
    >>> mesh = jdp.init(cpu_ranks=2)
    >>> tx = jdp.sharded(optax.adam(0.1), stage=1, min_size=1)
    >>> state = jdp.TrainState.create({"w": jnp.ones((4, 3))}, tx)
    >>> state.params["w"].sharding.spec, state.opt_state[0].mu["w"].sharding.spec
    (P(), P('data',))
    """
    stage = integer("stage", stage)
    if stage not in (1, 2, 3):
        raise ValueError(
            f"stage must be 1 (optimizer state), 2 (and gradients) or 3 (and parameters), got "
            f"{stage!r}. To keep the whole state on every rank write jdp.replicated(tx)."
        )
    min_size = int_at_least("min_size", min_size, least=1)
    if keep_gathered and stage != 3:
        raise ValueError(
            f"keep_gathered=True needs stage=3, which gathers parameters, got stage={stage}. "
            "Stages 1 and 2 keep all parameters on every rank. Remove it, or write stage=3."
        )
    gather_dtype = mixed_precision.float_dtype("gather_dtype", gather_dtype)
    if gather_dtype is not None and stage != 3:
        name = gather_dtype.name
        raise ValueError(
            f"gather_dtype={name} needs stage=3, which gathers sharded parameters for the loss, "
            f"got stage={stage}. Stages 1 and 2 gather the new parameters, which would lose "
            "digits in every step. Cast in the loss, jax.tree.map(lambda p: "
            f"p.astype(jnp.{name}), params), or write stage=3, with keep_gathered=True to gather "
            "once a step."
        )
    axes = _axes_to_split_over(over, axis_name)
    options: dict[str, Any] = {"axis_name": axis_name, "all_reduce": all_reduce}
    options |= {"bucket_bytes": bucket_bytes, "mean": mean}
    base = replicated(tx, **options, reduce_dtype=reduce_dtype)
    options |= {"keep_gathered": keep_gathered, "gather_dtype": gather_dtype}
    del options["axis_name"]
    setattr(base.update, "sharding", Sharding(stage, min_size, axes, **options))  # noqa: B010
    setattr(base.update, "wrapped", with_extra_args(tx))  # noqa: B010
    setattr(base.update, "on_parts", updated_by_others)  # noqa: B010
    return Sharded(base.init, base.update)


def _axes_to_split_over(over: AxisName | None, axis_name: AxisName) -> tuple[str, ...] | None:
    names = axis.names(axis_name)
    axes = None if over is None else axis.names(over)
    if axes is not None and not set(axes) <= set(names):
        raise ValueError(
            f"over={over!r} is not among the axes {names} of the gradient reduction. Write "
            f"over={names[-1]!r}, or name all data axes in axis_name=."
        )
    return axes
