"""How far a step on one rank and on all are apart, leaf by leaf, and why that may be."""

import re
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


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
    """What `check_step` found: every leaf, the worst first, and the likely cause if any.

    Attributes:
      leaves: of the state.
      cause: the likely cause, None if nothing differs.
      num_ranks: of all ranks.
      metrics: leaves of the metrics, the worst first.
      num_steps: after how many steps this is.
    """

    leaves: list[LeafDifference]
    cause: str | None
    num_ranks: int
    metrics: list[LeafDifference] = field(default_factory=list)
    num_steps: int = 1

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
) -> list[LeafDifference]:
    """Compare two trees leaf by leaf, on every device.

    Args:
      name: of the tree.
      start: the tree before, None where there was none.
      one: the tree of one rank.
      many: the tree of n ranks.
      tolerance: see `check_step`.
      num_steps: how many steps led here.
      digits: from `digits_of` the state that metrics come from.

    Returns:
      The differences, the worst first.
    """
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
            allowed = max(allowed, by_digits)
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


def _copies(leaf: jax.Array) -> list[tuple[Any, np.ndarray]]:
    """Return what each device holds of an array, and which part of it that is."""
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


def likely_cause(found: StepDifference, program: str, named: str) -> str:
    """Return why one rank and all may differ.

    Args:
      found: the differences.
      program: text of the lowered step.
      named: the same with JAX's names for where each operation stands.
    """
    wrong, num_ranks = beyond(found.leaves), found.num_ranks
    drifted = next((leaf for leaf in wrong if leaf.rank is not None), None)
    if drifted is not None:
        return (
            f"The {num_ranks} ranks hold other values of `{drifted.path}` than each other, rank "
            f"{drifted.rank} the furthest from one: look for callbacks that are not pure, and for "
            "kernels that add in no fixed order."
        )
    if not wrong:
        return _cause_of_metric(beyond(found.metrics)[0], num_ranks, program)
    ratios = [x.change_all / x.change_one for x in wrong if x.change_one]
    if ratios and np.allclose(ratios, 1 / num_ranks, rtol=1e-2):
        return (
            f"Every change is {num_ranks} times smaller. The loss is summed over rows instead of "
            "averaged: the mean over ranks of sums divides by the ranks. Write .mean(), not .sum()."
        )
    if ratios and np.allclose(ratios, num_ranks, rtol=1e-2):
        return (
            f"Every change is {num_ranks} times larger. A gradient is summed over ranks instead of "
            "averaged: look for lax.psum in the step, or replicated(mean=False)."
        )
    if _computes_in_16_bits(program) and all(map(_is_small, wrong)):
        return _FEW_DIGITS
    statistics = [x.path for x in wrong if _STATISTICS.search(x.path)]
    reduced = [path for path in statistics if _reduces_its_own(path, named)]
    if reduced:
        return (
            f"Batch statistics differ (`{reduced[0]}`), although the layer averages them over the "
            "ranks: each rank counts the same there, however few of its rows a mask leaves. Leave "
            "mask= out of the layer, or give it the means of all rows that count: "
            "jdp.sum_over_ranks(sum) / jdp.sum_over_ranks(count)."
        )
    if statistics:
        return (
            f"Batch statistics differ (`{statistics[0]}`): each rank normalises with its own rows. "
            "Give the layer axis_name=, or accept the difference, as torch does without "
            "SyncBatchNorm."
        )
    scales_by_size = re.search(r"stablehlo\.(r?sqrt|sign)\b", program)
    if scales_by_size and all("params" in x.path for x in wrong) and _gradients_agree(found.leaves):
        return (
            f"The gradients agree, and `{wrong[0].path}` does not: the optimizer divides a "
            "gradient by its own size, as Adam does, and rounding decides the step of one that "
            "cancels out to nearly 0, such as that of a number added to all logits. Compare with "
            "optax.sgd."
        )
    if _is_random(program):
        return _RANDOM
    if _clips(program):
        return (
            "The changes have no common ratio, and the step cuts values off: each rank clips its "
            "own gradient, and the mean of clipped gradients is not the clipped mean. Clip inside "
            "jdp.replicated(optax.chain(optax.clip_by_global_norm(1.0), ...)), or after grads = "
            "jdp.sync_gradients(grads), with apply_gradients(grads, synced=True). If nothing is "
            "clipped, something in the loss is not a mean over rows, such as a masked mean without "
            "weight=."
        )
    return (
        "Something in the loss is not a mean over rows: a masked mean without weight=, a norm of "
        "the whole batch, statistics of a rank's own rows. Or each rank changes its gradient "
        "before it is averaged, as clipping does."
    )


