"""How far a step on one rank and on all are apart, leaf by leaf, and why that may be."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp.reduction.optimizer import has_optimizer
from jdp.reduction.sharding import Sharded


@dataclass(frozen=True)
class LeafDifference:
    """How far one leaf is apart after steps on one rank and on n.

    Attributes:
      path: where it is, as in `state.params['w']` or `metrics['loss']`.
      difference: largest absolute difference between one rank and any of n.
      allowed: largest difference that rounding explains.
      change_one: largest absolute change that the steps on one rank made; of a metric its value.
      change_all: the same on n ranks, on the rank that is furthest apart.
      rank: the rank of n that is furthest apart; None if all n hold the same.
    """

    path: str
    difference: float
    allowed: float
    change_one: float
    change_all: float
    rank: int | None = None


@dataclass(frozen=True)
class StepDifference:
    """The result of `check_step`: every leaf, the worst first, and the likely cause if any.

    Attributes:
      leaves: of the state.
      cause: the likely cause, None if nothing differs.
      num_ranks: of all ranks.
      metrics: leaves of the metrics, the worst first.
      num_steps: after how many steps this is.
      gathers: what the update of an optimizer in `jdp.sharded` gathers whole, a text each.
      owned: which matrices that update computes on one rank each, a text for each kind.
    """

    leaves: list[LeafDifference]
    cause: str | None
    num_ranks: int
    metrics: list[LeafDifference] = field(default_factory=list)
    num_steps: int = 1
    gathers: tuple[str, ...] = ()
    owned: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = [*self.leaves[:5], *self.metrics[:5]]
        width = max((len(leaf.path) for leaf in shown), default=4)
        lines = [
            f"{'leaf':{width}}  difference    allowed  change on 1 rank  on {self.num_ranks} ranks"
        ]
        for leaf in shown:
            lines.append(
                f"{leaf.path:{width}}  {leaf.difference:10.2e} {leaf.allowed:10.2e}"
                f"  {leaf.change_one:16.6g}  {leaf.change_all:.6g}"
            )
        for kind, leaves in (("leaves", self.leaves), ("metrics", self.metrics)):
            if len(leaves) > 5:
                lines.append(f"... and {len(leaves) - 5} {kind} that are closer")
        lines += [f"gathered whole on every rank: {text}" for text in self.gathers]
        lines += [f"matrices computed by one rank each: {text}" for text in self.owned]
        return "\n".join(lines)


def compare(
    name: str,
    start: Any,
    one: Any,
    many: Any,
    tolerance: float,
    *,
    num_steps: int = 1,
    digits: float = 0.0,
    digits_of_change: float = 0.0,
) -> list[LeafDifference]:
    """Compare two trees leaf by leaf, on every device."""
    named = jax.tree_util.tree_leaves_with_path(one)
    olds = [0.0] * len(named) if start is None else jax.tree.leaves(start)
    found = []
    for (path, leaf), other, old in zip(named, jax.tree.leaves(many), olds, strict=True):
        a, old = _numbers(leaf), _numbers(old)
        largest = float(np.abs(a[np.isfinite(a)]).max(initial=0))
        copies = _copies(other)
        allowed = num_steps * tolerance * (1 + largest)
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not _differ(copies):
            # The leaf may have few digits. That is not a reason for ranks to differ.
            eps = 2 * max(digits, float(jnp.finfo(leaf.dtype).eps))
            by_digits = eps * (1 + largest) if start is None else num_steps * eps * largest
            by_change = 2 * num_steps * digits_of_change * _largest(np.abs(a - old))
            allowed = max(allowed, by_digits, by_change)
        apart = [_apart(a[index], part) for index, part in copies]
        worst = int(np.argmax(apart)) if apart else 0
        index, part = copies[worst]
        old = old[index] if old.ndim else old
        found.append(
            LeafDifference(
                path=f"{name}{jax.tree_util.keystr(path)}",
                difference=apart[worst],
                allowed=allowed,
                change_one=_largest(a[index] - old),
                change_all=_largest(part - old),
                rank=worst if _differ(copies) else None,
            )
        )
    return sorted(found, key=lambda leaf: leaf.allowed / max(leaf.difference, 1e-300))


def digits_of(state: Any) -> float:
    """Return the relative rounding of the leaves of 16 bits in a state; 0 if there are none."""
    dtypes = {jnp.result_type(leaf) for leaf in jax.tree.leaves(state)}
    infos = [jnp.finfo(dtype) for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
    return max((float(info.eps) for info in infos if info.bits == 16), default=0.0)


def digits_of_wire(state: Any) -> float:
    """Return the relative rounding of what optimizers gather and reduce; 0 if it is their own."""
    nodes = jax.tree.leaves(state, is_leaf=has_optimizer)
    found = [node.tx for node in nodes if has_optimizer(node)]
    dtypes = [tx.reduce_dtype for tx in found]
    dtypes += [tx.sharding.gather_dtype for tx in found if isinstance(tx, Sharded)]
    return max((float(jnp.finfo(dtype).eps) for dtype in dtypes if dtype is not None), default=0.0)


def _copies(leaf: jax.Array) -> list[tuple[Any, np.ndarray]]:
    """Return the part of an array that each device holds, and its position."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    by_device = {shard.device: shard for shard in leaf.addressable_shards}
    return [(shard.index, _numbers(shard.data)) for shard in by_device.values()]


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    difference = np.abs(a - b)
    equal = (a == b) | (np.isnan(a) & np.isnan(b))  # infinities, too
    return float(np.where(equal, 0, np.nan_to_num(difference, nan=np.inf)).max(initial=0))


def _differ(copies: list[tuple[Any, np.ndarray]]) -> bool:
    first: dict[str, np.ndarray] = {}
    return any(_apart(first.setdefault(repr(index), part), part) > 0 for index, part in copies)


def _largest(change: np.ndarray) -> float:
    if not change.size:
        return 0.0
    largest = change.flat[np.abs(change).argmax()]
    return float(abs(largest) if np.iscomplexobj(change) else largest)


def beyond(leaves: list[LeafDifference]) -> list[LeafDifference]:
    """Return the leaves that are further apart than rounding explains."""
    return [leaf for leaf in leaves if not leaf.difference <= leaf.allowed]


def _numbers(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    is_complex = jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating)
    return np.asarray(leaf, np.complex128 if is_complex else np.float64)
