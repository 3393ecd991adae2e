"""Plots time against bytes, for each algorithm and peer."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.report import Section


def draw(path: Path, sections: Sequence[Section]) -> str:
    """Plot the tables of `bandwidth.section`, which contain all contestants.

    Args:
      path: path of the picture; the suffix selects the format.
      sections: the sections of the benchmark.

    Returns:
      A line that reports what was written.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed"
    lines: dict[tuple[str, int], dict[str, list[tuple[int, float]]]] = {}
    for row in (row for section in sections for row in section.rows):
        if "least" in row and row["what"] == "vector":
            panel = lines.setdefault((row["section"].split(",")[0], row["ranks"]), {})
            panel.setdefault(row["contestant"], []).append((row["bytes"], row["us"]))
    if not lines:
        return "no plot: no part of this run has times by size"
    figure = Figure(figsize=(4.5 * len(lines), 5), layout="constrained")
    colors: dict[str, int] = {}
    panels = figure.subplots(1, len(lines), squeeze=False)[0]
    for panel, ((where, ranks), contestants) in zip(panels, lines.items(), strict=True):
        for name, points in contestants.items():
            color = f"C{colors.setdefault(name, len(colors))}"
            panel.loglog(*zip(*points, strict=True), marker=".", label=name, color=color)
        panel.set(title=f"{where}, {ranks} ranks", xlabel="bytes of a vector", ylabel="us")
        panel.grid(alpha=0.3)
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3, fontsize="small")
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # letters, not their outlines
        figure.savefig(path)
    return f"wrote {path}"
