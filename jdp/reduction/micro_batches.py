"""Gradients of one rank's rows, in micro-batches."""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdp import pytrees
from jdp.analysis.marks import MICRO_BATCH
from jdp.axis import AxisName
from jdp.collectives import call_order
from jdp.reduction import (
    declared_reductions,
    integer_parameters,
    loss_means,
    mixed_precision,
    row_weight,
    shard_gradients,
    step_context,
)
from jdp.reduction.accumulation import (
    accumulated,
    num_micro_batches,
    num_rows,
    require_typed_keys,
    split,
)
from jdp.reduction.local_gradients import LeafGradients, WholeGradients, local_value_and_grad
from jdp.reduction.scope import Scope
from jdp.reduction.shard_gradients import ShardGradients
from jdp.reduction.step_metrics import take_rows
from jdp.reduction.unsharded_gradients import WholeMeans
from jdp.validation import int_at_least

# The share of a micro-batch in the loss of the step is known only after the last one.
_OWN_WEIGHT = (
    "jdp.value_and_grad(weight=...) is not the weight of the step, which weighs the ranks. Give "
    "the weight to jdp.train_step(weight=...) alone, which then also weighs the micro-batches."
)
_NO_ROWS = (
    "accumulate= and micro_batch_rows= split the rows that follow the parameters, and got none: "
    "rows that the loss closes over cannot be split. Write loss_fn(params, batch), and call "
    "jdp.value_and_grad(loss_fn, ...)(params, batch)."
)


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    accumulate: int | None = None,
    micro_batch_rows: int | None = None,
    has_aux: bool = False,
    weight: Callable[[Any], Any] | None = None,
    allow_int: bool = False,
    reductions: Mapping[str, str] | None = None,
    axis_name: AxisName = "data",
) -> Callable[..., tuple[Any, Any]]:
    """Make a function that gives the loss and this rank's gradient, in k micro-batches.

    The result equals that of the batch in one go, in a fraction of the memory for activations, and
    is reduced once, as with DDP's `no_sync`. On CPUs all micro-batches run in one `lax.scan`;
    elsewhere the last one runs behind it, so that its backward pass can hide the reduction.

    `accumulate` is k. `micro_batch_rows` is the number of rows that fit into memory, and k follows
    from the rows of a rank: a run that continues with fewer ranks takes more micro-batches, and not
    more memory.

    With `jdp.sharded(stage=2)` and `stage=3` it scatters a gradient as soon as it is complete, and
    adds up parts over micro-batches: the gradients of all parameters of the state that train are
    means over the ranks already, but for those under a `vmap`, `scan`, `jit` of yours. At stage 3
    it gathers a parameter where the loss uses it, and again on the way back.

    Also the helper for a `shard_map` of your own with check_vma=True: it keeps loss and gradient
    local, where plain `jax.value_and_grad` lets JAX sum the gradient. `mean_over_ranks` and
    `sync_gradients` average them.

    Args:
      loss_fn: `loss_fn(params, batch, *rest) -> loss`, the mean over the rows of `batch`; with
        `has_aux` `-> (loss, aux)`. `loss_fn(params)`, which closes over its rows, cannot be split
        into micro-batches.
      accumulate: number k of micro-batches, >= 1; this rank's rows must divide by it. Give this
        or `micro_batch_rows`; without either, one go.
      micro_batch_rows: the most rows of this rank in one micro-batch, >= 1. k is as small as that
        allows, and they are equal, but for the last one where the rows do not divide: 17 rows by
        at most 8 are 6, 6 and 5, each weighed by its rows. The loss is then traced twice.
      has_aux: `aux` comes back too: float leaves averaged like the loss, `jdp.rows` joined.
      weight: `weight(batch)`, how much a micro-batch counts. Default: that of the step
        (`train_step(weight=...)`), else its rows. Where it is not the step's, a mean or sum over
        ranks inside the loss cannot be differentiated.
      allow_int: let parameters be integers, too, with gradients of zeros in the dtype float0, as
        `jax.value_and_grad` does.
      reductions: key in `params` -> "max", "min" or "sum": the gradients of the leaves below it are
        statistics that a `jax.custom_vjp` returns. They are combined by that operation over
        micro-batches and ranks, without weights. Keep them from the optimizer. Flax's
        `_overwrite_with_gradient` is "max", and needs no entry.
      axis_name: the data axis.

    Returns:
      `fn(params, batch, *rest) -> (loss, grads)`, or `((loss, aux), grads)`. Typed random
      keys among `rest` are split over the micro-batches; everything else in it is passed to each.

    Raises:
      ValueError: if the rows do not divide by `accumulate`; if a leaf of the batch has other rows
        than the first; if both `accumulate` and `micro_batch_rows` are given; if `reductions`
        has another operation, or a key that is not in `params`.
      TypeError: if `aux` holds a leaf of which no mean is defined; a parameter is not a float,
        without `allow_int`; the loss draws from a raw `jax.random.PRNGKey` of `rest`; a number of
        micro-batches or rows is not an integer; or there are several, and no batch is given.

    >>> import jax.numpy as jnp
    >>> loss_fn = lambda w, x: jnp.mean((w * x) ** 2)
    >>> loss, grad = value_and_grad(loss_fn, accumulate=4)(jnp.float32(2.0), jnp.arange(8.0))
    >>> float(loss), float(grad)
    (70.0, 70.0)
    """
    _require_choice(accumulate, micro_batch_rows)
    if allow_int:
        options: Any = {"has_aux": has_aux, "weight": weight, "axis_name": axis_name}
        options |= {"accumulate": accumulate, "micro_batch_rows": micro_batch_rows}
        options["reductions"] = reductions
        return integer_parameters.left_out(loss_fn, functools.partial(value_and_grad, **options))

    @functools.wraps(loss_fn)
    def named(params: Any, *args: Any) -> tuple[Any, Any]:
        if not args and ((accumulate or 1) > 1 or micro_batch_rows is not None):
            raise TypeError(_NO_ROWS)
        with mixed_precision.named_loss(params):
            k = num_micro_batches(args[0], accumulate, micro_batch_rows) if args else 1
            statistics = declared_reductions.operations(params, reductions)
            loss = _MicroBatchedLoss(loss_fn, has_aux, weight, axis_name, statistics)
            derivative = loss.derivative(params, k)
            if k > 1:
                return loss.accumulate(derivative, args[0], args[1:], k)
            value, local = derivative.differentiate(loss_fn, has_aux, args)
            loss_means.offer(step_context.current(axis_name), value)
            return value, loss.whole(derivative, local)

    return named


