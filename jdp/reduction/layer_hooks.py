"""Identities around scanned layers that reduce gradients one layer late."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir

from jdp.analysis.marks import AVERAGED, mark
from jdp.collectives import AllReduce, buckets, call_order
from jdp.collectives.gpu.start_done import TOKEN, done, start
from jdp.collectives.native import native, reserved, starts_when_ready
from jdp.collectives.xla import scaled, split_scale
from jdp.reduction import step_context, weighted_sum


def hooked(same: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `same(*args, share, witness)` with a custom backward pass.

    The hooks act together or not at all: a nested derivative of the carry alone gets
    `is_ours=False`, and leaves them to the derivative of the parameters, and so of the witness.
    """
    hook = jax.custom_vjp(same)

    def forward(*args: Any) -> tuple[Any, tuple]:
        values = jax.tree.map(lambda arg: arg.value, args)
        if args[-1].perturbed:
            return same(*values), (values[-2],)  # None of JAX's residuals is a bool: a tuple
        return hook(*values), (values[-2], None)

    def pull_back(residuals: tuple, cotangents: Any) -> tuple:
        share, is_ours = residuals[0], len(residuals) == 1
        return *backward(share, instantiated(cotangents), is_ours), jnp.float32(0)

    hook.defvjp(forward, pull_back, symbolic_zeros=True)
    return hook


def is_zero(cotangent: Any) -> bool:
    """Whether a cotangent is zero by its type."""
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


def instantiated(cotangents: Any) -> Any:
    """Replace symbolic zeros by arrays."""
    return jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype) if is_zero(x) else x, cotangents, is_leaf=is_zero
    )


def mapped_together(values: Sequence[Any]) -> list[jax.Array]:
    """Return `values` unchanged. A `vmap` that maps one maps all.

    A `jax.custom_vjp` may need each row's cotangent, but gets the sum for an unmapped output.

    >>> import jax, jax.numpy as jnp
    >>> jax.vmap(lambda x: mapped_together([x, jnp.float32(1)]))(jnp.arange(2.0))
    [Array([0., 1.], dtype=float32), Array([1., 1.], dtype=float32)]
    """
    return _together_p.bind(*map(jnp.asarray, values)) if values else []


_together_p = jax.extend.core.Primitive("jdp_together")
_together_p.multiple_results = True


def _jvp(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    # Symbolic zeros must stay symbolic.
    return _together_p.bind(*primals), list(tangents)


def _batch(values: tuple, dims: tuple) -> tuple[Any, Any]:
    size = next(x.shape[d] for x, d in zip(values, dims, strict=True) if d is not None)
    mapped = [
        jnp.moveaxis(x, d, 0) if d is not None else jnp.broadcast_to(x, (size, *x.shape))
        for x, d in zip(values, dims, strict=True)
    ]
    return _together_p.bind(*mapped), [0] * len(values)


_together_p.def_impl(lambda *values: list(values))
_together_p.def_abstract_eval(lambda *values: list(values))
ad.primitive_jvps[_together_p] = _jvp
batching.primitive_batchers[_together_p] = _batch
mlir.register_lowering(_together_p, lambda context, *values: list(values))


def is_float(leaf: Any) -> bool:
    """Whether a leaf's gradient can be reduced."""
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def floats_of(tree: Any) -> list[jax.Array]:
    """Return a tree's float leaves."""
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if is_float(leaf)]


def _with_floats(tree: Any, floats: Sequence[jax.Array]) -> Any:
    left = iter(floats)
    return jax.tree.map(lambda leaf: next(left) if is_float(leaf) else leaf, tree)


