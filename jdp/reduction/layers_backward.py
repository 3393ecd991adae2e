"""The backward loop over sharded layers, which scatters each gradient one round late."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdp.reduction import scheduling_barrier
from jdp.reduction.layer_loop import LayerLoop, Operands
from jdp.reduction.overlap.identities import instantiated, is_zero
from jdp.reduction.traced_layer import is_inexact


@jax.tree_util.register_static
@dataclass(frozen=True)
class Perturbed:
    """Positions of the operands that are differentiated; a residual must be a tree of arrays."""

    closed_over: tuple[int, ...]
    carry: tuple[int, ...]
    shards: tuple[int, ...]
    wholes: tuple[int, ...]
    xs: tuple[int, ...]


def perturbed(given: Operands) -> Perturbed:
    """Return the positions of the perturbed operands of a `jax.custom_vjp`.

    The carry of a round depends on the layers before it, whatever the first one depends on.
    """

    def positions(operands: Sequence[Any], *, always: bool = False) -> tuple[int, ...]:
        return tuple(
            i for i, x in enumerate(operands) if is_inexact(x.value) and (always or x.perturbed)
        )

    closed_over, carry, *stacked = given
    return Perturbed(
        positions(closed_over), positions(carry, always=True), *map(positions, stacked)
    )


def gradients(
    forward: LayerLoop,
    operands: Operands,
    share: Any,
    of: Perturbed,
    cotangents: tuple[Sequence[Any], Sequence[Any]],
) -> Operands:
    """Return the gradient of each operand, None where it has none."""
    return _Backward(forward, operands, share, of).run(*cotangents)


class _Backward:
    def __init__(self, forward: LayerLoop, operands: Operands, share: Any, of: Perturbed):
        self._loop = forward.turned()
        self._operands = operands
        self._share = share
        self._of = of

    def run(self, last: Sequence[Any], ys: Sequence[Any]) -> Operands:
        """Return the gradients, given the cotangents of the last carry and of the stacked y."""
        loop, operands, of = self._loop, self._operands, self._of
        # The cotangents that are not zero everywhere, by position.
        own_ys = {i: y for i, y in enumerate(ys) if not is_zero(y)}
        shards = loop.shards
        late = shards.zeros() if of.shards else []
        cotangent = [instantiated(last[i]) for i in of.carry]
        # XLA would gather it together with the first one of the way there.
        (first,) = scheduling_barrier.after([jnp.asarray(loop.first)], cotangent)
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
        """Differentiate one layer, gather the next one, and scatter the gradient of the last."""
        cotangent, layer, late, means, sums = state
        i, carry, wholes, x, y = given
        operands, of = self._operands, self._of
        following = self._loop.gathered(operands.shards, i, self._share, cotangent)
        new = self._loop.shards.sums(late, self._share) if late else []
        inputs = Operands(operands.closed_over, carry, layer, wholes, x)
        found = self._pulled_back(inputs, cotangent, y)
        # XLA waits for a sent array at its first use, which is behind this layer's matmuls.
        new, following, found = lax.optimization_barrier((new, following, found))
        (place,) = scheduling_barrier.after([self._loop.before(i)], found.shards)
        means = _put(means, new, place)
        sums = [x + more for x, more in zip(sums, found.closed_over, strict=True)]
        late = found.shards if of.shards else []
        return (found.carry, following, late, means, sums), (found.wholes, found.xs)

    def _pulled_back(self, inputs: Operands, cotangent: list, ys: dict[int, Any]) -> Operands:
        """Return the gradients of a layer, for the differentiated operands alone."""
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
    """Write the values of a layer to their place among those of all layers."""
    pairs = zip(stacked, layer, strict=True)
    return [lax.dynamic_update_index_in_dim(many, one, i, 0) for many, one in pairs]


def _with(values: Sequence[Any], positions: Sequence[int], new: Sequence[Any]) -> list[Any]:
    replaced = dict(zip(positions, new, strict=True))
    return [replaced.get(i, x) for i, x in enumerate(values)]


def _at(positions: Sequence[int], values: Sequence[Any], size: int) -> list[Any]:
    found = dict(zip(positions, values, strict=True))
    return [found.get(i) for i in range(size)]
