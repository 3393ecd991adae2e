"""The profile of all ranks: where the time of their steps went, and their collectives."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jdp.inspect.profiling import breakdown, clocks, spans, trace_file, trace_folder
from jdp.inspect.profiling.breakdown import Activity, Parts
from jdp.inspect.profiling.trace_file import ProcessTrace, Slice
from jdp.worker import phases


@dataclass(frozen=True)
class RankSteps:
    """The steps of one rank.

    Attributes:
      rank: its number.
      process: its process.
      steps: the parts of each step, by its number.
    """

    rank: int
    process: int
    steps: Mapping[int, Parts]

    def mean(self) -> tuple[float, float, float, float]:
        """Return the mean of each part, in nanoseconds; their sum is the mean step."""
        data, computation, communication, host = (
            sum(values) / len(self.steps) for values in zip(*self.steps.values(), strict=True)
        )
        return data, computation, communication, host

    def own_ns(self) -> float:
        """Return the mean time in which it does not wait for other ranks."""
        data, computation, _, host = self.mean()
        return data + computation + host


@dataclass(frozen=True)
class CollectiveTimes:
    """A collective in the steps of all ranks.

    Attributes:
      name: such as "bucket 3: grads['w']".
      num_bytes: of its whole arrays on one rank; None if that is not known.
      algorithm: see `jdp.collectives`; empty if it is not known.
      runs: how often it ran in a step, in the mean.
      took_ns: of a rank and step, in the mean.
      longest_rank: the rank that was longest in it.
      shortest_rank: the rank that was shortest in it, because the others waited for it.
    """

    name: str
    num_bytes: int | None
    algorithm: str
    runs: float
    took_ns: float
    longest_rank: int
    shortest_rank: int


@dataclass(frozen=True)
class Summary:
    """The profile of all ranks.

    Attributes:
      traces: of the processes.
      shifts: of their clocks, see `clocks.shifts`.
      ranks: with most time of its own first: the others wait for it.
      collectives: in the order in which they ran first.
      notes: what is missing or damaged, in words.
    """

    traces: Sequence[ProcessTrace]
    shifts: Sequence[clocks.Shift]
    ranks: Sequence[RankSteps]
    collectives: Sequence[CollectiveTimes]
    notes: Sequence[str]

    def begins(self) -> list[int]:
        """Return when the profile of each process began, in ns after the earliest began."""
        begins = [
            trace.facts["start_ns"] + shift.ns
            for trace, shift in zip(self.traces, self.shifts, strict=True)
        ]
        return [begin - min(begins) for begin in begins]

    def to_json(self) -> dict[str, Any]:
        """Return the summary for JSON: times in nanoseconds."""
        return {
            "ranks": [
                {
                    "rank": each.rank,
                    "process": each.process,
                    "own_ns": each.own_ns(),
                    "mean_ns": dict(zip(Parts._fields, each.mean(), strict=True)),
                    "steps_ns": {str(n): parts._asdict() for n, parts in each.steps.items()},
                }
                for each in self.ranks
            ],
            "collectives": [asdict(each) for each in self.collectives],
            "clocks": [
                {"process": trace.facts["process"], "shift_ns": shift.ns, "within_ns": shift.within}
                for trace, shift in zip(self.traces, self.shifts, strict=True)
            ],
            "notes": list(self.notes),
        }


def summarize(folder: Path) -> Summary:
    """Read the profile of all processes."""
    traces, notes = trace_folder.read(folder)
    by_process = {trace.facts["process"]: _ranks(trace) for trace in traces}
    ranks = [each for found in by_process.values() for each in found]
    for trace in traces:
        left = {*trace.facts["ranks"]} - {each.rank for each in by_process[trace.facts["process"]]}
        if left:
            names = ", ".join(map(str, sorted(left)))
            process = trace.facts["process"]
            file = trace_file.path_of(folder, process).name
            notes.append(f"process {process}: {file} has no step of its ranks {names}.")
    if not ranks:
        raise ValueError(
            f"{folder} has no profile of a step. {' '.join(notes)}".strip()
            + " Write `with jdp.profile(folder, steps=range(10, 20)):` around the training loop."
        )
    shifts = clocks.shifts(traces)
    for trace, shift in zip(traces, shifts, strict=True):
        notes += trace.facts.get("notes", [])
        if shift.within is None:
            notes.append(
                f"process {trace.facts['process']}: its clock could not be compared, since its "
                f"host ran no collective together with that of process "
                f"{traces[0].facts['process']}, or their collectives contradict each other; it is "
                "not shifted."
            )
    ranks.sort(key=RankSteps.own_ns, reverse=True)
    return Summary(traces, shifts, ranks, _collectives(traces, ranks), notes)


def _ranks(trace: ProcessTrace) -> list[RankSteps]:
    waiting = spans.union(
        (x.begin, x.end)
        for x in trace.slices
        if x.kind == trace_file.PHASE and x.name == phases.DATA
    )
    by_rank: dict[int, dict[str, list[Slice]]] = {}
    for each in trace.slices:
        if each.rank is not None:
            by_rank.setdefault(each.rank, {}).setdefault(each.kind, []).append(each)
    # A device of a CPU runs its program by itself; the host launches each kernel of a GPU.
    is_cpu = trace.facts["platform"] == "cpu"
    found = []
    for rank, own in sorted(by_rank.items()):
        computing, communicating, running = (
            spans.union((x.begin, x.end) for x in own.get(kind, []))
            for kind in (trace_file.COMPUTATION, trace_file.COMMUNICATION, trace_file.PROGRAM)
        )
        activity = Activity(computing, communicating, running if is_cpu else [], waiting)
        steps = {
            x.facts["step"]: breakdown.parts_of(activity, (x.begin, x.end))
            for x in own.get(trace_file.STEP, [])
        }
        if steps:
            found.append(RankSteps(rank, trace.facts["process"], steps))
    return found


def _collectives(
    traces: Sequence[ProcessTrace], ranks: Sequence[RankSteps]
) -> list[CollectiveTimes]:
    num_steps = {each.rank: len(each.steps) for each in ranks}
    found: dict[str, dict[int, list[Slice]]] = {}
    for trace in traces:
        for rank, own in _in_steps(trace).items():
            for each in own:
                found.setdefault(each.name, {}).setdefault(rank, []).append(each)
    result = []
    for name, by_rank in found.items():
        took = {r: sum(x.end - x.begin for x in own) / num_steps[r] for r, own in by_rank.items()}
        runs = sum(len(own) / num_steps[r] for r, own in by_rank.items()) / len(by_rank)
        facts = next(iter(by_rank.values()))[0].facts
        result.append(
            CollectiveTimes(
                name,
                facts.get("bytes"),
                facts.get("algorithm", ""),
                runs,
                sum(took.values()) / len(took),
                max(took, key=took.__getitem__),
                min(took, key=took.__getitem__),
            )  # fmt: skip
        )
    return result


def _in_steps(trace: ProcessTrace) -> dict[int, list[Slice]]:
    found = {}
    for rank in trace.facts["ranks"]:
        own = [each for each in trace.slices if each.rank == rank]
        steps = [each for each in own if each.kind == trace_file.STEP]
        if steps:
            begin, end = min(x.begin for x in steps), max(x.end for x in steps)
            sent = (x for x in own if x.kind == trace_file.COMMUNICATION)
            inside = (x for x in sent if begin <= x.begin < end)
            found[rank] = sorted(inside, key=lambda x: x.begin)
    return found
