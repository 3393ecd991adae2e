"""The schedule of a step as a picture: what computes above, what is sent below."""

from pathlib import Path

from jdp.inspect import results
from jdp.inspect.report import StepReport, of_s

_COLORS = {
    "forward matmul": "#3b6fb6",
    "backward matmul": "#2a9d8f",
    "forward": "#a9c4e6",
    "backward": "#a8dcd5",
    "update": "#d9b44a",
    "other": "#c8c8c8",
}
_SENT, _EXPOSED = "#8e7cc3", "#d1495b"


def draw(report: StepReport, path: str | Path) -> None:
    """Write a picture of the schedule of a step, on two lanes."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 3.2), layout="constrained")
    axes = figure.subplots()
    unit = 1e3
    computing = [(begin, end) for lane, begin, end, _ in report.spans if lane == "computation"]
    for lane, begin, end, name in report.spans:
        is_sent = lane == "communication"
        color = _SENT if is_sent else _COLORS.get(name, _COLORS["other"])
        axes.broken_barh([(begin * unit, (end - begin) * unit)], (0 if is_sent else 1, 0.8),
                         facecolors=color)  # fmt: skip
    for begin, end in _gaps(computing, report.time.likely_s):
        axes.broken_barh([(begin * unit, (end - begin) * unit)], (1, 0.8), facecolors=_EXPOSED)
    axes.set_yticks([0.4, 1.4], ["communication", "computation"])
    axes.set_xlim(0, report.time.likely_s * unit)
    axes.set_xlabel("ms, predicted")
    axes.set_title(
        f"{report.step} on {report.on}: {of_s(report.time.likely_s)} predicted, "
        f"{of_s(report.time.exposed_s)} of it waits for collectives",
        loc="left",
    )
    labels = {**_COLORS, "collective": _SENT, "waits for collectives": _EXPOSED}
    handles = [Patch(color=color, label=label) for label, color in labels.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    results.write_picture(figure, path, dpi=150)


def _gaps(computing: list[tuple[float, float]], end_s: float) -> list[tuple[float, float]]:
    """Return the times in which nothing computes."""
    gaps, now = [], 0.0
    for begin, end in computing:
        if begin > now + 1e-12:
            gaps.append((now, begin))
        now = max(now, end)
    return [*gaps, (now, end_s)] if end_s > now + 1e-12 else gaps
