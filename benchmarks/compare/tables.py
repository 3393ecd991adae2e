"""Tables of the comparison: all rows for the results, and a short one for docs/results.md."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.compare.contestants import CONTESTANTS
from benchmarks.harness.report import Section

Row = dict[str, Any]
# jdp's contestant that divides the state as a rival does.
COUNTERPART = {"torch FSDP2": "jdp.sharded, stage 3"}
JDP = "jdp.replicated"


def section(model: str, k: int, rows: Sequence[Row]) -> Section:
    """Return the table of one model."""
    return Section(
        f"{model}, {_plural(k, 'micro-batch')}",
        "",
        [{**row, **_cells(row)} for row in rows],
        {
            "ranks": "{ranks}",
            "contestant": "{contestant}",
            "rows/s": "{rows_per_s:.0f}",
            "95 % interval": "{low:.0f} to {high:.0f}",
            "time / jdp.replicated's": "{over_jdp_cell}",
            "scaling": "{scaling_cell}",
            "synchronisation, ms": "{sync_cell}",
            "memory, MB": "{memory_mb:.0f}",
            "changed lines": "{lines}",
            "difference": "{difference:.0e}",
            "rounds": "{rounds}",
        },
    )


def _cells(row: Row) -> dict[str, str]:
    cells = {}
    for name, digits in (("over_jdp", 2), ("scaling", 2)):
        cells[f"{name}_cell"] = _with_interval(row, name, name, digits)
    cells["sync_cell"] = _with_interval(row, "sync_ms", "sync", 1)
    return cells


def _with_interval(row: Row, name: str, prefix: str, digits: int) -> str:
    if row[name] is None:
        return "-"
    low, high = row[f"{prefix}_low"], row[f"{prefix}_high"]
    return f"{row[name]:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def readme(rows: Sequence[Row]) -> str:
    """Return a short table in Markdown: geometric means over the models without accumulation."""
    one = [row for row in rows if row["micro_batches"] == 1]
    many = [row for row in rows if row["micro_batches"] > 1]
    columns: dict[str, Callable[[str], str]] = {
        "time, 4 ranks": lambda name: _mean(one, name, "4", "over_jdp"),
        "time, 2 processes": lambda name: _mean(one, name, "2 processes", "over_jdp"),
        "4 ranks, 4 micro-batches": lambda name: _mean(many, name, "4", "over_jdp"),
        "scaling to 2 processes": lambda name: _mean(one, name, "2 processes", "scaling"),
        "memory, 4 ranks": lambda name: _mean(one, name, "4", "memory_mb", JDP),
        "changed lines": lambda name: str(_lines(rows, name)),
    }
    names = [name for name in CONTESTANTS if any(row["contestant"] == name for row in rows)]
    lines = [["", *columns], ["---"] * (1 + len(columns))]
    lines += [[name, *(cell(name) for cell in columns.values())] for name in names]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _mean(
    rows: Sequence[Row], name: str, ranks: str, column: str, relative_to: str | None = None
) -> str:
    def values(of: str) -> dict[tuple, float]:
        return {
            (row["model"], row["micro_batches"]): row[column]
            for row in rows
            if row["contestant"] == of and row["ranks"] == ranks and row[column] is not None
        }

    own = values(name)
    if relative_to is not None:
        base = values(relative_to)
        own = {key: value / base[key] for key, value in own.items() if base.get(key, 0) > 0}
    if len(own) < len(values(JDP)) or not own or min(own.values()) <= 0:
        return "-"
    return f"{math.exp(np.mean(np.log(list(own.values())))):.2f}"


def _lines(rows: Sequence[Row], name: str) -> str:
    found = [row["lines"] for row in rows if row["contestant"] == name]
    return str(found[0]) if len(set(found)) == 1 else f"{min(found)} to {max(found)}"


def losses(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each setup in which a rival is faster than jdp beyond the interval.

    A rival that splits the state is compared with jdp's stage 3, by rows per second whose
    intervals do not overlap; all others with `jdp.replicated`, in pairs.
    """
    found = []
    by_key = {
        (row["model"], row["micro_batches"], row["ranks"], row["contestant"]): row for row in rows
    }
    for (model, k, ranks, name), row in by_key.items():
        if CONTESTANTS[name].is_jdp or ranks == "1":
            continue
        ours = by_key.get((model, k, ranks, COUNTERPART.get(name, JDP)))
        if ours is not None and _is_faster(row, ours):
            times = row["rows_per_s"] / ours["rows_per_s"]
            setup = f"{model}, {_plural(k, 'micro-batch')}, {_on(ranks)}"
            found.append(
                f"{setup}: {name} does {times:.2f} times the rows of {ours['contestant']}."
            )
    return found


def _on(ranks: str) -> str:
    return _plural(int(ranks), "rank") if ranks.isdigit() else ranks


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


def _is_faster(row: Row, ours: Mapping[str, Any]) -> bool:
    if ours["contestant"] == JDP:
        return row["over_jdp_high"] < 1
    return row["low"] > ours["high"]
