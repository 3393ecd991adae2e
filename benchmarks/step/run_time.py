"""Measures the time of a step: jdp against each rival."""

from typing import Any

from benchmarks.harness import exact, timing
from benchmarks.harness.report import Section
from benchmarks.step import contestants, lineup


def measure(*, budget_s: float, min_rounds: int) -> Section:
    """Time all setups.

    Args:
      budget_s: seconds for each pair.
      min_rounds: minimum number of rounds of each pair, even if they exceed the budget.
    """
    rows = []
    for model, ranks, k in lineup.SETUPS:
        made = lineup.compiled(model, ranks, k)
        clocks = {label: exact.checked(one, timing.until_ready) for label, one in made.items()}
        for label in contestants.rivals(k):
            found = timing.compare(
                clocks["jdp"], clocks[label], budget_s=budget_s, min_rounds=min_rounds
            )
            setup = {"model": model, "ranks": ranks, "micro_batches": k, "rival": label}
            rows.append({"section": "step", **setup, **_measured(found, _goal(label, k))})
    return Section(
        "Time of a step",
        "jdp's time over the rival's: below 1, jdp is faster. Goals: at most 1.02 of the best "
        "rival, and at least 1.5 times faster (0.667) than the naturally written `jit` with "
        "accumulation. Rounds of two runs each, in alternating order; medians, and the 95 % "
        "bootstrap interval of the median ratio. The rivals are in "
        "`benchmarks/step/contestants.py`. The loss, parameters and momentum after each step are "
        "equal to those of the same training on one device, to 1e-4 of the largest element. "
        f"{exact.CHECKED}",
        rows,
        {
            "model": "{model}",
            "ranks": "{ranks}",
            "micro-batches": "{micro_batches}",
            "rival": "{rival}",
            "jdp, ms": "{jdp_ms:.1f}",
            "rival, ms": "{rival_ms:.1f}",
            "jdp / rival": "{ratio:.3f}",
            "95 % interval": "{low:.3f} to {high:.3f}",
            "rounds": "{rounds}",
            "goal": "{goal:.3f}",
            "met": "{met}",
        },
    )


def _goal(label: str, k: int) -> float:
    return 1 / 1.5 if label == "jit" and k > 1 else 1.02


def _measured(found: timing.Comparison, goal: float) -> dict[str, Any]:
    return {
        "jdp_ms": found.first_s * 1e3,
        "rival_ms": found.second_s * 1e3,
        "ratio": found.ratio,
        "low": found.low,
        "high": found.high,
        "rounds": found.num_rounds,
        "goal": goal,
        "met": "yes" if found.ratio <= goal else "no",
    }
