"""Gradients of one rank's rows, in micro-batches."""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdp import axis, jax_compat, pytrees
from jdp.analysis import jaxprs
from jdp.analysis.marks import MICRO_BATCH, ROUNDS, mark
from jdp.axis import AxisName
from jdp.collectives import call_order
from jdp.reduction import (
    declared_reductions,
    mixed_precision,
    row_weight,
    shard_gradients,
    step_context,
    step_metrics,
)
from jdp.reduction.local_gradients import (
    LeafGradients,
    WholeGradients,
    WholeMeans,
    local_value_and_grad,
)
from jdp.reduction.shard_gradients import ShardGradients
from jdp.reduction.step_context import Scope
from jdp.reduction.step_metrics import take_rows
from jdp.validation import int_at_least


def left_out_integers(
    loss_fn: Callable[..., Any], value_and_grad: Callable[[Any], Callable[..., tuple[Any, Any]]]
) -> Callable[..., tuple[Any, Any]]:
    """Return `value_and_grad(loss_fn)` in float leaves; others get float0 zeros."""

    @functools.wraps(loss_fn)
    def fn(params: Any, *rest: Any) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(params)
        is_float = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]

        def filled(floats: Any, others: list[Any]) -> Any:
            left = iter(jax.tree.leaves(floats))
            pairs = zip(others, is_float, strict=True)
            return tree.unflatten([next(left) if flag else other for other, flag in pairs])

        def loss(floats: Any, *rest: Any) -> Any:
            return loss_fn(filled(floats, leaves), *rest)

        pairs = zip(leaves, is_float, strict=True)
        floats = tree.unflatten([leaf if flag else None for leaf, flag in pairs])
        value, grads = value_and_grad(loss)(floats, *rest)
        zeros = [np.zeros(np.shape(leaf), jax.dtypes.float0) for leaf in leaves]
        return value, filled(grads, zeros)

    return fn


