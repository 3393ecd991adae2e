"""The loop over the micro-batches of a rank: how rows and keys are split, and sums are added up."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdp import axis, pytrees
from jdp.analysis import jaxprs
from jdp.analysis.marks import ROUNDS, mark
from jdp.reduction import row_weight


def num_rows(batch: Any, dim: int = 0) -> int:
    """Return how many rows a batch has, counted along a dim of its first leaf."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    return shapes[0][dim] if shapes and len(shapes[0]) > dim else 1


def num_micro_batches(batch: Any, accumulate: int | None, micro_batch_rows: int | None) -> int:
    """Return the number of micro-batches of a batch.

    Args:
      accumulate: the number, >= 1; None for 1.
    """
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
                f"{rows}, which is not divisible by {k}. Choose a batch size that is a multiple of "
                "ranks * accumulate, or give the number of rows that fit into memory: "
                "micro_batch_rows=."
            )
        if micro_batch_rows is not None and shape[:1] != (rows_here,):
            raise ValueError(
                f"{rows}, and the first leaf has {rows_here}: row i of every leaf must belong "
                "together. Give what is not per row as a further argument."
            )
    return k


def split(
    batch: Any, rest: tuple, k: int, *, is_whole: bool
) -> tuple[Any, Any, Callable[[dict], tuple]]:
    """Split rows and keys into k parts: the parts of the loop, stacked, and the last part.

    Each part is (rows, keys); `join(keys)` puts the keys into `rest`. With `is_whole` the loop has
    all k parts and there is no last, None, unless it is smaller.

    Args:
      batch: tree of arrays `[r, ...]`.
      k: number of micro-batches, >= 2.
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


def require_typed_keys(
    part: Callable[[Any, Any], Any], token: Any, looped: Any, rest: tuple
) -> None:
    """Refuse raw random keys: they look like data, so they are not split."""
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
                f"{name} is a raw random key, uint32{list(jnp.shape(leaf))}. jdp cannot tell it "
                "from data and does not split it, so every micro-batch would draw the same "
                "numbers. Give a typed key: jax.random.key(seed) in place of jax.random.PRNGKey("
                "seed), or jax.random.wrap_key_data(key)."
            )


def _first(looped: Any) -> Any:
    return jax.tree.map(lambda x: x[0], looped)


def accumulated(part: Any, token: Any, looped: Any, last: Any, *, is_scaled: bool) -> Any:
    """Average `part(token, micro_batch)` by weight, and join the rows; return the token, too."""
    first = _first(looped)
    of_one = part.trace(token, first).out_info  # in two frames less than jax.eval_shape
    _, (_, like, _) = of_one
    if last is not None:
        _require_equal_shapes(part.trace(token, last).out_info[1][1], like)

    def zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))  # bfloat16 loses digits

    def add(carry: Any, micro_batch: Any) -> tuple[Any, list[jax.Array]]:
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
    carry, rows = lax.scan(add, nothing, looped)
    carry, last_rows = (carry, None) if last is None else add(carry, last)
    token, (totals, sums) = carry
    means = _means(totals, sums, is_scaled=is_scaled)
    means = jax.tree.map(lambda s, x: s.astype(x.dtype), means, like)
    joined = [stacked.reshape(-1, *stacked.shape[2:]) for stacked in rows]
    if last_rows is not None:
        joined = [jnp.concatenate(parts) for parts in zip(joined, last_rows, strict=True)]
    return token, means, joined


def _means(totals: tuple, sums: tuple, *, is_scaled: bool) -> Any:
    """Divide each tree of sums by its total weight, unless that is 1."""
    if is_scaled:
        return jax.tree.map(lambda s: mark(s, kind=ROUNDS, path="", axes=()), sums)
    divisors = [row_weight.divisor(total) for total in totals]
    return tuple(
        jax.tree.map(lambda s, divisor=divisor: s / divisor, tree)
        for tree, divisor in zip(sums, divisors, strict=True)
    )


def _require_equal_shapes(last: Any, others: Any) -> None:
    """Refuse a mean whose shape changes with the rows of the micro-batch."""
    named = jax.tree_util.tree_leaves_with_path(others)
    for (path, other), leaf in zip(named, jax.tree.leaves(last), strict=True):
        if other.shape != leaf.shape:
            raise ValueError(
                f"the loss returns {other.dtype}{list(other.shape)} at "
                f"{jax.tree_util.keystr(path)} for one micro-batch and "
                f"{leaf.dtype}{list(leaf.shape)} for the last one, which has fewer rows. Arrays of "
                "different shapes cannot be averaged: return one value per row as jdp.rows(x)."
            )
