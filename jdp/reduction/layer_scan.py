"""Scans over layers with sharded parameters or gradients."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
from jax import lax

from jdp import axis
from jdp.analysis import jaxprs
from jdp.analysis.marks import SHARED, mark
from jdp.collectives import buckets, shards
from jdp.collectives.xla import scaled, split_scale
from jdp.reduction import step_context, wait_order, weighted_sum
from jdp.reduction.layer_hooks import instantiated, is_zero
from jdp.reduction.mixed_precision import cast
from jdp.reduction.scattered_gradients import proved
from jdp.reduction.shard_registry import Shard, known


class TracedLayer(NamedTuple):
    """One round of a scan: `(closed-over values, carry, layer, x) -> (carry, y)`, flat."""

    jaxpr: Any
    closed_over: list[jax.Array]
    num_carry: int
    carry_tree: Any
    y_tree: Any

    def __call__(
        self, closed_over: Sequence, carry: Sequence, layer: Sequence, x: Sequence
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the next carry's leaves, and those of y."""
        closed = jax.extend.core.ClosedJaxpr(self.jaxpr, [])
        outs = jax.extend.core.jaxpr_as_fun(closed)(*closed_over, *carry, *layer, *x)
        return outs[: self.num_carry], outs[self.num_carry :]


def traced_layer(
    f: Callable[[Any, Any], tuple[Any, Any]], init: Any, params: Any, xs: Any, *, reverse: bool
) -> tuple[TracedLayer, list[jax.Array]]:
    """Trace a scan's function, and return the first carry's leaves, too."""

    def scan(init: Any, params: Any, xs: Any) -> Any:
        return lax.scan(f, init, params if xs is None else (params, xs), reverse=reverse)

    last, _ = jax.eval_shape(scan, init, params, xs)
    carry, carry_tree = jax.tree.flatten(init)
    # A carry that begins as a Python number has the layers' dtype.
    carry = [_typed_like(x, like) for x, like in zip(carry, jax.tree.leaves(last), strict=True)]

    def one(carry: Any, params: Any, xs: Any) -> Any:
        return f(carry, params if xs is None else (params, xs))

    first = jax.eval_shape(lambda tree: jax.tree.map(lambda x: x[0], tree), (params, xs))
    closed, (_, y) = jax.make_jaxpr(one, return_shape=True)(carry_tree.unflatten(carry), *first)
    body = jaxprs.opened(closed)
    jaxpr = body.replace(constvars=[], invars=[*body.constvars, *body.invars])
    layer = TracedLayer(jaxpr, [*closed.consts], len(carry), carry_tree, jax.tree.structure(y))
    return layer, carry


