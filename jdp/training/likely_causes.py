"""The likely cause of a difference between a step on one rank and on n."""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from jdp.analysis.lint_clip_before_reduce import NONLINEAR
from jdp.training.step_differences import LeafDifference, StepDifference, beyond


def likely_cause(
    found: StepDifference,
    program: str,
    named: str,
    equal_draws: Sequence[str] = (),
    warned: Collection[str] = (),
) -> str:
    """Return why one rank and n ranks may differ."""
    leaves = beyond(found.leaves)
    causes, prefix = (_CAUSES, "") if leaves else (_CAUSES_OF_METRICS, _METRIC)
    wrong = leaves or beyond(found.metrics)[:1]
    evidence = _Evidence(found, wrong, program, named, equal_draws, warned)
    leaf, text = next((leaf, text) for find, text in causes if (leaf := find(evidence)))
    lines = ", ".join(equal_draws)
    return (prefix + text).format(leaf=leaf, num_ranks=found.num_ranks, lines=lines)


@dataclass(frozen=True)
class _Evidence:
    """The evidence for a cause.

    Attributes:
      found: all differences.
      wrong: the leaves of the state that are too far apart, at least one; or one metric.
      program, named, equal_draws, warned: see `likely_cause`.
    """

    found: StepDifference
    wrong: list[LeafDifference]
    program: str
    named: str
    equal_draws: Sequence[str]
    warned: Collection[str]

    def worst_if(self, applies: bool) -> LeafDifference | None:
        """Return the leaf that is furthest apart, if the cause applies."""
        return self.wrong[0] if applies else None


def _drifted(evidence: _Evidence) -> LeafDifference | None:
    return next((leaf for leaf in evidence.wrong if leaf.rank is not None), None)


def _are_n_times_smaller(evidence: _Evidence) -> LeafDifference | None:
    return _have_ratio(evidence, 1 / evidence.found.num_ranks)


def _are_n_times_larger(evidence: _Evidence) -> LeafDifference | None:
    return _have_ratio(evidence, evidence.found.num_ranks)


def _have_ratio(evidence: _Evidence, ratio: float) -> LeafDifference | None:
    ratios = [leaf.change_all / leaf.change_one for leaf in evidence.wrong if leaf.change_one]
    return evidence.worst_if(bool(ratios) and np.allclose(ratios, ratio, rtol=1e-2))


def _have_few_digits(evidence: _Evidence) -> LeafDifference | None:
    are_small = all(leaf.difference < 0.05 * abs(leaf.change_one) for leaf in evidence.wrong)
    return evidence.worst_if(are_small and bool(re.search(r"[x<]b?f16>", evidence.program)))


_STATISTICS = re.compile(
    r"batch_stats|running_|moving_|(mean|var)_ema|(\['|\.)(mean|var)('\]|$|\b)"
)


def _statistics(evidence: _Evidence) -> LeafDifference | None:
    return next((leaf for leaf in evidence.wrong if _STATISTICS.search(leaf.path)), None)


def _reduced_statistics(evidence: _Evidence) -> LeafDifference | None:
    """Find statistics of a layer that sums over ranks and is differentiated."""
    for leaf in evidence.wrong:
        for layer in re.findall(r"\w+", leaf.path)[-2:-1] if _STATISTICS.search(leaf.path) else ():
            if re.search(rf'"transpose\([^"]*/{layer}/psum', evidence.named):
                return leaf
    return None


def _are_scaled_by_size(evidence: _Evidence) -> LeafDifference | None:
    """Find parameters of an optimizer like Adam, whose gradients agree."""
    scales = re.search(r"stablehlo\.(r?sqrt|sign)\b", evidence.program)
    are_params = all("params" in leaf.path for leaf in evidence.wrong)
    kept = [leaf for leaf in evidence.found.leaves if "opt_state" in leaf.path]
    kept = [leaf for leaf in kept if not leaf.change_one.is_integer()]  # a count
    largest = max((abs(leaf.change_one) for leaf in kept), default=0.0)
    agree = largest > 0 and all(leaf.difference <= 1e-5 * largest for leaf in kept)
    return evidence.worst_if(bool(scales) and are_params and agree)


def _are_random(evidence: _Evidence) -> LeafDifference | None:
    return evidence.worst_if(bool(re.search("threefry|rng_bit_generator", evidence.program)))


def _draw_alike(evidence: _Evidence) -> LeafDifference | None:
    return evidence.worst_if(bool(evidence.equal_draws))


