"""The one timing loop: two contestants in alternating pairs, both orders, with an interval."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jdp.tools.paired_timing import Clock as Clock
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
    """Time two contestants against each other on a machine that is not quiet.

    Rounds of first, second, second, first alternate with rounds in the opposite order, so that a
    slow drift and effects of the order affect both equally. Each round gives one ratio.

    Args:
      first: clock of the first contestant.
      second: clock of the second.
      budget_s: total seconds, after which no new round begins.
      min_rounds: minimum number of rounds, even if they exceed the budget.
      max_rounds: maximum number of rounds.
      warm_up: runs of each contestant before the first round.
    """
    for _ in range(warm_up):
        first(), second()
    rounds: list[tuple[float, float]] = []  # seconds of one run, the mean of the round's two
    end = time.perf_counter() + budget_s
    while len(rounds) < max_rounds and (len(rounds) < min_rounds or time.perf_counter() < end):
        if len(rounds) % 2 == 0:
            outer, inner = _round(first, second)
            rounds.append((outer, inner))
        else:
            outer, inner = _round(second, first)
            rounds.append((inner, outer))
    seconds = np.array(rounds)
    ratios = seconds[:, 0] / seconds[:, 1]
    first_s, second_s = np.median(seconds, axis=0)
    return Comparison(
        float(first_s), float(second_s), float(np.median(ratios)), *interval(ratios), len(rounds)
    )


def _round(outer: Clock, inner: Clock) -> tuple[float, float]:
    a, b, c, d = outer(), inner(), inner(), outer()
    return (a + d) / 2, (b + c) / 2


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
