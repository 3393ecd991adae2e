"""The files of all processes of a profile: one run, and the faults of other files."""

import itertools
from collections.abc import Collection, Sequence
from pathlib import Path

from jdp.inspect.profiling import trace_file
from jdp.inspect.profiling.trace_file import ProcessTrace


def read(folder: Path) -> tuple[list[ProcessTrace], list[str]]:
    """Return the traces of the latest run, and notes of files that are damaged or missing."""
    intact: list[ProcessTrace] = []
    left_out: dict[int, str] = {}
    for process, path in trace_file.found_in(folder).items():
        try:
            intact.append(trace_file.read(path))
        except ValueError as error:
            left_out[process] = f"{path.name} is damaged and left out: {error}."
    if not intact:
        return [], _notes(left_out)
    # Every run has a process 0, which replaces its file; clocks of hosts may differ.
    latest = max(intact, key=lambda trace: (trace.facts["process"] == 0, trace.facts["start_ns"]))
    traces = _of_run(intact, latest.facts["run"], left_out)
    known = {*left_out, *(trace.facts["process"] for trace in traces)}
    return traces, _notes(left_out) + _missing(folder, latest.facts["num_processes"], known)


def _of_run(
    intact: Sequence[ProcessTrace], run: str, left_out: dict[int, str]
) -> list[ProcessTrace]:
    """Return the traces of a run, each rank in one of them; record why others are left out."""
    traces: list[ProcessTrace] = []
    owners: dict[int, int] = {}  # rank -> its process
    for trace in intact:
        process, ranks = trace.facts["process"], trace.facts["ranks"]
        twice = next((rank for rank in ranks if rank in owners), None)
        if trace.facts["run"] != run:
            left_out[process] = "its file is of an earlier profile, left out."
        elif twice is not None:
            left_out[process] = (
                f"{trace_file.path_of(Path(), process).name} is left out: its rank {twice} is also "
                f"one of process {owners[twice]}."
            )
        else:
            traces.append(trace)
            owners |= dict.fromkeys(ranks, process)
    return traces


def _notes(left_out: dict[int, str]) -> list[str]:
    return [f"process {process}: {why}" for process, why in left_out.items()]


def _missing(folder: Path, num_processes: int, known: Collection[int]) -> list[str]:
    """Return a note of each gap between the processes that have a file.

    A damaged file may name 10**12 processes; the gaps are as few as the files.
    """
    notes = []
    within = sorted(process for process in known if process < num_processes)
    for before, after in itertools.pairwise([-1, *within, num_processes]):
        first, last = before + 1, after - 1
        name = trace_file.path_of(folder, first).name
        if first == last:
            notes.append(f"process {first}: {name} is missing.")
        elif first < last:
            notes.append(f"processes {first} to {last}: {name} and those after it are missing.")
    return notes