def _are_changed(evidence: _Evidence) -> LeafDifference | None:
    return evidence.worst_if(any(NONLINEAR in warning for warning in evidence.warned))


def _any(evidence: _Evidence) -> LeafDifference | None:
    return evidence.wrong[0]


_FEW_DIGITS = (
    "The differences are small, and the step computes in bfloat16 or float16, which may explain "
    "them. Compare in float32, or with a larger tolerance=."
)
_DRAWN_ALIKE = (
    "{lines} draws random numbers for the rows of a rank from a key that all ranks share: every "
    "rank draws the same ones, where one rank draws others for each row. Draw from state.key, or "
    "from jax.random.fold_in(key, jax.lax.axis_index('data')), and compare with a constant in "
    "their place."
)
_RANDOM = (
    "The step draws random numbers: with state.key every rank draws its own (dropout, noise), "
    "which one rank cannot repeat. Compare with them off, or with state.shared_key."
)

# Each with the function that returns the leaf to name where the cause applies. The first counts.
_Causes = list[tuple[Callable[[_Evidence], LeafDifference | None], str]]
_CAUSES: _Causes = [
    (
        _drifted,
        "The {num_ranks} ranks hold different values of `{leaf.path}`, rank {leaf.rank} the "
        "furthest from one: look for callbacks that are not pure, and for kernels that add in no "
        "fixed order.",
    ),
    (
        _are_n_times_smaller,
        "Every change is {num_ranks} times smaller. The loss is summed over rows instead of "
        "averaged: the mean over ranks of sums divides by the ranks. Write .mean(), not .sum().",
    ),
    (
        _are_n_times_larger,
        "Every change is {num_ranks} times larger. A gradient is summed over ranks instead of "
        "averaged: look for lax.psum in the step, or replicated(mean=False).",
    ),
    (_have_few_digits, _FEW_DIGITS),
    (
        _reduced_statistics,
        "Batch statistics differ (`{leaf.path}`), although the layer averages them over the ranks: "
        "each rank counts the same there, however few of its rows a mask leaves. Leave mask= out "
        "of the layer, or give it the means of all rows that count: jdp.sum_over_ranks(sum) / "
        "jdp.sum_over_ranks(count).",
    ),
    (
        _statistics,
        "Batch statistics differ (`{leaf.path}`): each rank normalises with its own rows. Give the "
        "layer axis_name=, or accept the difference, as torch does without SyncBatchNorm.",
    ),
    (
        _are_scaled_by_size,
        "The gradients agree, and `{leaf.path}` does not: the optimizer divides a gradient by its "
        "own size, as Adam does, and rounding decides the step of one that cancels out to nearly "
        "0, such as that of a number added to all logits. Compare with optax.sgd.",
    ),
    (_draw_alike, _DRAWN_ALIKE),
    (_are_random, _RANDOM),
    (
        _are_changed,
        "The changes have no common ratio, and each rank changes its own gradient by what is not "
        "linear: the mean of clipped gradients, for instance, is not the clipped mean. Change it "
        "inside jdp.replicated(optax.chain(optax.clip_by_global_norm(1.0), ...)), or after grads = "
        "jdp.sync_gradients(grads), with apply_gradients(grads, synced=True).",
    ),
    (
        _any,
        "Something in the loss is not a mean over rows: a masked mean without weight=, a norm of "
        "the whole batch, statistics of a rank's own rows. Or each rank changes its gradient "
        "before it is averaged, as clipping does.",
    ),
]
_METRIC = (
    "`{leaf.path}` is {leaf.change_one:.6g} on one rank and {leaf.change_all:.6g} on {num_ranks}. "
)
_CAUSES_OF_METRICS: _Causes = [
    (
        _are_n_times_smaller,
        "It is a sum over rows, and float scalars are averaged over ranks: write "
        "jdp.sum_over_ranks(x).",
    ),
    (
        _are_n_times_larger,
        "It is a mean that was summed over ranks: write jdp.mean_over_ranks(x).",
    ),
    (_have_few_digits, _FEW_DIGITS),
    (_draw_alike, _DRAWN_ALIKE),
    (_are_random, _RANDOM),
    (
        _any,
        "Float scalars are averaged over ranks, and the mean of the ranks' values is not the value "
        "of the whole batch. For a norm of the gradient, grads = jdp.sync_gradients(grads) first, "
        "and apply_gradients(grads, synced=True); for a maximum, jdp.max_over_ranks(x); for a "
        "ratio or masked mean, jdp.sum_over_ranks of both parts, or weight=; for a value for each "
        "row, jdp.rows(x).",
    ),
]
