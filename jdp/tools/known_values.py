"""Collectives' inputs with exactly known results. Needs NumPy alone.

Element i of rank r is (i + 2 r + 5 c) mod m, where c counts the calls and m is a prime. The dtype
holds all sums exactly, in any order.
"""

from typing import Any

import numpy as np


class WrongResultError(AssertionError):
    """A contestant did not compute the exact result."""


def require_equal(
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
        f"{contestant!r} computed a wrong result on rank {rank} in round {round_number}: {what} "
        f"of {found.nbytes} bytes, element {first} is {found[first]:.9g} and must be "
        f"{expected[first]:.9g}{within}; {wrong} of {found.size} elements are wrong. The "
        "benchmark stops, because its times would be meaningless."
    )


OPERATIONS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")
OF_RANK, OF_CALL = 2, 5

_PRIMES = (251, 127, 61, 31, 13, 7, 3)
_LARGEST = {"bfloat16": 2**8, "float16": 2**11, "float32": 2**24, "float64": 2**53}


def modulus(num_ranks: int, dtype: str) -> int:
    """Return the number m of distinct inputs: sums are below m num_ranks."""
    try:
        largest = _LARGEST[dtype] if dtype in _LARGEST else int(np.iinfo(dtype).max)
    except (TypeError, ValueError):
        raise ValueError(
            f"{dtype!r} has no exactly known sums. Write one of {', '.join(_LARGEST)}, or a "
            "dtype of integers such as int32."
        ) from None
    for prime in _PRIMES:
        if num_ranks * (prime - 1) <= largest:
            return prime
    raise ValueError(
        f"{dtype} holds integers up to {largest} exactly, too few for sums over {num_ranks} "
        "ranks, so rounding could hide a wrong sum. Use float32."
    )


def values(rank: int, call: int, start: int, size: int, m: int) -> np.ndarray:
    """Return elements start to start + size of a rank's input, `[size]` int64, 0 to m - 1."""
    period = (np.arange(start, start + min(size, m)) + OF_RANK * rank + OF_CALL * call) % m
    return np.resize(period, size)


def input_size(operation: str, num_ranks: int, size: int) -> int:
    """Return a rank's input size; `size` counts as in nccl-tests."""
    return size // num_ranks if operation == "all-gather" else size


def result(operation: str, rank: int, num_ranks: int, call: int, size: int, m: int) -> np.ndarray:
    """Return a rank's exact result, int64.

    >>> result("reduce-scatter", 1, 2, 0, 4, 251).tolist()  # 2 + 4, 3 + 5
    [6, 8]
    >>> result("all-to-all", 1, 2, 0, 4, 251).tolist()  # elements 2, 3 of rank 0 and rank 1
    [2, 3, 4, 5]
    """
    ranks, part = range(num_ranks), size // num_ranks
    if operation == "all-reduce":
        return _sum(num_ranks, call, 0, size, m)
    if operation == "reduce-scatter":
        return _sum(num_ranks, call, rank * part, part, m)
    if operation == "all-gather":
        return np.concatenate([values(r, call, 0, part, m) for r in ranks])
    return np.concatenate([values(r, call, rank * part, part, m) for r in ranks])


# Periodic, like its terms.
def _sum(num_ranks: int, call: int, start: int, size: int, m: int) -> np.ndarray:
    period = min(size, m)
    terms = [values(rank, call, start, period, m) for rank in range(num_ranks)]
    return np.resize(np.sum(terms, axis=0, dtype=np.int64), size)
