"""Updates that `skip_nonfinite` skips: what a step keeps and reports."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdp.analysis import diagnostics
from jdp.reduction.step_context import Scope


class SkipNonfiniteState(NamedTuple):
    """The state of `skip_nonfinite` and `dynamic_loss_scale`.

    Attributes:
      num_skipped: `[]` int32, all skipped updates.
      skips_left: `[]` int32, updates that may be skipped in a row from here.
      nonfinite: `[leaves]` bool, which gradients of the last update were not finite.
      scale: `[]` float32, the loss scale; None without one.
      num_finite: `[]` int32, updates since the scale changed; None without a scale.
      inner_state: state of the wrapped optimizer.
    """

    num_skipped: jax.Array
    skips_left: jax.Array
    nonfinite: jax.Array
    scale: jax.Array | None
    num_finite: jax.Array | None
    inner_state: Any


def are_nonfinite(leaves: Sequence[Any]) -> jax.Array:
    """Return which leaves have NaN, infinity, or a sum that overflows: `[leaves]` bool."""
    flags = [~jnp.isfinite(_sum(leaf)) for leaf in leaves]
    return jnp.stack(flags) if flags else jnp.zeros(0, bool)


def _sum(x: Any) -> jax.Array:
    """Return a nonfinite number if any of `x` is: the fastest such pass on CPUs."""
    if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
        return jnp.float32(0)
    return jnp.sum(x, dtype=jnp.promote_types(jnp.result_type(x), jnp.float32))


def kept(is_skipped: Any, old: Any, new: Any) -> Any:
    """Return a new tree, after a skipped update the old one unless of another structure."""
    if is_skipped is None or jax.tree.structure(old) != jax.tree.structure(new):
        return new

    def chosen(before: Any, after: Any) -> Any:
        is_like = isinstance(after, jax.Array) and jnp.shape(before) == after.shape
        return jnp.where(is_skipped, before, after) if is_like and before is not after else after

    return jax.tree.map(chosen, old, new)


def was_skipped(old: Any, new: Any) -> jax.Array | None:
    """Whether an optimizer skipped its update, from its states; None if it never does."""
    pairs = zip(fields(old, "num_skipped"), fields(new, "num_skipped"), strict=True)
    flags = [before != after for before, after in pairs]
    return jnp.stack(flags).any() if flags else None


def fields(state: Any, name: str) -> list[Any]:
    """Return a field of each `SkipNonfiniteState`."""
    found = []
    for node in filter(_is_skipping, jax.tree.leaves(state, is_leaf=_is_skipping)):
        node = node if isinstance(node, Mapping) else node._asdict()
        found += [*jax.tree.leaves(node[name]), *fields(node.get("inner_state"), name)]
    return found


def _is_skipping(node: Any) -> bool:
    if not isinstance(node, Mapping):
        return isinstance(node, SkipNonfiniteState)
    if not {"num_skipped", "skips_left", "nonfinite"} <= node.keys():  # nnx loses the type
        return False
    return all(x.dtype == jnp.int32 for x in jax.tree.leaves(node["skips_left"]))


def expect_skips(step: Scope, state: Any) -> None:
    """Record, at a step's start, whether the next skip would be an error."""
    step.last_skips.extend(each <= 1 for each in fields(state, "skips_left"))


def watch(step: Scope | None, leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """Return gradients; if the next skip is an error, let a step report nonfinite ones."""
    if step is None or not step.last_skips or not step.is_here() or not leaves:
        return [*leaves]

    def total(*leaves: jax.Array) -> jax.Array:
        return are_nonfinite(leaves).any().astype(jnp.float32)

    is_last = jnp.stack(step.last_skips).any()
    found = lax.cond(is_last, total, lambda *leaves: jnp.float32(0), *leaves)
    # Else XLA would copy what a native call overwrites.
    *leaves, found = lax.optimization_barrier([*leaves, found])
    step.watched.append(found)
    return leaves


def record(step: Scope | None, grads: Any, state: Any) -> None:
    """Let a step report an optimizer's new state."""
    if step is None or not step.is_here():
        return
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(grads)]
    pairs = zip(fields(state, "skips_left"), fields(state, "nonfinite"), strict=True)
    for left, flags in pairs:
        names = [f"grads{path}" for path in paths]
        if flags.size != len(names):  # of an optimizer for some of the parameters
            names = [f"gradient {i} of {flags.size}" for i in range(flags.size)]
        step.skips.append((left, flags, tuple(names)))


def report(step: Scope) -> jax.Array | None:
    """Return what `why_skipped` reads, `[1, k]` int32."""
    if not step.skips:
        return None
    is_own = sum(step.watched, jnp.float32(0)) > 0
    parts = [part for left, flags, _ in step.skips for part in (left[None], flags)]
    return jnp.concatenate([*parts, is_own[None]], dtype=jnp.int32)[None]


def why_skipped(reported: jax.Array, names: Sequence[tuple[str, ...]]) -> str | None:
    """Return which gradients led to too many skips in a row; `reported`: `[ranks, k]`."""
    rows = {x.index[0].start or 0: np.asarray(x.data)[0] for x in reported.addressable_shards}
    values, start, found = next(iter(rows.values())), 0, []
    for paths in names:
        flags = values[start + 1 : start + 1 + len(paths)]
        if values[start] == 0:
            found += [path for path, is_bad in zip(paths, flags, strict=True) if is_bad]
        start += 1 + len(paths)
    if not found:
        return None
    ranks = ", ".join(str(rank) for rank, row in sorted(rows.items()) if row[-1])
    whose = f" of rank {ranks}" if ranks else ""
    return diagnostics.shown(f"`{path}`" for path in found) + whose
