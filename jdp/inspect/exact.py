"""The comparison of a computed array with the exact one. Needs NumPy alone."""

from typing import Any

import numpy as np


class WrongResultError(AssertionError):
    """A contestant did not compute the exact result."""


def require(
    found: Any,
    expected: np.ndarray | np.floating,
    *,
    contestant: str,
    rank: int,
    round_number: int,
    what: str,
    tolerance: float = 0.0,
) -> None:
    """Compare all elements of one rank's result."""
    found, expected = np.asarray(found).reshape(-1), np.asarray(expected).reshape(-1)
    if found.shape != expected.shape:
        raise WrongResultError(
            f"{contestant!r} on rank {rank}: {what} has {found.size} elements, not {expected.size}."
        )
    right = np.abs(found - expected) <= tolerance if tolerance else found == expected
    if right.all():
        return
    first, wrong = int(np.argmin(right)), int(right.size - np.count_nonzero(right))
    within = f" to {tolerance:.1e}" if tolerance else ""
    raise WrongResultError(
        f"{contestant!r} computed a wrong result on rank {rank} in round {round_number}: {what} of "
        f"{found.nbytes} bytes, element {first} is {found[first]:.9g} and must be "
        f"{expected[first]:.9g}{within}; {wrong} of {found.size} elements are wrong. Its times "
        "would be meaningless, so the benchmark stops."
    )
