"""A profiled process's file, for Perfetto and `jdp timeline`.

Compressed JSON of Chrome's trace format, with times in microseconds, to the nanosecond, and in
`otherData` the process's facts.
"""

import gzip
import itertools
import json
import os
import reprlib
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jdp.tools import results
from jdp.tools.results import COUNT, TEXT, Field, checked, list_of, optional, why_unreadable

_SUFFIX = ".perfetto.json.gz"
# Errors of damaged files; `checked` and `_require_consistent` raise ValueError.
_DAMAGES = (OSError, EOFError, ValueError, RecursionError, zlib.error)
MERGED = f"merged{_SUFFIX}"
FORMAT = 1

# In track order; those up to PHASE are of a process.
CALL, PHASE = "call", "phase"
STEP, PROGRAM, COMPUTATION, COMMUNICATION = "step", "program", "computation", "communication"
_KINDS = (CALL, PHASE, STEP, PROGRAM, COMPUTATION, COMMUNICATION)
_TITLES = {CALL: "calls of the step", PHASE: "host", STEP: "steps", PROGRAM: "programs"}
_MOST_LANES = 1000

# All that a file holds and a reader may use.
_MOST_US = 2.0**63 / 1000
_CONTENT = {"otherData": results.OBJECT, "traceEvents": results.LIST}
_FACTS = {
    "run": TEXT, "process": COUNT, "num_processes": COUNT, "host": TEXT, "clock": TEXT,
    "start_ns": COUNT, "ranks": list_of(COUNT), "platform": TEXT, "jax": optional(TEXT),
    "steps": optional(list_of(COUNT)), "notes": optional(list_of(TEXT)),
}  # fmt: skip
_TYPE = {"ph": results.one_of(("X", "M"))}  # a slice, or a track's name
_SLICE = {
    "cat": results.one_of(_KINDS), "name": TEXT, "args": results.OBJECT,
    "ts": results.number_in(-_MOST_US, _MOST_US), "dur": results.number_in(0, _MOST_US),
}  # fmt: skip
_ARGS: dict[str, dict[str, Field]] = {
    CALL: {"step": COUNT},
    PHASE: {},
    STEP: {"rank": COUNT, "step": COUNT},
    PROGRAM: {"rank": COUNT},
    COMPUTATION: {"rank": COUNT},
    COMMUNICATION: {
        "rank": COUNT, "op": TEXT, "collective": optional(TEXT), "bytes": optional(COUNT),
        "algorithm": optional(TEXT), "leaves": optional(list_of(TEXT)),
        "num_groups": optional(COUNT),
    },
}  # fmt: skip


@dataclass(frozen=True)
class Slice:
    """A rank's or its process's time, in ns since its profile began.

    Attributes:
      rank: None for a slice of the process.
      facts: `step` of a STEP and a CALL; `collective`, `bytes`, `algorithm`, `op`, `leaves` and
        `num_groups` of a COMMUNICATION.
    """

    kind: str
    name: str
    begin: int
    end: int
    rank: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ProcessTrace:
    """One process's profile.

    Attributes:
      facts: for JSON: `run`, `process`, `num_processes`, `host`, `clock`, `start_ns`, `ranks`,
        `platform`, `jax`, `steps`, `notes`.
    """

    facts: Mapping[str, Any]
    slices: Sequence[Slice]


def path_of(folder: Path, process: int) -> Path:
    """Return a process's file."""
    return folder / f"process-{process}{_SUFFIX}"


def found_in(folder: Path) -> dict[int, Path]:
    """Return process -> file, for the existing files."""
    named = [(p.name.removeprefix("process-").removesuffix(_SUFFIX), p)
             for p in folder.glob(f"process-*{_SUFFIX}")]  # fmt: skip
    # Not process-01, a copy by hand.
    return {int(number): path for number, path in sorted(named)
            if number.isdecimal() and number == str(int(number))}  # fmt: skip


def write(path: Path, traces: Sequence[ProcessTrace], begins: Sequence[int]) -> None:
    """Write processes' traces into one file, whole or not at all; `begins` are in ns."""
    events = []
    for trace, begin in zip(traces, begins, strict=True):
        events += _events(trace, begin)
    facts = dict(traces[0].facts) if len(traces) == 1 else {"processes": len(traces)}
    content = {
        "displayTimeUnit": "ms",
        "otherData": {"jdp": FORMAT, **facts},
        "traceEvents": events,
    }
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with gzip.open(partial, "wt", compresslevel=3) as file:
            json.dump(content, file, separators=(",", ":"), allow_nan=False)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: Path) -> ProcessTrace:
    """Read a process's file."""
    try:
        with gzip.open(path) as file:
            content = checked(json.load(file), _CONTENT)
        written = content["otherData"].get("jdp")
        if written != FORMAT:
            raise ValueError(f"its format is {reprlib.repr(written)}, but this jdp reads {FORMAT}")
        facts = checked(content["otherData"], _FACTS)
        events = enumerate(content["traceEvents"])
        slices = [found for i, event in events if (found := _slice(i, event)) is not None]
        _require_consistent(path, facts, slices)
    except _DAMAGES as error:
        raise ValueError(why_unreadable(error)) from None
    return ProcessTrace(facts, slices)


