"""The profile of all ranks as a picture: two lanes for each rank, and the parts of its steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jdp.inspect import results
from jdp.inspect.profiling import spans, trace_file
from jdp.inspect.profiling.breakdown import Parts
from jdp.inspect.profiling.summary import Summary
from jdp.inspect.profiling.trace_file import Slice
from jdp.worker import phases

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
_MOST_STEPS = 3  # of the lanes: more would be too narrow to read
_MOST_RANKS = 16


def draw(found: Summary, path: str | Path) -> None:
    """Write a picture of a profile."""
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
        waits = [x for x in trace.slices if x.kind == trace_file.PHASE and x.name == phases.DATA]
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
    """Return the begins of the processes, with the begin of a step as 0."""
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
    exposed = spans.difference(sent, computing)
    idle = spans.difference([window], spans.union([*sent, *computing]))
    waiting = spans.intersection(idle, spans.union((x.begin, x.end) for x in waits))
    rows = (
        (computing, lane + 0.1, _COLORS["computation"]),
        (waiting, lane + 0.1, _COLORS["data"]),
        (sent, lane + 0.5, _HIDDEN),
        (exposed, lane + 0.5, _COLORS["communication"]),
    )
    for times, top, color in rows:
        inside = spans.intersection(times, [window])
        bars = [((shift + begin) / 1e6, (end - begin) / 1e6) for begin, end in inside]
        axes.broken_barh(bars, (top, 0.38), facecolors=color)


def _times(own: Sequence[Slice], kind: str) -> spans.Spans:
    return spans.union((x.begin, x.end) for x in own if x.kind == kind)
