"""Plots the recovery time of each kind of fault, and its parts."""

from pathlib import Path

from benchmarks.harness.report import Section

# The parts of a recovery in sequence; `compiled` is a part of `stepped`.
_PARTS = ("detected", "ended", "formed", "restored", "compiled", "stepped")


def draw(path: Path, section: Section) -> str:
    """Plot the table of `faults.kinds_section`.

    Args:
      path: path of the picture; the suffix selects the format.
      section: the table.

    Returns:
      A line that reports what was written.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed"
    rows = sorted(section.rows, key=lambda row: row["median_s"], reverse=True)
    figure = Figure(figsize=(9, 1.2 + 0.35 * len(rows)), layout="constrained")
    panel = figure.subplots()
    left = [0.0] * len(rows)
    for part in _PARTS:
        widths = [row[f"{part}_s"] for row in rows]
        if part == "stepped":
            widths = [row["stepped_s"] - row["compiled_s"] for row in rows]
        panel.barh(range(len(rows)), widths, left=left, label=part, alpha=0.75)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for i, row in enumerate(rows):
        panel.plot(row["seconds"], [i] * len(row["seconds"]), "k.", markersize=4)
    panel.set(xlabel="seconds from the fault to a step of all processes; each dot is one fault")
    panel.set_yticks(range(len(rows)), [f"{row['kind']} ({row['times']})" for row in rows])
    panel.grid(axis="x", alpha=0.3)
    panel.legend(ncols=len(_PARTS), loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize="small")
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # letters, not their outlines
        figure.savefig(path)
    return f"wrote {path}"