def _gradients_agree(leaves: list[LeafDifference]) -> bool:
    """Whether what an optimizer keeps of the gradients agrees, next to the largest of it."""
    kept = [x for x in leaves if "opt_state" in x.path]
    kept = [x for x in kept if not x.change_one.is_integer()]  # a count
    largest = max((abs(x.change_one) for x in kept), default=0.0)
    return largest > 0 and all(x.difference <= 1e-5 * largest for x in kept)


def _reduces_its_own(path: str, named: str) -> bool:
    """Whether the layer that a leaf belongs to sums over ranks and is differentiated."""
    layer = re.findall(r"\w+", path)[-2:-1]
    return any(re.search(rf'"transpose\([^"]*/{name}/psum', named) for name in layer)


_STATISTICS = re.compile(r"batch_stats|running_|moving_|(\['|\.)(mean|var)('\]|$|\b)")
_RANDOM = (
    "The step draws random numbers: with state.key every rank draws its own (dropout, "
    "noise), which one rank cannot repeat. Compare with them off, or with state.shared_key."
)


def _is_random(program: str) -> bool:
    return "threefry" in program or "rng_bit_generator" in program


_FEW_DIGITS = (
    "The differences are small, and the step computes in bfloat16 or float16, which may explain "
    "them. Compare in float32, or with a larger tolerance=."
)


def _is_small(leaf: LeafDifference) -> bool:
    return leaf.difference < 0.05 * abs(leaf.change_one)


def _computes_in_16_bits(program: str) -> bool:
    return re.search(r"[x<]b?f16>", program) is not None


def _clips(program: str) -> bool:
    cuts = "stablehlo.minimum" in program or "stablehlo.select" in program
    return "stablehlo.clamp" in program or (cuts and "stablehlo.sqrt" in program)


def _cause_of_metric(metric: LeafDifference, num_ranks: int, program: str) -> str:
    one, many = metric.change_one, metric.change_all
    told = f"`{metric.path}` is {one:.6g} on one rank and {many:.6g} on {num_ranks}. "
    ratio = many / one if one else 0.0
    if np.isclose(ratio, 1 / num_ranks, rtol=1e-2):
        return told + (
            "It is a sum over rows, and float scalars are averaged over ranks: write "
            "jdp.sum_over_ranks(x)."
        )
    if np.isclose(ratio, num_ranks, rtol=1e-2):
        return told + "It is a mean that was summed over ranks: write jdp.mean_over_ranks(x)."
    if _computes_in_16_bits(program) and _is_small(metric):
        return told + _FEW_DIGITS
    if _is_random(program):
        return told + _RANDOM
    return told + (
        "Float scalars are averaged over ranks, and the mean of what the ranks have is not that of "
        "the whole batch. For a norm of the gradient, grads = jdp.sync_gradients(grads) first, and "
        "apply_gradients(grads, synced=True); for a maximum, jax.lax.pmax(x, 'data'); for a ratio "
        "or masked mean, jdp.sum_over_ranks of both parts, or weight=; for a value for each row, "
        "jdp.rows(x)."
    )


def _numbers(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    is_complex = jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating)
    return np.asarray(leaf, np.complex128 if is_complex else np.float64)
