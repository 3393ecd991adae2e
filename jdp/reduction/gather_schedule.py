"""When parameters that live as shards are gathered: in groups, in the order of their use."""

from collections.abc import Sequence

from jdp.reduction.flat_program import FlatValue


def groups(uses: Sequence[Sequence[FlatValue]], capacity: int) -> dict[int, list[FlatValue]]:
    """Return the groups to gather, in order, so that two groups are in memory at any time.

    A parameter that is used again after the next group has begun is gathered again.

    Args:
      capacity: bytes of a group of whole parameters, > 0. One operation may need more.

    >>> import jax
    >>> first, second, third = (FlatValue(jax.typeof(jax.numpy.ones(4))) for _ in range(3))
    >>> found = groups([[first], [second], [first], [third], [first]], capacity=16)
    >>> [*found], found[4] == [first]
    ([0, 1, 3, 4], True)
    """
    found: dict[int, list[FlatValue]] = {}
    last: list[FlatValue] = []
    place: dict[FlatValue, int] = {}  # parameter -> the latest group that it is in
    used = 0  # bytes of the group that is being filled
    for i, needed in enumerate(uses):
        missing = _missing(needed, place, len(found) - 1)
        if not missing:
            continue
        num_bytes = sum(value.num_bytes() for value in missing)
        if not found or used + num_bytes > capacity:
            missing = _missing(needed, place, len(found))
            num_bytes = sum(value.num_bytes() for value in missing)
            found[i] = last = []
            used = 0
        last.extend(missing)
        used += num_bytes
        place.update(dict.fromkeys(missing, len(found) - 1))
    return found


def _missing(
    needed: Sequence[FlatValue], place: dict[FlatValue, int], group: int
) -> list[FlatValue]:
    """Return the parameters that are not in memory while a group is used."""
    return [value for value in needed if place.get(value, -3) < group - 1]


def by_readiness(
    made_at: Sequence[int], sizes: Sequence[int], capacity: int
) -> dict[int, list[int]]:
    """Group results in the order in which they are ready: operation -> results sent after it.

    Args:
      sizes: bytes of each.
      capacity: bytes of a group, > 0. A larger result is a group of its own.

    >>> by_readiness([5, 2, 9], [8, 8, 8], capacity=16)
    {5: [1, 0], 9: [2]}
    """
    filled: list[list[int]] = []
    used = 0
    for i in sorted(range(len(made_at)), key=lambda i: made_at[i]):
        if not filled or used + sizes[i] > capacity:
            filled.append([])
            used = 0
        filled[-1].append(i)
        used += sizes[i]
    sent: dict[int, list[int]] = {}
    for group in filled:
        sent.setdefault(made_at[group[-1]], []).extend(group)
    return sent
