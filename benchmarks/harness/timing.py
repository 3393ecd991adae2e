"""Times contestants in alternating rounds, and compares them with each other and a goal."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jdp.tools.paired_timing import Clock as Clock
from jdp.tools.paired_timing import alternate as alternate
from jdp.tools.paired_timing import interval as interval


class Comparison(NamedTuple):
    """The result of `compare`.

    Attributes:
      first_s: median seconds of the first contestant.
      second_s: median seconds of the second.
      ratio: median over rounds of first / second.
      low: lower end of the ratio's 95 % interval.
      high: its upper end.
      num_rounds: number of rounds, each with two runs of each contestant.
    """

    first_s: float
    second_s: float
    ratio: float
    low: float
    high: float
    num_rounds: int


def compare(
    first: Clock,
    second: Clock,
    *,
    budget_s: float,
    min_rounds: int = 3,
    max_rounds: int = 500,
    warm_up: int = 1,
) -> Comparison:
    """Time two contestants by `alternate`; each round gives one ratio.

    Args:
      first: clock of the first contestant.
      second: clock of the second.
      budget_s: total seconds, after which no new round begins.
      min_rounds: minimum number of rounds, even if they exceed the budget.
      max_rounds: maximum number of rounds.
      warm_up: runs of each contestant before the first round.
    """
    limits = {"budget_s": budget_s, "min_rounds": min_rounds, "max_rounds": max_rounds}
    found = alternate({"first": first, "second": second}, **limits, warm_up=warm_up)
    first_s, second_s = (float(np.median(seconds)) for seconds in found.values())
    ratios = found["first"] / found["second"]
    return Comparison(first_s, second_s, float(np.median(ratios)), *interval(ratios), len(ratios))


def until_ready(fn: Callable[[], Any]) -> float:
    """Time `fn` until the devices have computed its result."""
    start = time.perf_counter()
    jax.block_until_ready(fn())
    return time.perf_counter() - start


def until_returned(fn: Callable[[], Any]) -> float:
    """Time `fn` until it returns, which is the time in Python. Then wait for the devices."""
    start = time.perf_counter()
    result = fn()
    elapsed = time.perf_counter() - start
    jax.block_until_ready(result)
    return elapsed


class Word(str):
    """A word in place of a number in a row; any number format prints it."""

    def __format__(self, spec: str) -> str:
        return str(self)


def against(
    found: Mapping[str, np.ndarray], jdp: str, rival: str, goal: float | None
) -> dict[str, Any]:
    """Return the cells of a row for a rival: its time as a multiple of jdp's.

    Args:
      found: result of `alternate`; missing rivals are absent.
      jdp: name of jdp's contestant.
      rival: name of the rival.
      goal: the ratio to reach, or None.
    """
    row: dict[str, Any] = {"rival": rival, "jdp_us": float(np.median(found[jdp])) * 1e6}
    row["goal"] = Word("-") if goal is None else goal
    if rival not in found:
        row |= dict.fromkeys(("rival_us", "ratio", "interval", "met"), Word("missing"))
        return row | {"rounds": len(found[jdp])}
    ratios = found[rival] / found[jdp]
    ratio, (low, high) = float(np.median(ratios)), interval(ratios)
    met = Word("-") if goal is None else "yes" if ratio >= goal else "no"
    row |= {"rival_us": float(np.median(found[rival])) * 1e6, "ratio": ratio, "met": met}
    return row | {"interval": f"{low:.2f} to {high:.2f}", "rounds": len(ratios)}


AGAINST_COLUMNS = {
    "rival": "{rival}",
    "jdp, us": "{jdp_us:.1f}",
    "rival, us": "{rival_us:.1f}",
    "rival / jdp": "{ratio:.2f}",
    "95 % interval": "{interval}",
    "rounds": "{rounds}",
    "goal": "{goal:.3g}",
    "met": "{met}",
}
