"""Times contestants in alternating rounds. Needs NumPy alone."""

import time
from collections.abc import Callable, Mapping

import numpy as np

Clock = Callable[[], float]  # does its work once and returns its seconds


def alternate(
    clocks: Mapping[str, Clock],
    *,
    budget_s: float,
    min_rounds: int = 5,
    max_rounds: int = 100,
    warm_up: int = 1,
) -> dict[str, np.ndarray]:
    """Time contestants in rounds; return each one's `[rounds]` seconds, means of two runs.

    A round runs all contestants in one order and then in reverse, against slow drift; every other
    round reverses that.
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


def interval(values: np.ndarray, *, num_samples: int = 2000) -> tuple[float, float]:
    """Return the median's 95 % bootstrap interval (Efron 1979), of `[n]` values."""
    random = np.random.default_rng(0)
    samples = random.choice(values, (num_samples, len(values)))
    low, high = np.percentile(np.median(samples, axis=1), [2.5, 97.5])
    return float(low), float(high)
