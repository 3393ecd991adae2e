"""All ranks' profile: their steps and collectives."""

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from jdp.tools import results
from jdp.tools.profiling import trace_file
from jdp.tools.profiling.trace_file import ProcessTrace, Slice
from jdp.worker import process_status

Spans = list[tuple[int, int]]


def span_union(intervals: Iterable[tuple[int, int]]) -> Spans:
    """Return the times in any interval."""
    found: Spans = []
    for begin, end in sorted(intervals):
        if begin >= end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _span_intersection(one: Spans, other: Spans) -> Spans:
    """Return the times in both.

    >>> _span_intersection([(0, 3), (5, 7)], [(2, 6)])
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


def _span_difference(one: Spans, other: Spans) -> Spans:
    """Return the times in `one` and not in `other`.

    >>> _span_difference([(0, 3), (5, 7)], [(2, 6)])
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


def _span_total(spans: Spans) -> int:
    return sum(end - begin for begin, end in spans)


class Parts(NamedTuple):
    """Nanoseconds of one rank's step, which add up to its time.

    Attributes:
      data: idle, and its process waits for a batch.
      computation: it computes, also while it communicates.
      communication: it communicates without computing.
      host: idle otherwise.
    """

    data: int
    computation: int
    communication: int
    host: int


class Activity(NamedTuple):
    """A rank's times, each a `span_union`.

    Attributes:
      running: its programs, from first to last operation; empty if gaps between operations are the
        host's time, which launches each.
      waiting: its process waits for a batch.
    """

    computing: Spans
    communicating: Spans
    running: Spans
    waiting: Spans


def step_parts(activity: Activity, window: tuple[int, int]) -> Parts:
    """Return a step's parts."""
    computing, communicating, running, waiting = (_within(each, window) for each in activity)
    exposed = _span_difference(communicating, computing)
    busy = _span_difference(span_union([*computing, *running]), exposed)
    idle = _span_difference([window], span_union([*exposed, *busy]))
    data = _span_total(_span_intersection(idle, waiting))
    return Parts(data, _span_total(busy), _span_total(exposed), _span_total(idle) - data)


def _within(times: Spans, window: tuple[int, int]) -> Spans:
    # Only intervals near the window: a profile may have a million.
    first = bisect.bisect_right(times, window[0], key=itemgetter(1))
    last = bisect.bisect_left(times, window[1], key=itemgetter(0))
    return _span_intersection(times[first:last], [window])


# A rank leaves a collective only after the last one has entered it. So common collectives bound the
# difference of two clocks from both sides, the shortest best. Processes of one host share a clock.


# Here a rank needs every other rank's value.
_MEETS = frozenset(["all-reduce", "reduce-scatter", "all-gather", "all-to-all"])

_Meetings = dict[tuple, tuple[int, int]]  # collective -> last entered, first left


class Shift(NamedTuple):
    """The offset in ns from a process's clock to the first process's.

    Attributes:
      within: its largest error in ns: 0 for the same clock; None without common collectives, or if
        they contradict each other.
    """

    ns: int
    within: int | None


def clock_shifts(traces: Sequence[ProcessTrace]) -> list[Shift]:
    """Return each process's shift to the first one's clock."""
    met: dict[str, list[_Meetings]] = {}
    for trace in traces:
        met.setdefault(trace.facts["clock"], []).append(_meetings(trace))
    clocks = [trace.facts["clock"] for trace in traces]
    found = {clock: _shift(met[clocks[0]], its) for clock, its in met.items() if clock != clocks[0]}
    return [found.get(clock, Shift(0, 0)) for clock in clocks]