def num_rows(batch: Any, dim: int = 0) -> int:
    """Return the size of the first leaf's dim."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    return shapes[0][dim] if shapes and len(shapes[0]) > dim else 1


def num_micro_batches(batch: Any, accumulate: int | None, micro_batch_rows: int | None) -> int:
    """Count the micro-batches; `accumulate` is >= 1, None for 1."""
    rows_here = num_rows(batch)
    if micro_batch_rows is not None:
        k, option = max(1, -(-rows_here // micro_batch_rows)), f"{micro_batch_rows=}"
    else:
        k, option = accumulate or 1, f"{accumulate=}"
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch) if k > 1 else ():
        name, shape = f"`batch{jax.tree_util.keystr(path)}`", jnp.shape(leaf)
        rows = f"{option}, but {name} has {shape[0] if shape else 'no'} rows on each rank"
        if micro_batch_rows is None and (not shape or shape[0] % k):
            raise ValueError(
                f"{rows}, which is not divisible by {k}. Use a batch size that is a multiple of "
                "ranks * accumulate, or pass the number of rows that fit into memory: "
                "micro_batch_rows=."
            )
        if micro_batch_rows is not None and shape[:1] != (rows_here,):
            raise ValueError(
                f"{rows}, and the first leaf has {rows_here}. Row i of every leaf must belong "
                "together. Pass values that are not per row as a further argument."
            )
    return k


def split_micro_batches(
    batch: Any, rest: tuple, k: int, *, is_whole: bool
) -> tuple[Any, Any, Callable[[dict], tuple]]:
    """Split rows and keys into k >= 2 parts: the loop's parts, stacked, and the last part.

    Each part is (rows, keys); `join(keys)` inserts the keys into `rest`. With `is_whole` the loop
    has all k parts, without a last one unless it is smaller.
    """
    is_whole = is_whole and num_rows(batch) % k == 0
    m = k if is_whole else k - 1

    def looped(leaf: Any) -> jax.Array:
        size = -(-leaf.shape[0] // k)
        return jnp.reshape(leaf[: m * size], (m, size, *leaf.shape[1:]))

    def last(leaf: Any) -> jax.Array:
        return leaf[m * -(-leaf.shape[0] // k) :]

    flat, treedef = jax.tree.flatten(rest)
    keys = {i: _split_key(leaf, k) for i, leaf in enumerate(flat) if pytrees.is_key(leaf)}

    def join(keys: dict[int, jax.Array]) -> tuple:
        return jax.tree.unflatten(treedef, [keys.get(i, leaf) for i, leaf in enumerate(flat)])

    in_loop = jax.tree.map(looped, batch), {i: key[:m] for i, key in keys.items()}
    behind = jax.tree.map(last, batch), {i: key[-1] for i, key in keys.items()}
    return in_loop, None if is_whole else behind, join


def _split_key(key: jax.Array, k: int) -> jax.Array:
    parts = jax.vmap(lambda one: jax.random.split(one, k), out_axes=1)(key.reshape(-1))
    return parts.reshape(k, *key.shape)


def _require_typed_keys(
    part: Callable[[Any, Any], Any], token: Any, looped: Any, rest: tuple
) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(rest)
    arrays = [(path, leaf) for path, leaf in leaves if pytrees.is_array(leaf)]
    uints = [(path, leaf) for path, leaf in arrays if jnp.result_type(leaf) == jnp.uint32]
    if not uints:
        return
    eqns = jaxprs.equations(jax.make_jaxpr(part)(token, _first(looped)))
    shapes = [eqn.params["impl"].key_shape for eqn in eqns if eqn.primitive.name == "random_wrap"]
    for (position, *path), leaf in uints:
        if jnp.shape(leaf)[-1:] in shapes:
            name = f"argument {position.idx + 3} of the loss{jax.tree_util.keystr((*path,))}"
            raise TypeError(
                f"{name} is a raw random key, uint32{list(jnp.shape(leaf))}. jdp cannot "
                "distinguish it from data and does not split it, so every micro-batch would draw "
                "the same numbers. Pass a typed key: jax.random.key(seed) instead of "
                "jax.random.PRNGKey(seed), or jax.random.wrap_key_data(key)."
            )


def _first(looped: Any) -> Any:
    return jax.tree.map(lambda x: x[0], looped)


# XLA for CPUs computes gradients of convolutions in loops 40 times as slowly (docs/surprises.md).
_MOST_OPEN = 32


def accumulated(part: Any, token: Any, looped: Any, last: Any, *, is_scaled: bool) -> Any:
    """Average `part(token, micro_batch)` by weight, and join rows; return the token, too."""
    first = _first(looped)
    traced = part.trace(token, first)
    of_one = traced.out_info  # two frames fewer than jax.eval_shape
    _, (_, like, _) = of_one
    num = len(jax.tree.leaves(looped)[0])
    is_open = num <= _MOST_OPEN and _is_slow_in_loops(traced.jaxpr)
    if last is not None:
        _require_equal_shapes(part.trace(token, last).out_info[1][1], like)

    def zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))  # bfloat16 loses digits

    def add(carry: Any, micro_batch: Any) -> tuple[Any, list[jax.Array]]:
        if is_open:  # one after the other, in the memory of one
            carry, micro_batch = lax.optimization_barrier((carry, micro_batch))
        token, sums = carry
        token, (weights, means, rows) = part(token, micro_batch)

        def plus(weight: jax.Array, s: jax.Array, x: jax.Array) -> jax.Array:
            return s + row_weight.weighed(x, weight).astype(s.dtype)

        totals = tuple(total + weight for total, weight in zip(sums[0], weights, strict=True))
        added = (
            jax.tree.map(functools.partial(plus, weight), old, new)
            for weight, old, new in zip(weights, sums[1], means, strict=True)
        )
        return (token, (totals, tuple(added))), rows

    nothing = token, (tuple(jnp.zeros((), float) for _ in like), jax.tree.map(zeros, like))
    if any(map(axis.varying_axes, jax.tree.leaves(of_one))):  # and so do sums, by their types
        nothing = axis.as_typed_like(nothing, jax.eval_shape(add, nothing, first)[0])
    carry, rows = lax.scan(add, nothing, looped, unroll=num if is_open else 1)
    carry, last_rows = (carry, None) if last is None else add(carry, last)
    token, (totals, sums) = carry
    means = _means(totals, sums, is_scaled=is_scaled)
    means = jax.tree.map(lambda s, x: s.astype(x.dtype), means, like)
    joined = [stacked.reshape(-1, *stacked.shape[2:]) for stacked in rows]
    if last_rows is not None:
        joined = [jnp.concatenate(parts) for parts in zip(joined, last_rows, strict=True)]
    return token, means, joined


def _is_slow_in_loops(jaxpr: Any) -> bool:
    # Without barriers the parts would be in memory at once.
    if step_context.platform() != "cpu" or jax_compat.FUSES_ACROSS_BARRIERS:
        return False
    return "conv_general_dilated" in jaxprs.primitive_names(jaxpr)


def _means(totals: tuple, sums: tuple, *, is_scaled: bool) -> Any:
    if is_scaled:
        return jax.tree.map(lambda s: mark(s, kind=ROUNDS, path="", axes=()), sums)
    divisors = [row_weight.divisor(total) for total in totals]
    return tuple(
        jax.tree.map(lambda s, divisor=divisor: s / divisor, tree)
        for tree, divisor in zip(sums, divisors, strict=True)
    )


def _require_equal_shapes(last: Any, others: Any) -> None:
    """Refuse a mean whose shape depends on the micro-batch's rows."""
    named = jax.tree_util.tree_leaves_with_path(others)
    for (path, other), leaf in zip(named, jax.tree.leaves(last), strict=True):
        if other.shape != leaf.shape:
            raise ValueError(
                f"the loss returns {other.dtype}{list(other.shape)} at "
                f"{jax.tree_util.keystr(path)} for one micro-batch and "
                f"{leaf.dtype}{list(leaf.shape)} for the last one, which has fewer rows. Arrays "
                "of different shapes cannot be averaged. Return one value per row as jdp.rows(x)."
            )


