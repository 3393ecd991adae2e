"""Times many contestants in alternating rounds, and compares them with a goal."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.harness import timing
from benchmarks.harness.timing import Clock


class Word(str):
    """A word in place of a number in a row; any number format prints it."""

    def __format__(self, spec: str) -> str:
        return str(self)


def alternate(
    clocks: Mapping[str, Clock],
    *,
    budget_s: float,
    min_rounds: int = 5,
    max_rounds: int = 100,
    warm_up: int = 1,
) -> dict[str, np.ndarray]:
    """Time all contestants side by side, as `timing.compare` does two.

    A round runs all contestants in one order and then in reverse, so that a slow drift affects all
    equally; every other round begins with the last contestant.

    Args:
      clocks: the clock of each contestant.
      budget_s: total seconds, after which no new round begins.
      min_rounds: minimum number of rounds, even if they exceed the budget.
      max_rounds: maximum number of rounds.
      warm_up: runs of each contestant before the first round.

    Returns:
      For each contestant, `[rounds]` seconds of one run: the mean of its two runs in a round.
    """
    for clock in list(clocks.values()) * warm_up:
        clock()
    rounds: list[dict[str, float]] = []
    end = time.perf_counter() + budget_s
    while len(rounds) < max_rounds and (len(rounds) < min_rounds or time.perf_counter() < end):
        names = list(clocks) if len(rounds) % 2 == 0 else list(clocks)[::-1]
        there = {name: clocks[name]() for name in names}
        back = {name: clocks[name]() for name in names[::-1]}
        rounds.append({name: (there[name] + back[name]) / 2 for name in names})
    return {name: np.array([seconds[name] for seconds in rounds]) for name in clocks}


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
    ratio, (low, high) = float(np.median(ratios)), timing.interval(ratios)
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