def is_inexact(x: Any) -> bool:
    """Whether an array has a gradient."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _typed_like(x: Any, like: Any) -> jax.Array:
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    if jax.typeof(x).weak_type and not like.weak_type:
        return lax.convert_element_type(x, like.dtype)
    return x


class _LayerShards:
    """Gathers single layers of stacked shards, and scatters their gradients.

    Args:
      parts: shards over equal axes, split on a dim after that of the layers.
      axes: all axes of the step.
    """

    def __init__(self, parts: Sequence[Shard], axes: tuple[str, ...]):
        self._dims = [part.dim - 1 for part in parts]
        self._over = parts[0].axes
        self._others = tuple(name for name in axes if name not in self._over)
        self._axes = axes
        step = step_context.current(axes)
        assert step is not None
        self._mesh = step.mesh
        algorithms = {id(part.all_reduce): part.all_reduce for part in parts}
        self._all_reduce = parts[0].all_reduce if len(algorithms) == 1 else None
        self._weights, self._scale = weighted_sum.factors(step.weight, axes, mean=True)
        self._dtypes = [part.value.dtype for part in parts]
        self._gather_dtypes = [part.gather_dtype or part.value.dtype for part in parts]
        self._reduce_dtypes = [part.reduce_dtype or part.value.dtype for part in parts]
        shapes = [part.value.shape[1:] for part in parts]
        # one per dtype: all are complete at once
        sent = list(map(jax.ShapeDtypeStruct, shapes, self._reduce_dtypes))
        self._plan = buckets.plan(sent, sys.maxsize)
        self._planned_further = [[parts[i].further[1:] for i in bucket] for bucket in self._plan]
        self._shapes = [
            (*shape[:dim], shape[dim] * axis.size(self._over), *shape[dim + 1 :])
            for shape, dim in zip(shapes, self._dims, strict=True)
        ]

    @property
    def share(self) -> jax.Array | None:
        """This rank's share of the weights; None: equal weights."""
        return None if self._weights.forward is None else lax.stop_gradient(self._weights.forward)

    def zeros(self) -> list[jax.Array]:
        return [jnp.zeros(*x) for x in zip(self._shapes, self._gather_dtypes, strict=True)]

    def gathered(self, stacked: Sequence[jax.Array], i: Any, share: Any) -> list[jax.Array]:
        """Return the whole layer `i`, `[]` int; its gradient is the mean over ranks."""
        own = [lax.dynamic_index_in_dim(x, i, keepdims=False) for x in stacked]

        # Of nested derivatives, JAX differentiates what is inside the inner one.
        @jax.custom_vjp
        def gather(own: list[jax.Array], share: Any) -> list[jax.Array]:
            sent = self._bucketed(list(map(cast, own, self._gather_dtypes)))
            with self._weights.named():
                planned = shards.all_gather(
                    *sent, self._over, mesh=self._mesh, further=self._planned_further
                )
            return buckets.in_order(planned, self._plan)

        def backward(share: Any, gradient: list[jax.Array]) -> tuple[list[jax.Array], Any]:
            return self.means(gradient, share), jax.tree.map(jnp.zeros_like, share)

        gather.defvjp(lambda own, share: (gather(own, share), share), backward)
        return gather(own, share)

    def means(self, gradient: Sequence[jax.Array], share: Any) -> list[jax.Array]:
        return self.divided(self.sums(gradient, share), share)

    def sums(self, gradient: Sequence[jax.Array], share: Any) -> list[jax.Array]:
        """Return shards of the sum; `divided` makes means after a loop."""
        weights = self._weights.by_share(share)
        local = []
        for x, dtype, sent in zip(gradient, self._dtypes, self._reduce_dtypes, strict=True):
            before, _ = split_scale(self._scale, sent)
            local.append(cast(scaled(weights.term(cast(x, dtype)), before), sent))
        with weights.named():
            sums = shards.reduce_scatter(
                *self._bucketed(local),
                self._over,
                mesh=self._mesh,
                further=self._planned_further,
                all_reduce=self._all_reduce,
            )
            if self._others:
                sums = [axis.psum(x, self._others, axis.platform(self._mesh)) for x in sums]
        return list(map(cast, buckets.in_order(sums, self._plan), self._dtypes))

    def divided(self, sums: Sequence[jax.Array], share: Any) -> list[jax.Array]:
        """Return means for sums of one layer, or of stacked layers."""
        weights = self._weights.by_share(share)
        scales = [split_scale(self._scale, dtype)[1] for dtype in self._reduce_dtypes]
        return [weights.total(scaled(x, by)) for x, by in zip(sums, scales, strict=True)]

    def proved(self, stacked: Sequence[jax.Array]) -> list[jax.Array]:
        return [proved(x, self._axes, mean=True) for x in stacked]

    def _bucketed(self, leaves: Sequence[Any]) -> tuple[list[list[Any]], list[list[int]]]:
        values = [[leaves[i] for i in bucket] for bucket in self._plan]
        return values, [[self._dims[i] for i in bucket] for bucket in self._plan]


class Operands(NamedTuple):
    """A layer loop's operands, or their gradients; `xs` are no parameters."""

    closed_over: Sequence[Any]
    carry: Sequence[Any]
    shards: Sequence[Any]
    wholes: Sequence[Any]
    xs: Sequence[Any]