# A micro-batch's share is known only after the last one.
_OWN_WEIGHT = (
    "jdp.value_and_grad(weight=...) is not the weight of the step, which weights the ranks. Pass "
    "the weight only to jdp.train_step(weight=...), which then also weights the micro-batches."
)
_NO_ROWS = (
    "accumulate= and micro_batch_rows= split the arguments after the parameters, and got none. "
    "They cannot split rows in a closure. Write loss_fn(params, batch), and call "
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

    The result equals that of the whole batch, with less activation memory, and is reduced once, as
    with DDP's `no_sync`. On CPUs one `lax.scan` runs all micro-batches; elsewhere the last one
    follows the scan, so its backward pass can hide the reduction.

    With `jdp.sharded(stage=2)` and `stage=3` it scatters complete gradients at once, and adds up
    shards over micro-batches. Gradients of the state's trained parameters are then already means
    over the ranks, except under your own `vmap`, `scan` or `jit`. Stage 3 gathers a parameter where
    the loss uses it, and again in the backward pass.

    In your own `shard_map` with check_vma=True loss and gradient stay local, where
    `jax.value_and_grad` lets JAX sum the gradient; average both with `mean_over_ranks` and
    `sync_gradients`.

    Args:
      loss_fn: `loss_fn(params, batch, *rest) -> loss`, the mean over the rows of `batch`; with
        `has_aux` `-> (loss, aux)`. `loss_fn(params)` with captured rows has no micro-batches.
      accumulate: number k of micro-batches, >= 1, a divisor of this rank's rows. Give this or
        `micro_batch_rows`; default: one.
      micro_batch_rows: the most rows of this rank in one micro-batch, >= 1, so fewer ranks use more
        micro-batches, not more memory. Only the last may be smaller: 17 rows by at most 8 are 6, 6
        and 5, weighted by rows, and the loss is traced twice.
      has_aux: also return `aux`: float leaves averaged like the loss, `jdp.rows` joined.
      weight: `weight(batch)` of a micro-batch. Default: that of the step
        (`train_step(weight=...)`), else its rows. With another weight than the step's, a mean or
        sum over ranks inside the loss cannot be differentiated.
      allow_int: allow integer parameters, with float0 zeros as gradients.
      reductions: key in `params` -> "max", "min" or "sum": gradients of the leaves below it are
        statistics from a `jax.custom_vjp`, combined by that operation over micro-batches and ranks,
        without weights. Keep them from the optimizer. Default: "max" for Flax's
        `_overwrite_with_gradient`.
      axis_name: the data axis.

    Returns:
      `fn(params, batch, *rest) -> (loss, grads)`, or `((loss, aux), grads)`. Typed random keys in
      `rest` are split over the micro-batches; each gets everything else unchanged.

    Raises:
      ValueError: the rows do not divide by `accumulate`; leaves of the batch have different
        rows; both `accumulate` and `micro_batch_rows` are given; `reductions` has another
        operation, or a key that is not in `params`.
      TypeError: `aux` has a leaf without a mean; a parameter is not a float, without
        `allow_int`; the loss draws from a raw `jax.random.PRNGKey` of `rest`; a number is not
        an integer; or there are several micro-batches without a batch.

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
        return left_out_integers(loss_fn, functools.partial(value_and_grad, **options))

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
            step_metrics.offer_mean(step_context.current(axis_name), value)
            return value, loss.whole(derivative, local)

    return named


class _MicroBatchedLoss(NamedTuple):
    """A loss in micro-batches, with fields as in `value_and_grad`."""

    loss_fn: Callable[..., Any]
    has_aux: bool
    weight: Callable[[Any], Any] | None
    axis_name: AxisName
    statistics: Mapping[int, str]

    def derivative(self, params: Any, k: int) -> WholeGradients | ShardGradients:
        is_sent = k == 1 or not self._weights()[1]
        options: Any = {"is_sent": is_sent, "is_at_once": k == 1, "besides": self.statistics}
        wholes = WholeMeans(params, self.axis_name, **options)
        shards = shard_gradients.shard_gradients(params, self.axis_name, wholes, self.statistics)
        # The jitted part does not show whether values are typed.
        return shards or WholeGradients(
            params, local_value_and_grad(self.loss_fn, self.has_aux, self.axis_name), wholes
        )

    def whole(self, derivative: WholeGradients | ShardGradients, grads: LeafGradients) -> Any:
        found = derivative.whole(grads)
        return declared_reductions.over_ranks(found, self.statistics, self.axis_name)

    def _weights(self) -> tuple[Callable[[Any], Any] | None, bool]:
        """Return the rows' weight, and whether it is not the step's."""
        step = step_context.current(self.axis_name)
        of_step = None if step is None else step.weight_fn
        is_own = step is not None and self.weight is not None and self.weight is not of_step
        return self.weight or of_step, is_own

    def accumulate(
        self, derivative: WholeGradients | ShardGradients, batch: Any, rest: tuple, k: int
    ) -> tuple[Any, Any]:
        weight_fn, is_own = self._weights()
        looped, last, join = split_micro_batches(
            batch, rest, k, is_whole=step_context.platform() == "cpu"
        )
        # A product with 1 / 2**i is exact and joins the sum; a later division reads and writes all
        # again.
        is_scaled = weight_fn is None and last is None and k & (k - 1) == 0
        full, rows_of_loop = 1 / k if is_scaled else 1, num_rows(looped[0], dim=1)

        def entered(batch: Any) -> Any:
            options: Any = {"nested": True, "why_no_gradient": _OWN_WEIGHT if is_own else ""}
            return step_context.entered(self.axis_name, batch, weight_fn, **options)

        part = self._part(
            derivative, join, entered, lambda batch: full * num_rows(batch) / rows_of_loop
        )
        token = call_order.first_token() if derivative.sends else None
        _require_typed_keys(part, token, looped, rest)
        token, ((means, grads), *reduced), rows = accumulated(
            part, token, looped, last, is_scaled=is_scaled
        )
        if token is not None:
            call_order.passed(token)
        num_reported = len(rows) - len(self.statistics)
        value = pytrees.put_nodes(means, rows[:num_reported])
        step_metrics.offer_mean(step_context.current(self.axis_name), value)
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
            # A mean over all ranks has the weight of all.
            of_all = own if micro.weight is None else row_weight.total_weight(own, self.axis_name)
            return (own, of_all), ((means, grads.local), grads.means), rows

        part.__name__ = part.__qualname__ = MICRO_BATCH
        # One trace for shapes, keys, the scan, and the last one.
        return jax.jit(call_order.threaded(part))


def _require_choice(accumulate: int | None, micro_batch_rows: int | None) -> None:
    if accumulate is not None and micro_batch_rows is not None:
        raise ValueError(
            f"accumulate={accumulate} and micro_batch_rows={micro_batch_rows} exclude each "
            "other. Pass the number of micro-batches or the rows of one."
        )
    for name, number in (("accumulate", accumulate), ("micro_batch_rows", micro_batch_rows)):
        if number is not None:
            int_at_least(name, number, least=1)


def _require_means(value: Any) -> Any:
    def visit(path: Any, leaf: Any) -> jax.Array:
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"aux{jax.tree_util.keystr(path[1:])} is {dtype}{list(jnp.shape(leaf))}, but aux "
                "is averaged over micro-batches, and the mean of integers is not an integer. "
                "Cast it to float32, or return it per row with jdp.rows(x)."
            )
        return jnp.asarray(leaf)

    return jax.tree_util.tree_map_with_path(visit, value)