class Hooks:
    """Identities around each layer and around the scan, for their backward passes.

    The scan carries a *slot*, in the backward pass this rank's gradient of the layer before. Each
    layer returns the slot's mean, and stores its own gradient there. So the means are shifted by
    one layer: the first is zero, and the last is computed after the loop.
    """

    def __init__(
        self,
        floats: Sequence[jax.Array],
        axes: tuple[str, ...],
        all_reduce: AllReduce,
        reverse: bool,
    ):
        self._axes = axes
        self._all_reduce = all_reduce
        self._reverse = reverse
        self._dtypes = [x.dtype for x in floats]
        step = step_context.current(axes)
        sent = None if step is None else step.reduce_dtype
        self._slot: list[Any] = [
            jax.ShapeDtypeStruct(x.shape[1:], x.dtype if sent is None else sent) for x in floats
        ]
        # one per dtype, because all are complete at once
        self._plan = buckets.plan(self._slot, sys.maxsize)
        weight, self._mesh = (None, None) if step is None else (step.weight, step.mesh)
        self._weights, self._scale = weighted_sum.factors(weight, axes, mean=True)
        self._share = self._weights.forward
        # A ring between GPUs starts before a layer's matmuls and is awaited after them.
        self._numbers: list[int] = []
        self._last_numbers: list[int] = []
        self._communicator = 0
        if starts_when_ready(all_reduce, self._mesh):
            leaves = [[self._slot[i] for i in bucket] for bucket in self._plan]
            self._numbers = [call_order.next_number(bucket) for bucket in leaves]
            self._last_numbers = [call_order.derived(i, "last layer") for i in self._numbers]
            if all_reduce is native:
                numbers = self._numbers + self._last_numbers
                self._communicator = reserved(2 * leaves, numbers, axes, self._mesh)

    def enter(self, floats: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the stacked parameters and an empty slot."""

        def same(floats: list, _: Any) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
            # From a constant, vmap would make one slot for all models.
            slot = self._sent([lax.stop_gradient(x[0]) for x in floats])
            return floats, slot, jnp.float32(0)

        def backward(share: Any, cotangents: tuple[list, list, Any]) -> tuple[list, Any]:
            shifted, slot, _ = cotangents
            weights = self._weights.by_share(share)
            means = []
            for mean, others in zip(self._reduced(slot), shifted, strict=True):
                mean = weights.total(mean)
                parts = [others[1:], mean[None]] if self._reverse else [mean[None], others[:-1]]
                # The analysis would refuse another mean of a sum over ranks.
                mean = jnp.concatenate(parts)
                means.append(mark(mean, kind=AVERAGED, path="", axes=self._axes))
            return means, jax.tree.map(jnp.zeros_like, share)

        hook = jax.custom_vjp(same)
        # Not hook(floats): a second derivative would meet it again.
        hook.defvjp(lambda floats, share: (same(floats, share), share), backward)
        floats, slot, self._witness = hook(mapped_together(floats), self._share)
        return floats, slot

    def begin(self, floats: list, carry: Any, slot: list) -> tuple[list, Any, list, list]:
        """Before a layer; in the backward pass after it, with its gradient."""

        def same(floats: list, moving: list, slot: list, share: Any, witness: Any) -> tuple:
            return floats, moving, slot, [jnp.zeros(TOKEN.shape, TOKEN.dtype) for _ in numbers]

        def backward(share: Any, cotangents: tuple, is_ours: bool) -> tuple:
            gradient, moving, slot, tokens = cotangents
            nothing = jax.tree.map(jnp.zeros_like, share)
            if not is_ours:
                return gradient, moving, slot, nothing
            if numbers:
                tokens, gradient, moving = lax.optimization_barrier((tokens, gradient, moving))
                means = self._waited_for(slot, tokens, numbers)
            else:
                sums = self._summed(slot)
                # XLA waits for a sum at its first use, so keep it behind the matmuls.
                sums, gradient = lax.optimization_barrier((sums, gradient))
                means = self._unpacked(sums)
            if share is not None:
                weights = self._weights.by_share(share)
                gradient = [weights.term(x) for x in gradient]
                means = [weights.total(x) for x in means]
            return means, moving, self._sent(gradient), nothing

        numbers = self._numbers
        moving = floats_of(carry) if numbers else []
        if moving:
            one, two = len(floats), len(floats) + len(moving)
            given = mapped_together([*floats, *moving, *slot])
            floats, moving, slot = given[:one], given[one:two], given[two:]
        hook = hooked(same, backward)
        floats, moving, slot, tokens = hook(floats, moving, slot, self._share, self._witness)
        return floats, _with_floats(carry, moving) if numbers else carry, slot, tokens

    def end(self, carry: Any, slot: list, tokens: list) -> tuple[Any, list]:
        """After a layer; in the backward pass before it."""
        if not self._numbers:
            return carry, slot

        def same(moving: list, slot: list, tokens: list, _: None, witness: Any) -> tuple:
            return moving, slot

        def backward(_: None, cotangents: tuple[list, list], is_ours: bool) -> tuple:
            moving, slot = cotangents
            if not is_ours:
                return moving, slot, [jnp.zeros(TOKEN.shape, TOKEN.dtype) for _ in tokens], None
            started = self._started(slot, self._numbers)
            started, moving = lax.optimization_barrier((started, moving))
            return moving, slot, started, None

        hook = hooked(same, backward)
        moving = floats_of(carry)
        given = mapped_together([*moving, *slot])
        moving, slot = given[: len(moving)], given[len(moving) :]
        moving, slot = hook(moving, slot, tokens, None, self._witness)
        return _with_floats(carry, moving), slot

    def _reduced(self, slot: list[jax.Array]) -> list[jax.Array]:
        if self._numbers:
            tokens = lax.optimization_barrier(self._started(slot, self._last_numbers))
            return self._waited_for(slot, tokens, self._last_numbers)
        bucketed = [[slot[i] for i in bucket] for bucket in self._plan]
        return self._unplanned(self._all_reduced(bucketed, self._scale))

    # One unscaled vector: XLA would wait before the barrier for sums sliced or scaled after it.
    def _summed(self, slot: list[jax.Array]) -> list[jax.Array]:
        vectors = [buckets.pack([slot[i] for i in bucket]) for bucket in self._plan]
        vectors = [scaled(x, split_scale(self._scale, x.dtype)[0]) for x in vectors]
        return [x for (x,) in self._all_reduced([[x] for x in vectors], 1.0)]

    def _all_reduced(self, bucketed: list[list[jax.Array]], scale: float) -> list[list[jax.Array]]:
        with self._weights.named():
            return self._all_reduce(bucketed, self._axes, scale=scale, mesh=self._mesh)

    def _unpacked(self, sums: list[jax.Array]) -> list[jax.Array]:
        means = [scaled(x, split_scale(self._scale, x.dtype)[1]) for x in sums]
        likes = [[self._slot[i] for i in bucket] for bucket in self._plan]
        return self._unplanned([buckets.unpack(x, o) for x, o in zip(means, likes, strict=True)])

    def _started(self, slot: list[jax.Array], numbers: list[int]) -> list[jax.Array]:
        options = {"scale": self._scale, "communicator": self._communicator}
        return [
            start([slot[i] for i in bucket], self._axes, number=number, **options)
            for number, bucket in zip(numbers, self._plan, strict=True)
        ]

    def _waited_for(self, slot: list, tokens: list, numbers: list[int]) -> list[jax.Array]:
        after, reduced = None, []
        options = {"scale": self._scale, "communicator": self._communicator}
        for number, bucket, token in zip(numbers, self._plan, tokens, strict=True):
            leaves = [slot[i] for i in bucket]
            after, leaves = done(token, leaves, self._axes, after=after, number=number, **options)
            reduced.append(leaves)
        return self._unplanned(reduced)

    def _sent(self, gradient: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(gradient, self._slot, strict=True)
        return [x.astype(like.dtype) for x, like in pairs]

    def _unplanned(self, reduced: list[list[jax.Array]]) -> list[jax.Array]:
        pairs = zip(buckets.in_order(reduced, self._plan), self._dtypes, strict=True)
        return [leaf.astype(dtype) for leaf, dtype in pairs]
