"""Arithmetic on sets of times: sorted intervals of whole nanoseconds that do not overlap."""

from collections.abc import Iterable

Spans = list[tuple[int, int]]


def union(intervals: Iterable[tuple[int, int]]) -> Spans:
    """Return the times that lie in any interval.

    >>> union([(5, 7), (0, 2), (1, 3), (4, 4)])
    [(0, 3), (5, 7)]
    """
    found: Spans = []
    for begin, end in sorted(intervals):
        if begin >= end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def intersection(one: Spans, other: Spans) -> Spans:
    """Return the times that lie in both.

    >>> intersection([(0, 3), (5, 7)], [(2, 6)])
    [(2, 3), (5, 6)]
    """
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(one: Spans, other: Spans) -> Spans:
    """Return the times that lie in `one` and not in `other`.

    >>> difference([(0, 3), (5, 7)], [(2, 6)])
    [(0, 2), (6, 7)]
    """
    found, j = [], 0
    for begin, end in one:
        while j < len(other) and other[j][1] <= begin:
            j += 1
        i = j
        while i < len(other) and other[i][0] < end:
            if begin < other[i][0]:
                found.append((begin, other[i][0]))
            begin = max(begin, other[i][1])
            i += 1
        if begin < end:
            found.append((begin, end))
    return found


def total(spans: Spans) -> int:
    """Return the nanoseconds of all intervals.

    >>> total([(0, 3), (5, 7)])
    5
    """
    return sum(end - begin for begin, end in spans)
