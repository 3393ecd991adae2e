"""Compares the speed of an all-reduce with a memory copy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import report
from benchmarks.harness.report import Section
from benchmarks.harness.team import Team
from benchmarks.harness.timing import Clock, Word

# Loads and stores of all `n` ranks together, in vectors, for each algorithm.
FORMULAS = {
    "in process": {
        "direct": lambda n: 2 * n,  # all inputs read, all outputs written
        "ring": lambda n: 6 * n - 4,
    },
    "processes": {
        # Per rank, in n-ths of the vector: n - 1 copied to shared memory, n read and 2 written to
        # sum its own, n - 1 copied from shared memory.
        "direct": lambda n: 5 * n - 2,
        # Per rank, in n-ths of the vector: send 2, recv_reduce_send 3 (n - 2 times),
        # recv_reduce_copy_send 4, recv_copy_send 3 (n - 2 times), recv_copy 2.
        "ring": lambda n: 6 * n - 4,
    },
}
GOAL, GOAL_BYTES = 0.5, 16 * 2**20

_COPIED_BYTES = 128 * 2**20  # by each process in a run: enough that all copies overlap


def memcpy_clock(copies: Team, num_bytes: int) -> Clock:
    """Time a copy of `num_bytes` by each process of a team of `rank_memcpy.py`, all at once."""
    num_calls = max(2, _COPIED_BYTES // num_bytes)
    copies.ask("prepare", num_bytes)

    def clock() -> float:
        # From the first start to the last end: with more processes than cores some wait.
        starts, ends = zip(*copies.ask("run", num_calls), strict=True)
        return (max(ends) - min(starts)) / num_calls

    return clock


def rows(
    found: Mapping[str, np.ndarray],
    *,
    where: str,
    what: str,
    num_ranks: int,
    num_bytes: int,
    names: Sequence[str],
) -> list[dict[str, Any]]:
    """Compare all contestants of one size with "memcpy": one of `num_bytes` by each rank at once.

    Args:
      found: result of `timing.alternate`, including "memcpy".
      where: key of FORMULAS.
      what: the data that is reduced, in a word.
      num_ranks: number of ranks, and of concurrent copies.
      num_bytes: size of one rank's vector.
      names: contestants to include.
    """
    # Twice: a copy reads and writes.
    copied = 2 * num_ranks * num_bytes / float(np.median(found["memcpy"]))
    made = []
    for name in names:
        seconds = float(np.median(found[name]))
        formula = FORMULAS[where].get(name)
        row: dict[str, Any] = {"what": what, "ranks": num_ranks, "bytes": num_bytes}
        row["contestant"] = name
        row |= {"us": seconds * 1e6, "memcpy_gb_per_s": copied / 1e9}
        row["least"] = 2 * num_ranks * num_bytes / seconds / copied
        row |= {"vectors": Word("-"), "moved": Word("-"), "goal": Word("-"), "met": Word("-")}
        if formula:
            row["vectors"] = formula(num_ranks)
            row["moved"] = formula(num_ranks) * num_bytes / seconds / copied
        if formula and num_bytes >= GOAL_BYTES:
            row |= {"goal": GOAL, "met": "yes" if row["moved"] >= GOAL else "no"}
        made.append(row)
    return made


def section(title: str, text: str, rows: Sequence[dict[str, Any]]) -> Section:
    """Return the table of such rows."""
    return Section(
        title,
        "In float32. `moved`: the loads and stores of payload that the algorithm makes "
        "in all ranks together, over time, as a fraction of those that one memcpy of such a "
        "vector by each rank at once makes (2 vectors a rank) in the same rounds. `vectors`: that "
        "amount by formula, in vectors. `least`: the same for the 2 vectors a rank that no "
        "all-reduce can avoid, to read its own and to write the sum; the only fraction that is "
        f"known for code whose copies are not. {text}",
        rows,
        {
            "what": "{what}",
            "ranks": "{ranks}",
            "bytes": "{bytes}",
            "contestant": "{contestant}",
            "us": "{us:.1f}",
            "memcpy, GB/s": "{memcpy_gb_per_s:.1f}",
            "least / memcpy": "{least:.2f}",
            "vectors": "{vectors}",
            "moved / memcpy": "{moved:.2f}",
            "goal": "{goal}",
            "met": "{met}",
        },
    )


def draw(path: Path, sections: Sequence[Section]) -> None:
    """Plot time against bytes, from the tables of `section`, which contain all contestants.

    Args:
      path: path of the picture; the suffix selects the format.
      sections: the sections of the benchmark.
    """
    lines: dict[tuple[str, int], dict[str, list[tuple[int, float]]]] = {}
    for row in (row for section in sections for row in section.rows):
        if "least" in row and row["what"] == "vector":
            panel = lines.setdefault((row["section"].split(",")[0], row["ranks"]), {})
            panel.setdefault(row["contestant"], []).append((row["bytes"], row["us"]))
    if not lines:
        print("no plot: no part of this run has times by size")
        return

    def panels(figure: Any) -> None:
        colors: dict[str, int] = {}
        found = figure.subplots(1, len(lines), squeeze=False)[0]
        for panel, ((where, ranks), contestants) in zip(found, lines.items(), strict=True):
            for name, points in contestants.items():
                color = f"C{colors.setdefault(name, len(colors))}"
                panel.loglog(*zip(*points, strict=True), marker=".", label=name, color=color)
            panel.set(title=f"{where}, {ranks} ranks", xlabel="bytes of a vector", ylabel="us")
            panel.grid(alpha=0.3)
            where_legend = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18)}
            panel.legend(**where_legend, ncols=3, fontsize="small")

    report.picture(path, (4.5 * len(lines), 5), panels)
