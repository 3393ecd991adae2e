"""Find how one update of an optimizer changes the averages in its state."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdp import pytrees
from jdp.training.update_dataflow import UNKNOWN, Decay, DecayWalk, KnownValue

# A schedule of decays has come to its end by then.
MANY_STEPS = 10_000


class Change(NamedTuple):
    """The change of a leaf of the state in an update.

    Attributes:
      decays: the value that it multiplies the leaf by.
      adds_squares: whether it adds squares to the leaf as it is.
      is_nothing: whether it returns the leaf as it was.
    """

    decays: frozenset[Decay] = frozenset()
    adds_squares: bool = False
    is_nothing: bool = False


def changes(tx: Any, opt_state: Any, params: Any) -> dict[int, Change]:
    """Return the changes of the leaves of an optimizer's state in an update, by position.

    It is traced in float32, where no decay is rounded to 1. Empty if the update cannot be traced.
    """
    leaves, tree = jax.tree.flatten(opt_state)

    def update(grads: Any, leaves: Any, params: Any) -> Any:
        # The further arguments that optax's transformations know; others ignore them.
        extra = {"value": jnp.float32(1), "grad": grads, "value_fn": lambda _: jnp.float32(1)}
        _, new = tx.update(grads, tree.unflatten(leaves), params, synced=True, **extra)
        return jax.tree.leaves(new)

    wide = jax.tree.map(_wide, params)
    try:
        program = jax.make_jaxpr(update)(wide, list(map(_wide, leaves)), wide)
    except Exception:  # It needs other arguments, or ranks: its decays are not judged.
        return {}
    others = [UNKNOWN] * len(jax.tree.leaves(params))
    known = [_entering(i, leaf) for i, leaf in enumerate(_with_numbers(leaves, tx, params))]
    walk = DecayWalk()
    new = walk.results(program, [*others, *known, *others])
    return {i: _change(i, value, walk.decays.get(i, set())) for i, value in enumerate(new)}


def _change(i: int, new: KnownValue, decays: set[Decay]) -> Change:
    """Return how leaf `i` changes, given its new value and the factor of the leaf."""
    parts = [(x.part, x.is_rounded) for x in new.sums if x.leaf == i and x.part is not None]
    # To add a part of a square takes away, or leaves room for, that part of the leaf.
    rests = {Decay(1 - part, is_rounded) for part, is_rounded in parts if part < 1}
    adds_squares = any(part >= 1 for part, _ in parts)
    return Change(frozenset(decays | rests), adds_squares, new.leaves == {i} and not new.sums)


def is_short(leaf: Any) -> bool:
    """Whether a leaf is an array of floats of 16 bits."""
    if not pytrees.is_array(leaf):
        return False
    dtype = jnp.result_type(leaf)
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits == 16


def _wide(leaf: Any) -> jax.ShapeDtypeStruct:
    dtype = jnp.float32 if is_short(leaf) else jnp.result_type(leaf)
    return jax.ShapeDtypeStruct(jnp.shape(leaf), dtype)


def _with_numbers(leaves: Sequence[Any], tx: Any, params: Any) -> list[Any]:
    """Return leaves in which scalars that are only traced are numbers, where `init` shows them."""
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return list(leaves)
    program = jax.make_jaxpr(tx.init)(params)
    first = DecayWalk().results(program, [UNKNOWN] * len(jax.tree.leaves(params)))
    pairs = zip(leaves, first, strict=True)
    return [
        leaf if value.number is None else np.asarray(value.number, leaf.dtype)
        for leaf, value in pairs
    ]


def _entering(i: int, leaf: Any) -> KnownValue:
    """Return the facts about a leaf of the state; a count has its value at a later step."""
    value = KnownValue(frozenset([i]))
    if isinstance(leaf, jax.core.Tracer) or jnp.ndim(leaf):
        return value
    if jnp.issubdtype(jnp.result_type(leaf), jnp.integer):
        return value._replace(number=np.asarray(MANY_STEPS, leaf.dtype), is_of_count=True)
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
        return value
    is_rounded = is_short(leaf)
    number = np.asarray(leaf, np.float32 if is_rounded else leaf.dtype)
    return value._replace(number=number, is_rounded=is_rounded)
