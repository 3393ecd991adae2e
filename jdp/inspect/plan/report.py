"""How a plan is shown: tables, JSON, and a picture of efficiency over GPUs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jdp.inspect import results
from jdp.inspect.plan.assumptions import Assumptions
from jdp.inspect.plan.prediction import Row

_COLUMNS = (
    "method", "hosts", "GPUs", "step s", "of it exposed", "stragglers", "memory GB",
    "efficiency", "ETTR", "steps per commit",
)  # fmt: skip


def table(rows: Sequence[Row], known: Assumptions) -> str:
    """Return the rows as a table, below a line that says what it is, and above what it assumes."""
    lines = [
        "All times are predicted, not measured; in parentheses at the best and worst of all rates.",
        _aligned(_COLUMNS),
        *(_aligned(_cells(row)) for row in rows),
    ]
    if wrong := sorted({row.method for row in rows if not row.fits}):
        size = known["memory_bytes"].value / 1e9
        lines.append(f"*: more than the {size:.0f} GB of a GPU: {', '.join(wrong)}")
    lines += ["", "Assumed (set any of them: --set NAME=VALUE):"]
    return "\n".join([*lines, *(f"  {name} = {rate}" for name, rate in known.items())])


def _cells(row: Row) -> list[str]:
    return [
        row.method,
        str(row.hosts),
        str(row.gpus),
        f"{row.step_s:.3g} ({row.low_s:.3g} to {row.high_s:.3g})",
        f"{row.exposed_s / row.step_s:z.1%}",
        f"{row.straggler_s / row.step_s:z.1%}",
        f"{row.memory_bytes / 1e9:.1f}{'' if row.fits else '*'}",
        f"{row.efficiency:.1%} ({row.efficiency_low:.0%} to {row.efficiency_high:.0%})",
        f"{row.ettr:.2%} ({row.ettr_low:.1%} to {row.ettr_high:.2%})",
        str(row.commit_every),
    ]


def _aligned(cells: Sequence[str]) -> str:
    widths = (10, 5, 6, 22, 13, 10, 9, 21, 25, 16)
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def to_json(rows: Sequence[Row], known: Assumptions) -> str:
    """Return the rows and what they assume as JSON."""
    found: dict[str, Any] = {
        "predicted": [row._asdict() | {"effective": row.effective} for row in rows],
        "assumed": {name: vars(rate) for name, rate in known.items()},
    }
    return results.to_json(found)


def draw(rows: Sequence[Row], path: str | Path) -> None:
    """Plot efficiency over GPUs, without failures and with them, a line for each method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for method in dict.fromkeys(row.method for row in rows):
        own = [row for row in rows if row.method == method]
        gpus = [row.gpus for row in own]
        left.semilogx(gpus, [100 * row.efficiency for row in own], marker=".", label=method, base=2)
        right.semilogx(gpus, [100 * row.effective for row in own], marker=".", label=method, base=2)
        low = [100 * row.efficiency_low for row in own]
        left.fill_between(gpus, low, [100 * row.efficiency_high for row in own], alpha=0.12)
    left.set(xlabel="GPUs", ylabel="% of one GPU, predicted", title="without failures")
    right.set(xlabel="GPUs", title="with failures, recoveries and commits")
    # A split update may save more than communication costs.
    highest = max(row.efficiency_high for row in rows)
    for panel in (left, right):
        panel.set_ylim(0, 105 * max(1.0, highest))
        panel.grid(alpha=0.3)
        panel.legend()
    results.write_picture(figure, path)
