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
    first = traces[0]
    met = _meetings(first)
    return [_shift(first, met, each) for each in traces]


def _shift(first: ProcessTrace, met: dict, trace: ProcessTrace) -> Shift:
    if trace.facts["clock"] == first.facts["clock"]:
        return Shift(0, 0)
    # With x added to its clock, no process leaves before the other one enters.
    low, high = None, None
    for key, (entered, left) in _meetings(trace).items():
        if key in met:
            first_entered, first_left = met[key]
            low = max(first_entered - left, low if low is not None else first_entered - left)
            high = min(first_left - entered, high if high is not None else first_left - entered)
    if low is None or high is None or low > high:
        return Shift(0, None)
    return Shift((low + high) // 2, (high - low + 1) // 2)


def _meetings(trace: ProcessTrace) -> dict[tuple, tuple[int, int]]:
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
            if each.facts.get("collective") not in _MEETS:
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