def _slice(i: int, event: Any) -> Slice | None:
    try:
        if checked(event, _TYPE)["ph"] == "M":
            return None
        found = checked(event, _SLICE)
        facts = checked(found["args"], _ARGS[found["cat"]])
    except ValueError as error:
        raise ValueError(f"event {i}: {error}") from None
    begin = round(found["ts"] * 1000)
    end = begin + round(found["dur"] * 1000)
    return Slice(found["cat"], found["name"], begin, end, facts.pop("rank", None), facts)


def _require_consistent(path: Path, facts: Mapping[str, Any], slices: Sequence[Slice]) -> None:
    process, ranks = facts["process"], facts["ranks"]
    if path.name != path_of(path.parent, process).name:
        raise ValueError(f"it is of process {process}")
    if process >= facts["num_processes"]:
        raise ValueError(f"it is of process {process} of {facts['num_processes']}, from 0")
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"its ranks {reprlib.repr(ranks)} repeat one")
    if strange := {each.rank for each in slices} - {None, *ranks}:
        raise ValueError(f"it has slices of rank {strange.pop()}, which is not among its ranks")
    steps = Counter((each.rank, each.facts["step"]) for each in slices if each.kind == STEP)
    if twice := [of_step for of_step, number in steps.items() if number > 1]:
        raise ValueError("rank {} has step {} twice".format(*twice[0]))


def _events(trace: ProcessTrace, begin: int) -> list[dict[str, Any]]:
    process = trace.facts["process"]
    title = f"process {process} on {trace.facts['host']}"
    events = [_named("process_name", process, 0, title)]
    for (rank, kind), slices in _tracks(trace.slices).items():
        first = (1 if rank is None else 10 + rank * len(_KINDS)) + _KINDS.index(kind)
        title = _TITLES.get(kind, kind)
        for lane, track in enumerate(_lanes(slices)):
            # A track's slices may not overlap, and XLA uses several threads.
            number = first * _MOST_LANES + lane
            label = title if rank is None else f"rank {rank}: {title}"
            events.append(_named("thread_name", process, number, label))
            order = {"name": "thread_sort_index", "args": {"sort_index": number}}
            events.append({"ph": "M", "pid": process, "tid": number} | order)
            events += [_event(each, process, number, begin) for each in track]
    return events


def _tracks(slices: Sequence[Slice]) -> dict[tuple[Any, str], list[Slice]]:
    tracks: dict[tuple[Any, str], list[Slice]] = {}
    for each in slices:
        tracks.setdefault((each.rank, each.kind), []).append(each)
    return tracks


def _lanes(slices: Sequence[Slice]) -> list[list[Slice]]:
    lanes: list[list[Slice]] = []
    for each in sorted(slices, key=lambda x: (x.begin, x.end)):
        free = next((lane for lane in lanes if lane[-1].end <= each.begin), None)
        if free is None:
            lanes.append([each])
        else:
            free.append(each)
    return lanes


def _named(what: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def _event(each: Slice, process: int, track: int, begin: int) -> dict[str, Any]:
    own = {} if each.rank is None else {"rank": each.rank}
    return {
        "ph": "X",
        "cat": each.kind,
        "name": each.name,
        "pid": process,
        "tid": track,
        "ts": (begin + each.begin) / 1000,
        "dur": (each.end - each.begin) / 1000,
        "args": own | dict(each.facts),
    }


def read_folder(folder: Path) -> tuple[list[ProcessTrace], list[str]]:
    """Return the latest run's traces, and notes of bad or missing files."""
    intact: list[ProcessTrace] = []
    left_out: dict[int, str] = {}
    for process, path in found_in(folder).items():
        try:
            intact.append(read(path))
        except ValueError as error:
            left_out[process] = f"{path.name} is damaged and skipped: {error}."
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
    """Each rank once; record why others are left out."""
    traces: list[ProcessTrace] = []
    owners: dict[int, int] = {}  # rank -> its process
    for trace in intact:
        process, ranks = trace.facts["process"], trace.facts["ranks"]
        twice = next((rank for rank in ranks if rank in owners), None)
        if trace.facts["run"] != run:
            left_out[process] = "its file belongs to an earlier profile, skipped."
        elif twice is not None:
            left_out[process] = (
                f"{path_of(Path(), process).name} is skipped: its rank {twice} is also one of "
                f"process {owners[twice]}."
            )
        else:
            traces.append(trace)
            owners |= dict.fromkeys(ranks, process)
    return traces


def _notes(left_out: dict[int, str]) -> list[str]:
    return [f"process {process}: {why}" for process, why in left_out.items()]


def _missing(folder: Path, num_processes: int, known: Collection[int]) -> list[str]:
    """Return a note of each gap, as few as files; a damaged file may name 10**12 processes."""
    notes = []
    within = sorted(process for process in known if process < num_processes)
    for before, after in itertools.pairwise([-1, *within, num_processes]):
        first, last = before + 1, after - 1
        name = path_of(folder, first).name
        if first == last:
            notes.append(f"process {first}: {name} is missing.")
        elif first < last:
            notes.append(f"processes {first} to {last}: {name} and those after it are missing.")
    return notes