class _LayerLoop(NamedTuple):
    """A loop over layers; leaves of a layer are gathered if `is_split`."""

    layer: TracedLayer
    shards: _LayerShards
    is_split: Sequence[bool]
    num_layers: int
    is_reverse: bool
    unroll: int | bool

    def turned(self) -> "_LayerLoop":
        return self._replace(is_reverse=not self.is_reverse)

    @property
    def first(self) -> int:
        return self.num_layers - 1 if self.is_reverse else 0

    def after(self, i: Any) -> Any:
        """Return the next layer, or `i` for the last."""
        return jnp.maximum(i - 1, 0) if self.is_reverse else jnp.minimum(i + 1, self.num_layers - 1)

    def before(self, i: Any) -> Any:
        """Return the layer before, or `i` for the first."""
        return self.turned().after(i)

    def gathered(
        self, stacked: Sequence[jax.Array], i: Any, share: Any, ready: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Return the whole layer after layer `i`, `[]` int."""
        # Without a loop XLA would gather all layers first.
        (following,) = wait_order.after([self.after(i)], ready if self.unroll != 1 else [])
        return self.shards.gathered(stacked, following, share)

    def joined(self, split: Sequence[jax.Array], wholes: Sequence[jax.Array]) -> list[jax.Array]:
        split_left, wholes_left = iter(split), iter(wholes)
        return [next(split_left if flag else wholes_left) for flag in self.is_split]

    def run(self, body: Any, state: Any, given: Any) -> tuple[Any, Any]:
        """Run `lax.scan(body, state, (numbers of the layers, *given))`."""
        numbers = jnp.arange(self.num_layers)
        options: Any = {"reverse": self.is_reverse, "unroll": self.unroll}
        return lax.scan(body, state, (numbers, *given), **options)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Perturbed:
    """Positions of the differentiated operands, static for residuals."""

    closed_over: tuple[int, ...]
    carry: tuple[int, ...]
    shards: tuple[int, ...]
    wholes: tuple[int, ...]
    xs: tuple[int, ...]


def perturbed(given: Operands) -> Perturbed:
    """Return the perturbed operands, always with the carry: it depends on earlier layers."""

    def positions(operands: Sequence[Any], *, always: bool = False) -> tuple[int, ...]:
        return tuple(
            i for i, x in enumerate(operands) if is_inexact(x.value) and (always or x.perturbed)
        )

    closed_over, carry, *stacked = given
    return Perturbed(
        positions(closed_over), positions(carry, always=True), *map(positions, stacked)
    )


class _Backward:
    def __init__(self, forward: _LayerLoop, operands: Operands, share: Any, of: Perturbed):
        self._loop = forward.turned()
        self._operands = operands
        self._share = share
        self._of = of

    def run(self, last: Sequence[Any], ys: Sequence[Any]) -> Operands:
        loop, operands, of = self._loop, self._operands, self._of
        own_ys = {i: y for i, y in enumerate(ys) if not is_zero(y)}
        shards = loop.shards
        late = shards.zeros() if of.shards else []
        cotangent = [instantiated(last[i]) for i in of.carry]
        # XLA would gather it with the forward pass's first one.
        (first,) = wait_order.after([jnp.asarray(loop.first)], cotangent)
        state = (
            cotangent,
            shards.gathered(operands.shards, first, self._share),
            late,
            [jnp.zeros_like(x) for x in operands.shards] if of.shards else [],
            [jnp.zeros_like(operands.closed_over[i]) for i in of.closed_over],
        )
        given = (operands.carry, operands.wholes, operands.xs, own_ys)
        state, stacked = loop.run(self._round, state, given)
        carry, _, late, means, closed_over = state
        if of.shards:
            sums = _put(means, shards.sums(late, self._share), loop.turned().first)
            means = shards.proved(shards.divided(sums, self._share))
        wholes, xs = stacked
        return Operands(
            _at(of.closed_over, closed_over, len(operands.closed_over)),
            _at(of.carry, carry, len(operands.carry)),
            [means[i] if i in of.shards else None for i in range(len(operands.shards))],
            _at(of.wholes, wholes, len(operands.wholes)),
            _at(of.xs, xs, len(operands.xs)),
        )

    def _round(self, state: Any, given: Any) -> Any:
        """Differentiate a layer, gather the next, and scatter the last gradient."""
        cotangent, layer, late, means, sums = state
        i, carry, wholes, x, y = given
        operands, of = self._operands, self._of
        following = self._loop.gathered(operands.shards, i, self._share, cotangent)
        new = self._loop.shards.sums(late, self._share) if late else []
        inputs = Operands(operands.closed_over, carry, layer, wholes, x)
        found = self._pulled_back(inputs, cotangent, y)
        # XLA waits for a sent array at its first use, so keep it behind the matmuls.
        new, following, found = lax.optimization_barrier((new, following, found))
        (place,) = wait_order.after([self._loop.before(i)], found.shards)
        means = _put(means, new, place)
        sums = [x + more for x, more in zip(sums, found.closed_over, strict=True)]
        late = found.shards if of.shards else []
        return (found.carry, following, late, means, sums), (found.wholes, found.xs)

    def _pulled_back(self, inputs: Operands, cotangent: list, ys: dict[int, Any]) -> Operands:
        of = self._of
        every = tuple(range(len(inputs.shards))) if of.shards else ()
        chosen = Operands(of.closed_over, of.carry, every, of.wholes, of.xs)

        def outputs(given: Operands) -> tuple[list, dict]:
            closed_over, carry, layer, wholes, x = (
                _with(values, where, new)
                for values, where, new in zip(inputs, chosen, given, strict=True)
            )
            new, y = self._loop.layer(closed_over, carry, self._loop.joined(layer, wholes), x)
            return [new[i] for i in of.carry], {i: y[i] for i in ys}

        given = Operands(
            *([values[i] for i in where] for values, where in zip(inputs, chosen, strict=True))
        )
        _, pull_back = jax.vjp(outputs, given)
        (found,) = pull_back((cotangent, ys))
        return found


def _put(stacked: Sequence[jax.Array], layer: Sequence[jax.Array], i: Any) -> list[jax.Array]:
    pairs = zip(stacked, layer, strict=True)
    return [lax.dynamic_update_index_in_dim(many, one, i, 0) for many, one in pairs]


def _with(values: Sequence[Any], positions: Sequence[int], new: Sequence[Any]) -> list[Any]:
    replaced = dict(zip(positions, new, strict=True))
    return [replaced.get(i, x) for i, x in enumerate(values)]


def _at(positions: Sequence[int], values: Sequence[Any], size: int) -> list[Any]:
    found = dict(zip(positions, values, strict=True))
    return [found.get(i) for i in range(size)]


def split_parts(params: Any, axes: tuple[str, ...]) -> list[Shard | None]:
    """Return each stacked parameter's shard; None if whole or split by layers."""
    found = [known(leaf) for leaf in jax.tree.leaves(params)]
    if step_context.current(axes) is None:
        return [None for _ in found]
    return [part if part is not None and part.dim >= 1 else None for part in found]


def scan_sharded(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    params: Any,
    xs: Any,
    parts: Sequence[Shard | None],
    *,
    axes: tuple[str, ...],
    reverse: bool,
    unroll: int | bool,
) -> tuple[Any, Any]:
    """Run `lax.scan` over sharded stacked parameters.

    Each round computes one layer, and gathers the next. The backward loop recomputes each layer,
    and scatters the gradient of the layer after it. At most two layers are whole at once. The
    forward pass keeps only carries, as under `jax.checkpoint`.

    Source: Rajbhandari et al. 2020, ZeRO stage 3, https://arxiv.org/abs/1910.02054.
    """
    layer, carry = traced_layer(f, init, params, xs, reverse=reverse)
    named = jax.tree_util.tree_leaves_with_path(params)
    pairs = [
        (jax.tree_util.keystr(path), leaf, part)
        for (path, leaf), part in zip(named, parts, strict=True)
    ]
    operands = Operands(
        closed_over=layer.closed_over,
        carry=carry,
        shards=[
            mark(part.value, kind=SHARED, path=path, axes=axes)
            for path, _, part in pairs
            if part is not None
        ],
        wholes=[jnp.asarray(leaf) for _, leaf, part in pairs if part is None],
        xs=[*map(jnp.asarray, jax.tree.leaves(xs))],
    )
    found = [part for part in parts if part is not None]
    num_layers = found[0].value.shape[0]
    is_split = [part is not None for part in parts]
    loop = _LayerLoop(layer, _LayerShards(found, axes), is_split, num_layers, reverse, unroll)
    carry, ys = _differentiable(loop, operands)
    return layer.carry_tree.unflatten(carry), layer.y_tree.unflatten(ys)


def _differentiable(
    loop: _LayerLoop, operands: Operands
) -> tuple[list[jax.Array], list[jax.Array]]:
    @jax.custom_vjp
    def run(operands: Operands, share: Any) -> Any:
        return _forward(loop, operands, share, is_kept=False)[0]

    def forward(operands: Operands, share: Any) -> Any:
        of = perturbed(operands)
        operands, share = jax.tree.map(lambda x: x.value, (operands, share))
        outputs, carries = _forward(loop, operands, share, is_kept=True)
        return outputs, (operands._replace(carry=carries), share, of)

    def backward(residuals: Any, cotangents: Any) -> Any:
        operands, share, of = residuals
        found = _Backward(loop, operands, share, of).run(*cotangents)
        return found, jax.tree.map(jnp.zeros_like, share)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(operands, loop.shards.share)


def _forward(
    loop: _LayerLoop, operands: Operands, share: Any, *, is_kept: bool
) -> tuple[tuple[list, list], list]:
    """Return `(last carry, stacked y)`, and the layers' carries if kept."""

    def body(state: Any, given: Any) -> Any:
        carry, layer = state
        i, wholes, x = given
        following = loop.gathered(operands.shards, i, share, carry)
        new, y = loop.layer(operands.closed_over, carry, loop.joined(layer, wholes), x)
        return (new, following), (y, carry if is_kept else [])

    first = loop.shards.gathered(operands.shards, loop.first, share)
    state = operands.carry, first
    (carry, _), (ys, carries) = loop.run(body, state, (operands.wholes, operands.xs))
    return (carry, ys), carries


def scan_whole(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    params: Any,
    xs: Any,
    parts: Sequence[Shard | None],
    *,
    axes: tuple[str, ...],
    reverse: bool,
    unroll: int | bool,
) -> tuple[Any, Any]:
    """Run `lax.scan` over whole parameters; at most two layers' gradients are whole at once."""
    named, tree = jax.tree_util.tree_flatten_with_path(params)
    is_split = [part is not None for part in parts]
    wholes = [
        mark(lax.stop_gradient(leaf), kind=SHARED, path=jax.tree_util.keystr(path), axes=axes)
        for (path, leaf), flag in zip(named, is_split, strict=True)
        if flag
    ]
    others = [leaf for (_, leaf), flag in zip(named, is_split, strict=True) if not flag]
    found = [part for part in parts if part is not None]
    late = _LateScatter(_LayerShards(found, axes), reverse)
    own, slot = late.enter([part.value for part in found])

    def body(state: tuple[Any, Any], given: Any) -> tuple[tuple[Any, Any], Any]:
        (carry, slot), (wholes, own, others, x) = state, given
        wholes, slot = late.begin(wholes, own, slot)
        split, rest = iter(wholes), iter(others)
        layer = tree.unflatten(next(split if flag else rest) for flag in is_split)
        carry, y = f(carry, layer if xs is None else (layer, x))
        return (carry, slot), y

    given = wholes, own, others, xs
    (carry, _), ys = lax.scan(body, (init, slot), given, reverse=reverse, unroll=unroll)
    return carry, ys


class _LateScatter:
    """As `layer_hooks.Hooks`, but each layer returns the shards of its sum."""

    def __init__(self, shards: _LayerShards, reverse: bool):
        self._shards = shards
        self._share = shards.share
        self._reverse = reverse

    def enter(self, own: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        shards = self._shards

        def same(own: list, share: Any) -> tuple[list, list]:
            return own, shards.zeros()

        def backward(share: Any, cotangents: tuple[list, list]) -> tuple[list, Any]:
            shifted, slot = cotangents
            sums = [
                jnp.concatenate(
                    [more[1:], last[None]] if self._reverse else [last[None], more[:-1]]
                )
                for last, more in zip(shards.sums(slot, share), shifted, strict=True)
            ]
            means = shards.proved(shards.divided(sums, share))
            return means, jax.tree.map(jnp.zeros_like, share)

        hook = jax.custom_vjp(same)
        hook.defvjp(lambda own, share: (same(own, share), share), backward)
        return hook(own, self._share)

    def begin(
        self, wholes: list[jax.Array], own: list[jax.Array], slot: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Before a layer; in the backward pass after it."""

        def same(wholes: list, own: list, slot: list, share: Any) -> tuple[list, list]:
            return wholes, slot

        hook = jax.custom_vjp(same)

        def forward(*args: Any) -> tuple[Any, tuple]:
            values = jax.tree.map(lambda arg: arg.value, args)
            # Of nested derivatives one may be of the carry alone, without this hook.
            if any(x.perturbed for x in args[1]):
                return same(*values), (values[-1],)
            return hook(*values), (values[-1], None)

        def backward(residuals: tuple, cotangents: tuple[list, list]) -> tuple:
            gradient, slot = instantiated(cotangents)
            nothing = jax.tree.map(jnp.zeros_like, residuals[0])
            if len(residuals) > 1:
                return gradient, None, slot, nothing
            # As in the loop above.
            sums = self._shards.sums(slot, residuals[0])
            sums, gradient = lax.optimization_barrier((sums, gradient))
            return None, sums, gradient, nothing

        hook.defvjp(forward, backward, symbolic_zeros=True)
        return hook(wholes, own, slot, self._share)
