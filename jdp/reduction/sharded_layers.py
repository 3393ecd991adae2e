"""Scanned layers whose parameters are shards: each is gathered while the one before it runs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdp.analysis.marks import SHARED, mark
from jdp.reduction import layers_backward, step_context
from jdp.reduction.layer_loop import LayerLoop, Operands
from jdp.reduction.layer_shards import LayerShards
from jdp.reduction.shard_registry import Shard, known
from jdp.reduction.traced_layer import traced


def split_parts(params: Any, axes: tuple[str, ...]) -> list[Shard | None]:
    """Return for each stacked parameter the shard to scan over, None where the whole is scanned.

    A leaf that is split along the dim of the layers has all of a layer on one rank: it stays whole.
    """
    found = [known(leaf) for leaf in jax.tree.leaves(params)]
    if step_context.current(axes) is None:
        return [None for _ in found]
    return [part if part is not None and part.dim >= 1 else None for part in found]


def scan(
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
    """Run `lax.scan` over stacked parameters of which this rank has its shards.

    Each round computes with the layer that the carry holds, and gathers the next one meanwhile.
    The backward loop does the same in reverse, computes the layer again, and scatters the gradient
    of the layer behind it while it computes its own. So no more than two layers are whole at once.
    Forward the carries alone are kept, as under `jax.checkpoint`; within one layer the author's own
    `jax.checkpoint` decides.

    Source: Rajbhandari et al. 2020, ZeRO stage 3, https://arxiv.org/abs/1910.02054.
    """
    layer, carry = traced(f, init, params, xs, reverse=reverse)
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
        wholes=[_array(leaf) for _, leaf, part in pairs if part is None],
        xs=[_array(leaf) for leaf in jax.tree.leaves(xs)],
    )
    found = [part for part in parts if part is not None]
    num_layers = found[0].value.shape[0]
    is_split = [part is not None for part in parts]
    loop = LayerLoop(layer, LayerShards(found, axes), is_split, num_layers, reverse, unroll)
    carry, ys = _differentiable(loop, operands)
    return layer.carry_tree.unflatten(carry), layer.y_tree.unflatten(ys)


def _differentiable(loop: LayerLoop, operands: Operands) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the leaves of the last carry, and the stacked leaves of y."""

    @jax.custom_vjp
    def run(operands: Operands, share: Any) -> Any:
        return _forward(loop, operands, share, is_kept=False)[0]

    def forward(operands: Operands, share: Any) -> Any:
        of = layers_backward.perturbed(operands)
        operands, share = jax.tree.map(lambda x: x.value, (operands, share))
        outputs, carries = _forward(loop, operands, share, is_kept=True)
        return outputs, (operands._replace(carry=carries), share, of)

    def backward(residuals: Any, cotangents: Any) -> Any:
        operands, share, of = residuals
        found = layers_backward.gradients(loop, operands, share, of, cotangents)
        return found, jax.tree.map(jnp.zeros_like, share)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(operands, loop.shards.share)


def _forward(
    loop: LayerLoop, operands: Operands, share: Any, *, is_kept: bool
) -> tuple[tuple[list, list], list]:
    """Return `(last carry, stacked y)`, and if they are kept the carries that go into layers."""

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


def _array(x: Any) -> jax.Array:
    return x if isinstance(x, jax.Array) else jnp.asarray(x)
