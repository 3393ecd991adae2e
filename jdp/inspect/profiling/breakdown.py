"""The parts of a rank's step: waiting for data, computation, exposed communication, host."""

import bisect
from operator import itemgetter
from typing import NamedTuple

from jdp.inspect.profiling import spans
from jdp.inspect.profiling.spans import Spans


class Parts(NamedTuple):
    """Nanoseconds of one step of one rank. They add up to its time.

    Attributes:
      data: the rank runs nothing, and its process waits for a batch.
      computation: it computes, also while it communicates.
      communication: it communicates and computes nothing: exposed.
      host: it runs nothing, and its process does not wait for a batch.
    """

    data: int
    computation: int
    communication: int
    host: int


class Activity(NamedTuple):
    """The times of a rank, each a union, see `spans.union`.

    Attributes:
      computing: its operations that compute.
      communicating: its collectives.
      running: its programs, from first to last operation; empty if the gaps between operations are
        time of the host, which launches each of them.
      waiting: its process waits for a batch.
    """

    computing: Spans
    communicating: Spans
    running: Spans
    waiting: Spans


def parts_of(activity: Activity, window: tuple[int, int]) -> Parts:
    """Return the parts of a step.

    >>> rank = Activity([(0, 40)], [(30, 60)], [(0, 60)], [(60, 90)])
    >>> parts_of(rank, (0, 100))
    Parts(data=30, computation=40, communication=20, host=10)
    """
    computing, communicating, running, waiting = (_within(each, window) for each in activity)
    exposed = spans.difference(communicating, computing)
    busy = spans.difference(spans.union([*computing, *running]), exposed)
    idle = spans.difference([window], spans.union([*exposed, *busy]))
    data = spans.total(spans.intersection(idle, waiting))
    return Parts(data, spans.total(busy), spans.total(exposed), spans.total(idle) - data)


def _within(times: Spans, window: tuple[int, int]) -> Spans:
    # Only the intervals near the window: a profile may have a million.
    first = bisect.bisect_right(times, window[0], key=itemgetter(1))
    last = bisect.bisect_left(times, window[1], key=itemgetter(0))
    return spans.intersection(times[first:last], [window])