class _MicroBatchedLoss(NamedTuple):
    """A loss whose micro-batches are differentiated; the first fields are as in `value_and_grad`.

    Attributes:
      statistics: position of a leaf whose gradient is a statistic -> its operation.
    """

    loss_fn: Callable[..., Any]
    has_aux: bool
    weight: Callable[[Any], Any] | None
    axis_name: AxisName
    statistics: Mapping[int, str]

    def derivative(self, params: Any, k: int) -> WholeGradients | ShardGradients:
        """Return the derivative with respect to parameters, for k micro-batches."""
        is_sent = k == 1 or not self._weights()[1]
        options: Any = {"is_sent": is_sent, "is_at_once": k == 1, "besides": self.statistics}
        wholes = WholeMeans(params, self.axis_name, **options)
        shards = shard_gradients.shard_gradients(params, self.axis_name, wholes, self.statistics)
        shards = shard_gradients.shard_gradients(params, self.axis_name, wholes, self.statistics)
        # Here, not in the jitted part: only here it shows whether the values are typed.
        return shards or WholeGradients(
            params, local_value_and_grad(self.loss_fn, self.has_aux, self.axis_name), wholes
        )

    def whole(self, derivative: WholeGradients | ShardGradients, grads: LeafGradients) -> Any:
        """Return the tree of gradients, like the parameters."""
        found = derivative.whole(grads)
        return declared_reductions.over_ranks(found, self.statistics, self.axis_name)

    def _weights(self) -> tuple[Callable[[Any], Any] | None, bool]:
        """Return the weight of rows, and whether it is another one than that of the step."""
        step = step_context.current(self.axis_name)
        of_step = None if step is None else step.weight_fn
        is_own = step is not None and self.weight is not None and self.weight is not of_step
        return self.weight or of_step, is_own

    def accumulate(
        self, derivative: WholeGradients | ShardGradients, batch: Any, rest: tuple, k: int
    ) -> tuple[Any, Any]:
        """Return the value of the loss, and this rank's gradient, in k > 1 micro-batches."""
        weight_fn, is_own = self._weights()
        looped, last, join = split(batch, rest, k, is_whole=step_context.platform() == "cpu")
        # Multiplying by 1 / 2**i is exact. It becomes part of the loop's own sum, where a division
        # behind the loop reads and writes all gradients once more.
        is_scaled = weight_fn is None and last is None and k & (k - 1) == 0
        full, rows_of_loop = 1 / k if is_scaled else 1, num_rows(looped[0], dim=1)

        def entered(batch: Any) -> Any:
            options: Any = {"nested": True, "why_no_gradient": _OWN_WEIGHT if is_own else ""}
            return step_context.entered(self.axis_name, batch, weight_fn, **options)

        part = self._part(
            derivative, join, entered, lambda batch: full * num_rows(batch) / rows_of_loop
        )
        token = call_order.first_token() if derivative.sends else None
        require_typed_keys(part, token, looped, rest)
        token, ((means, grads), *reduced), rows = accumulated(
            part, token, looped, last, is_scaled=is_scaled
        )
        if token is not None:
            call_order.passed(token)
        num_reported = len(rows) - len(self.statistics)
        value = pytrees.put_nodes(means, rows[:num_reported])
        loss_means.offer(step_context.current(self.axis_name), value)
        for i, of_rounds in zip(self.statistics, rows[num_reported:], strict=True):
            grads[i] = declared_reductions.over_rounds(of_rounds, self.statistics[i])
        return value, self.whole(derivative, LeafGradients(grads, *reduced))

    def _part(
        self,
        derivative: WholeGradients | ShardGradients,
        join: Callable[[dict], tuple],
        entered: Callable[[Any], AbstractContextManager[Scope]],
        count: Callable[[Any], float],
    ) -> Callable[[Any, Any], Any]:
        """Return the jitted function of one micro-batch, as `accumulated` calls it."""

        def part(micro_batch: Any) -> Any:
            batch, keys = micro_batch
            with entered(batch) as micro:
                args = batch, *join(keys)
                value, grads = derivative.differentiate(self.loss_fn, self.has_aux, args)
            means, rows = take_rows(value)
            means = _require_means(means)
            rows = [*rows, *(grads.local[i][None] for i in self.statistics)]
            for i in self.statistics:
                grads.local[i] = None
            rows_count = jnp.asarray(count(batch), float)
            own = rows_count if micro.weight is None else micro.weight
            if not grads.means:
                return (own,), ((means, grads.local),), rows
            # A mean over all ranks counts by the weight of all of them.
            of_all = own if micro.weight is None else row_weight.total_weight(own, self.axis_name)
            return (own, of_all), ((means, grads.local), grads.means), rows

        part.__name__ = part.__qualname__ = MICRO_BATCH
        # One trace for all its uses: shapes, keys, the scan, the last one.
        return jax.jit(call_order.threaded(part))


def _require_choice(accumulate: int | None, micro_batch_rows: int | None) -> None:
    if accumulate is not None and micro_batch_rows is not None:
        raise ValueError(
            f"accumulate={accumulate} and micro_batch_rows={micro_batch_rows} both say how the "
            "rows are split: give the number of micro-batches, or how many rows fit into one."
        )
    for name, number in (("accumulate", accumulate), ("micro_batch_rows", micro_batch_rows)):
        if number is not None:
            int_at_least(name, number, least=1)


def _require_means(value: Any) -> Any:
    """Refuse a loss or aux that has no mean over micro-batches."""

    def visit(path: Any, leaf: Any) -> jax.Array:
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"aux{jax.tree_util.keystr(path[1:])} is {dtype}{list(jnp.shape(leaf))}, but "
                "aux is averaged over micro-batches, and the mean of integers is not an integer. "
                "Cast it to float32, or return it per row with jdp.rows(x)."
            )
        return jnp.asarray(leaf)

    return jax.tree_util.tree_map_with_path(visit, value)
