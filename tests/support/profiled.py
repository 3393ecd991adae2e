"""Profiles of ranks: read, or written by hand so that each answer is known."""

from pathlib import Path

from jdp.tools.profiling import trace_file
from jdp.tools.profiling.trace_file import ProcessTrace, Slice

START_NS = 1_795_000_000_000_000_000


def read(folder, process=0):
    return trace_file.read(trace_file.path_of(Path(folder), process))


def of_rank(trace, rank, kind):
    found = [each for each in trace.slices if each.rank == rank and each.kind == kind]
    return sorted(found, key=lambda each: each.begin)


def bucket(name, begin, end, rank, num_bytes=64, collective="all-reduce"):
    facts = {"collective": collective, "bytes": num_bytes, "op": name, "algorithm": "native"}
    return Slice(trace_file.COMMUNICATION, name, begin, end, rank, facts | {"leaves": ["w"]})


def step(number, begin, end, rank):
    return Slice(trace_file.STEP, f"step {number}", begin, end, rank, {"step": number})


def computes(begin, end, rank):
    return Slice(trace_file.COMPUTATION, "dot", begin, end, rank)


def phase(name, begin, end):
    return Slice(trace_file.PHASE, name, begin, end)


def process(number, slices, num_processes=1, start_ns=START_NS, clock="one", **facts):
    """The trace of a process with the ranks of `slices`."""
    ranks = sorted({each.rank for each in slices} - {None})
    return ProcessTrace(
        {
            "run": "a", "process": number, "num_processes": num_processes, "host": "host",
            "clock": clock, "start_ns": start_ns, "ranks": ranks, "platform": "cpu", "notes": [],
            **facts,
        },
        slices,
    )  # fmt: skip


def write(folder, *traces):
    for trace in traces:
        path = trace_file.path_of(Path(folder), trace.facts["process"])
        trace_file.write(path, [trace], [0])
