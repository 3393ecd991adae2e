"""The clocks of the processes of a profile, compared by the collectives that they ran together.

No rank leaves a collective before the last one has entered it. So each collective that two
processes ran bounds the difference of their clocks from both sides, and all of them together bound
it by the shortest ones. Processes of one host have one clock and are not shifted.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jdp.inspect.profiling import trace_file
from jdp.inspect.profiling.trace_file import ProcessTrace

# In these a rank needs something of every other rank.
_MEETS = frozenset(["all-reduce", "reduce-scatter", "all-gather", "all-to-all"])

_Meetings = dict[tuple, tuple[int, int]]  # a collective -> last entered, first left


class Shift(NamedTuple):
    """What is added to the clock of a process to make it that of the first process.

    Attributes:
      ns: nanoseconds.
      within: the largest error of it, in nanoseconds: 0 for the same clock; None if the processes
        ran no collective together, or their collectives contradict each other.
    """

    ns: int
    within: int | None


def shifts(traces: Sequence[ProcessTrace]) -> list[Shift]:
    """Return the shift of each process, to the clock of the first one."""
    met: dict[str, list[_Meetings]] = {}
    for trace in traces:
        met.setdefault(trace.facts["clock"], []).append(_meetings(trace))
    clocks = [trace.facts["clock"] for trace in traces]
    found = {clock: _shift(met[clocks[0]], its) for clock, its in met.items() if clock != clocks[0]}
    return [found.get(clock, Shift(0, 0)) for clock in clocks]


def _shift(first: Sequence[_Meetings], other: Sequence[_Meetings]) -> Shift:
    """Return the shift of a clock, from all pairs of a process of the first clock and one of it."""
    # With x added to its clock, no process leaves before the other one enters.
    pairs = [(a[key], b[key]) for a in first for b in other for key in a.keys() & b.keys()]
    if not pairs:
        return Shift(0, None)
    low = max(first_entered - left for (first_entered, _), (_, left) in pairs)
    high = min(first_left - entered for (_, first_left), (entered, _) in pairs)
    if low > high:
        return Shift(0, None)
    return Shift((low + high) // 2, (high - low + 1) // 2)


def _meetings(trace: ProcessTrace) -> _Meetings:
    """Return for each collective when the last rank entered and the first rank left, in ns.

    The key is the step, the collective, and how often it ran in the step before.
    """
    start, num_ranks = trace.facts["start_ns"], len(trace.facts["ranks"])
    times: dict[tuple, list[tuple[int, int]]] = {}
    for rank in trace.facts["ranks"]:
        own = [each for each in trace.slices if each.rank == rank]
        steps = [(x.begin, x.end, x.facts["step"]) for x in own if x.kind == trace_file.STEP]
        seen: dict[tuple, int] = {}
        for each in sorted(own, key=lambda x: x.begin):
            # Groups of ranks do not wait for each other.
            is_of_groups = each.facts.get("num_groups", 1) > 1
            if is_of_groups or each.facts.get("collective") not in _MEETS:
                continue
            step = next((n for begin, end, n in steps if begin <= each.begin < end), None)
            if step is None:
                continue
            name = step, each.facts["op"]
            seen[name] = seen.get(name, -1) + 1
            times.setdefault((*name, seen[name]), []).append((each.begin, each.end))
    return {
        key: (start + max(b for b, _ in both), start + min(e for _, e in both))
        for key, both in times.items()
        if len(both) == num_ranks
    }
