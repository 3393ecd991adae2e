"""Which rows a run has trained on, from what its processes wrote before each step."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jdp.tools.bench.injector import read_lines


def read(folder: Path) -> list[dict[str, Any]]:
    """Give what all processes of a run wrote, but for a line that one is writing."""
    return read_lines(folder.glob("rows.*"))


def rows_by_step(entries: Iterable[dict[str, Any]]) -> dict[int, list[int]]:
    """Give the rows of each step that is part of what the final state was made from.

    A generation that restores step r takes back all that was done after it. The rows of a step
    stand in the order of the ranks, which is that of the data.
    """
    kept: dict[int, list[int]] = {}
    for life in _lives(entries):
        kept = {step: rows for step, rows in kept.items() if step <= life.restored}
        for step, by_rank in life.steps.items():
            kept[step] = [row for _, rows in sorted(by_rank.items()) for row in rows]
    return dict(sorted(kept.items()))


def lost_steps(entries: Iterable[dict[str, Any]]) -> list[int]:
    """Give, for each life but the first, how many steps it took back.

    A step is done when all ranks have begun it, and a little time has passed: this is the most that
    may have been lost.
    """
    lost, done = [], 0
    for i, life in enumerate(_lives(entries)):
        if i:
            lost.append(max(done - life.restored, 0))
        num_ranks = max(map(len, life.steps.values()), default=0)
        begun_by_all = (step for step, ranks in life.steps.items() if len(ranks) == num_ranks)
        done = max(begun_by_all, default=life.restored)
    return lost


class _Life:
    """One generation that has restored something.

    Attributes:
      restored: the step that it went on from.
      steps: rows by step and rank.
    """

    def __init__(self, entries: list[dict[str, Any]]) -> None:
        [self.restored] = {entry["restored"] for entry in entries if "restored" in entry}
        self.steps: dict[int, dict[int, list[int]]] = defaultdict(dict)
        for entry in entries:
            if "step" in entry:
                # One that makes a step twice has trained on its rows twice.
                self.steps[entry["step"]].setdefault(entry["rank"], []).extend(entry["rows"])


def _lives(entries: Iterable[dict[str, Any]]) -> list[_Life]:
    by_number = defaultdict(list)
    for entry in entries:
        by_number[entry["launch"], entry["generation"]].append(entry)
    return [_Life(entries) for _, entries in sorted(by_number.items())]


def miscounted(entries: Iterable[dict[str, Any]], num_rows: int, num_steps: int) -> list[str]:
    """Name each row that did not count once in its epoch, and each step that is missing."""
    steps = rows_by_step(entries)
    wrong = [f"step {step} is missing" for step in range(1, num_steps + 1) if step not in steps]
    wrong += [f"step {step} is one too many" for step in steps if step > num_steps]
    rows = [row for of_step in steps.values() for row in of_step]
    for epoch, start in enumerate(range(0, len(rows), num_rows)):
        of_epoch = rows[start : start + num_rows]
        for row in range(num_rows):
            if (count := of_epoch.count(row)) != 1:
                wrong.append(f"row {row} counts {count} times in epoch {epoch}")
    return wrong