def _shift(first: Sequence[_Meetings], other: Sequence[_Meetings]) -> Shift:
    """From all pairs of processes of both clocks."""
    # With x added to its clock, a process leaves only after the other one enters.
    pairs = [(a[key], b[key]) for a in first for b in other for key in a.keys() & b.keys()]
    if not pairs:
        return Shift(0, None)
    low = max(first_entered - left for (first_entered, _), (_, left) in pairs)
    high = min(first_left - entered for (_, first_left), (entered, _) in pairs)
    if low > high:
        return Shift(0, None)
    return Shift((low + high) // 2, (high - low + 1) // 2)


def _meetings(trace: ProcessTrace) -> _Meetings:
    """Return when the last rank entered and the first left a collective, in ns, by step and run."""
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


@dataclass(frozen=True)
class RankSteps:
    """Parts of one rank's steps, by number."""

    rank: int
    process: int
    steps: Mapping[int, Parts]

    def mean(self) -> tuple[float, float, float, float]:
        """Return each part's mean in ns; they add up to the mean step."""
        data, computation, communication, host = (
            sum(values) / len(self.steps) for values in zip(*self.steps.values(), strict=True)
        )
        return data, computation, communication, host

    def own_ns(self) -> float:
        """Return the mean time without waiting for other ranks."""
        data, computation, _, host = self.mean()
        return data + computation + host


@dataclass(frozen=True)
class CollectiveTimes:
    """A collective in all ranks' steps, with mean times; the others wait for `shortest_rank`."""

    name: str
    num_bytes: int | None
    algorithm: str
    runs: float
    took_ns: float
    longest_rank: int
    shortest_rank: int


@dataclass(frozen=True)
class Summary:
    """All ranks' profile.

    Attributes:
      ranks: by their own time, longest first: the others wait for it.
      collectives: in the order of their first runs.
      notes: missing or damaged data, in words.
    """

    traces: Sequence[ProcessTrace]
    shifts: Sequence[Shift]
    ranks: Sequence[RankSteps]
    collectives: Sequence[CollectiveTimes]
    notes: Sequence[str]

    def begins(self) -> list[int]:
        """Return each profile's start, in ns after the earliest."""
        begins = [
            trace.facts["start_ns"] + shift.ns
            for trace, shift in zip(self.traces, self.shifts, strict=True)
        ]
        return [begin - min(begins) for begin in begins]

    def to_json(self) -> dict[str, Any]:
        """Return the summary for JSON, in nanoseconds."""
        return {
            "ranks": [
                {
                    "rank": each.rank,
                    "process": each.process,
                    "own_ns": each.own_ns(),
                    "mean_ns": dict(zip(Parts._fields, each.mean(), strict=True)),
                    "steps_ns": {str(n): parts._asdict() for n, parts in each.steps.items()},
                }
                for each in self.ranks
            ],
            "collectives": [asdict(each) for each in self.collectives],
            "clocks": [
                {"process": trace.facts["process"], "shift_ns": shift.ns, "within_ns": shift.within}
                for trace, shift in zip(self.traces, self.shifts, strict=True)
            ],
            "notes": list(self.notes),
        }


def summarize(folder: Path) -> Summary:
    """Read all processes' profile."""
    traces, notes = trace_file.read_folder(folder)
    by_process = {trace.facts["process"]: _ranks(trace) for trace in traces}
    ranks = [each for found in by_process.values() for each in found]
    for trace in traces:
        left = {*trace.facts["ranks"]} - {each.rank for each in by_process[trace.facts["process"]]}
        if left:
            names = ", ".join(map(str, sorted(left)))
            process = trace.facts["process"]
            file = trace_file.path_of(folder, process).name
            notes.append(f"process {process}: {file} has no step of its ranks {names}.")
    if not ranks:
        raise ValueError(
            f"{folder} has no profile of a step. {' '.join(notes)}".strip()
            + " Write `with jdp.profile(folder, steps=range(10, 20)):` around the training loop."
        )
    shifts = clock_shifts(traces)
    for trace, shift in zip(traces, shifts, strict=True):
        notes += trace.facts.get("notes", [])
        if shift.within is None:
            notes.append(
                f"process {trace.facts['process']}: its clock is not shifted, because its host "
                f"ran no collective together with that of process {traces[0].facts['process']}, "
                "or their collectives contradict each other."
            )
    ranks.sort(key=RankSteps.own_ns, reverse=True)
    return Summary(traces, shifts, ranks, _collectives(traces, ranks), notes)


def _ranks(trace: ProcessTrace) -> list[RankSteps]:
    waiting = span_union(
        (x.begin, x.end)
        for x in trace.slices
        if x.kind == trace_file.PHASE and x.name == process_status.DATA
    )
    by_rank: dict[int, dict[str, list[Slice]]] = {}
    for each in trace.slices:
        if each.rank is not None:
            by_rank.setdefault(each.rank, {}).setdefault(each.kind, []).append(each)
    # A CPU device runs its program by itself; the host launches each kernel of a GPU.
    is_cpu = trace.facts["platform"] == "cpu"
    found = []
    for rank, own in sorted(by_rank.items()):
        computing, communicating, running = (
            span_union((x.begin, x.end) for x in own.get(kind, []))
            for kind in (trace_file.COMPUTATION, trace_file.COMMUNICATION, trace_file.PROGRAM)
        )
        activity = Activity(computing, communicating, running if is_cpu else [], waiting)
        steps = {
            x.facts["step"]: step_parts(activity, (x.begin, x.end))
            for x in own.get(trace_file.STEP, [])
        }
        if steps:
            found.append(RankSteps(rank, trace.facts["process"], steps))
    return found


def _collectives(
    traces: Sequence[ProcessTrace], ranks: Sequence[RankSteps]
) -> list[CollectiveTimes]:
    num_steps = {each.rank: len(each.steps) for each in ranks}
    found: dict[str, dict[int, list[Slice]]] = {}
    for trace in traces:
        for rank, own in _in_steps(trace).items():
            for each in own:
                found.setdefault(each.name, {}).setdefault(rank, []).append(each)
    result = []
    for name, by_rank in found.items():
        took = {r: sum(x.end - x.begin for x in own) / num_steps[r] for r, own in by_rank.items()}
        runs = sum(len(own) / num_steps[r] for r, own in by_rank.items()) / len(by_rank)
        facts = next(iter(by_rank.values()))[0].facts
        result.append(
            CollectiveTimes(
                name,
                facts.get("bytes"),
                facts.get("algorithm", ""),
                runs,
                sum(took.values()) / len(took),
                max(took, key=took.__getitem__),
                min(took, key=took.__getitem__),
            )  # fmt: skip
        )
    return result


def _in_steps(trace: ProcessTrace) -> dict[int, list[Slice]]:
    found = {}
    for rank in trace.facts["ranks"]:
        own = [each for each in trace.slices if each.rank == rank]
        steps = [each for each in own if each.kind == trace_file.STEP]
        if steps:
            begin, end = min(x.begin for x in steps), max(x.end for x in steps)
            sent = (x for x in own if x.kind == trace_file.COMMUNICATION)
            inside = (x for x in sent if begin <= x.begin < end)
            found[rank] = sorted(inside, key=lambda x: x.begin)
    return found


_COLORS = {
    "data": "#d9b44a",
    "computation": "#3b6fb6",
    "communication": "#d1495b",
    "host": "#c8c8c8",
}
_LABELS = {
    "data": "data wait",
    "computation": "computation",
    "communication": "exposed communication",
    "host": "host",
}
_HIDDEN = "#8e7cc3"
_MOST_STEPS = 3  # more lanes would be too narrow to read
_MOST_RANKS = 16


def draw(found: Summary, path: str | Path) -> None:
    """Draw a profile."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = found.ranks[:_MOST_RANKS]
    figure = Figure(figsize=(12, 2 + 0.55 * len(ranks)), layout="constrained")
    lanes, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_lanes(lanes, found, [each.rank for each in ranks])
    for i, each in enumerate(ranks):
        begin = 0.0
        for name, value in zip(Parts._fields, each.mean(), strict=True):
            bars.barh(i, value / 1e6, left=begin, height=0.7, color=_COLORS[name])
            begin += value / 1e6
    bars.set_yticks(range(len(ranks)), [f"rank {each.rank}" for each in ranks])
    bars.invert_yaxis()
    bars.set_xlabel("ms, mean step")
    left = len(found.ranks) - len(ranks)
    bars.set_title(
        "most time of its own first" + (f", {left} more ranks" if left else ""), loc="left"
    )
    handles = [Patch(color=color, label=_LABELS[name]) for name, color in _COLORS.items()]
    handles.append(Patch(color=_HIDDEN, label="hidden communication"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    results.write_picture(figure, path, dpi=150)


def _draw_lanes(axes: Any, found: Summary, shown: Sequence[int]) -> None:
    own = (each.steps for each in found.ranks if each.rank in shown)
    numbers = sorted({number for steps in own for number in steps})[:_MOST_STEPS]
    edges: list[float] = []
    begins = _first_steps(found, numbers[0])
    for trace, shift in zip(found.traces, begins, strict=True):
        waits = [
            x for x in trace.slices if x.kind == trace_file.PHASE and x.name == process_status.DATA
        ]
        for rank in set(trace.facts["ranks"]) & set(shown):
            own = [each for each in trace.slices if each.rank == rank]
            steps = [x for x in own if x.kind == trace_file.STEP and x.facts["step"] in numbers]
            if steps:
                window = min(x.begin for x in steps), max(x.end for x in steps)
                lane = shown.index(rank)
                _draw_rank(axes, lane, own, waits, window, shift)
                edges += [(shift + x) / 1e6 for x in window]
    title = f"steps {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"step {numbers[0]}"
    axes.set_title(f"{title}: computation above, communication below", loc="left")
    axes.set_yticks([i + 0.5 for i in range(len(shown))], [f"rank {rank}" for rank in shown])
    axes.set_ylim(len(shown), 0)
    axes.set_xlim(min(edges), max(edges))
    axes.set_xlabel("ms")


def _first_steps(found: Summary, number: int) -> list[int]:
    begins = found.begins()
    steps = [
        shift + each.begin
        for trace, shift in zip(found.traces, begins, strict=True)
        for each in trace.slices
        if each.kind == trace_file.STEP and each.facts["step"] == number
    ]
    return [begin - min(steps) for begin in begins]


def _draw_rank(
    axes: Any, lane: int, own: Sequence[Slice], waits: Sequence[Slice], window: tuple, shift: int
) -> None:
    computing = _times(own, trace_file.COMPUTATION)
    sent = _times(own, trace_file.COMMUNICATION)
    exposed = _span_difference(sent, computing)
    idle = _span_difference([window], span_union([*sent, *computing]))
    waiting = _span_intersection(idle, span_union((x.begin, x.end) for x in waits))
    rows = (
        (computing, lane + 0.1, _COLORS["computation"]),
        (waiting, lane + 0.1, _COLORS["data"]),
        (sent, lane + 0.5, _HIDDEN),
        (exposed, lane + 0.5, _COLORS["communication"]),
    )
    for times, top, color in rows:
        inside = _span_intersection(times, [window])
        bars = [((shift + begin) / 1e6, (end - begin) / 1e6) for begin, end in inside]
        axes.broken_barh(bars, (top, 0.38), facecolors=color)


def _times(own: Sequence[Slice], kind: str) -> Spans:
    return span_union((x.begin, x.end) for x in own if x.kind == kind)
