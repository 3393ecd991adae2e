"""A process's marks, and its devices' operations."""

import itertools
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import time_ns
from typing import Any, NamedTuple

import jax

from jdp.distributed import in_flight, this_process
from jdp.distributed.in_flight import StepCall
from jdp.tools.profiling import device_operations, trace_file
from jdp.tools.profiling.device_operations import (
    Collective,
    Operation,
    ProgramRun,
    by_order,
    collectives_of,
)
from jdp.tools.profiling.trace_file import ProcessTrace, Slice
from jdp.worker import process_status
from jdp.worker.progress import own
from jdp.worker.progress_board import Slot, phase_name


class MarkedCall(NamedTuple):
    """A called step, in ns since 1970; `call` is None if only `Checkpointer.step` sees it."""

    begin: int
    end: int
    call: StepCall | None


class Marks:
    """This process's marks between `begin` and `end`; `phases` begin in ns since 1970."""

    def __init__(self, on_begin: Callable[[], None], on_step: Callable[[MarkedCall], None]) -> None:
        self.phases: list[tuple[int, str]] = []
        self._on_begin, self._on_step = on_begin, on_step
        self._begun, self._seen = time_ns(), in_flight.latest_call()
        self._new: StepCall | None = None
        self._before = own.slot
        self._slot = _MarkedSlot(self._before, self)

    def begin(self) -> None:
        """Begin to pass on marks."""
        own.slot = self._slot

    def end(self) -> None:
        """Restore the process's slot."""
        if own.slot is self._slot:  # else this is a forked child, with its own slot
            own.slot = self._before

    def phase(self, record: bytes) -> None:
        """Record a phase's start."""
        name, now = phase_name(record), time_ns()
        self.phases.append((now, name))
        self._look()
        # A step returns to this phase from inner ones, such as compiling.
        if name == process_status.STEP and all(each is not record for each, _ in own.phases):
            self._begun = now
            self._on_begin()

    def step(self, record: bytes) -> None:
        """Record a step's end, and the next phase."""
        self._look()
        done = MarkedCall(self._begun, time_ns(), self._new)
        self._new, self._begun = None, done.end
        self.phases.append((done.end, phase_name(record)))
        self._on_step(done)

    def _look(self) -> None:
        call = in_flight.latest_call()
        if call is not None and call is not self._seen and call.spec.returns_state:
            self._seen = self._new = call


class _MarkedSlot(Slot):
    def __init__(self, slot: Slot, marks: Marks) -> None:
        super().__init__(slot.memory, slot.times)
        write_phase, write_step = self.write_phase, self.write_step

        def phase_and_mark(progress_ns: int, since_ns: int, phase: bytes) -> None:
            write_phase(progress_ns, since_ns, phase)
            marks.phase(phase)

        def step_and_mark(steps: int, progress_ns: int, since_ns: int, phase: bytes) -> None:
            write_step(steps, progress_ns, since_ns, phase)
            marks.step(phase)

        self.write_phase, self.write_step = phase_and_mark, step_and_mark


def process_trace(
    profile: Path,
    begin: int,
    calls: Sequence[MarkedCall],
    marks: Sequence[tuple[int, str]],
    first: int,
    facts: Mapping[str, Any],
) -> ProcessTrace:
    """Return this process's trace; `begin` is in ns since 1970."""
    found = device_operations.read(profile)
    ranks = _ranks()
    jaxprs = {_program(call): call.call.program.jaxprs for call in calls if call.call is not None}
    ranked = {device: ran for device, ran in found.items() if device in ranks}
    named = by_order(ranked, collectives_of(_names(found), jaxprs))
    slices = _phases(marks, begin, calls[-1].end)
    for i, call in enumerate(calls):
        slices.append(Slice(trace_file.CALL, f"step {first + i}", call.begin, call.end, None,
                            {"step": first + i}))  # fmt: skip
    notes = []
    for device, ran in ranked.items():  # others are outside of the mesh
        rank = ranks[device]
        own = _runs(ran, calls)
        slices += [Slice(trace_file.PROGRAM, run.program, run.begin, run.end, rank) for run in own]
        slices += [_slice(one, rank, named.get(one.program, {})) for one in ran]
        ends = _ends(ran, calls)
        if ends is None:
            notes.append(
                f"rank {rank}: its steps end where the process's calls return, because its "
                "programs do not mark the end of a step"
            )
            ends = [call.end for call in calls]
        slices += _steps(rank, [begin, *ends], first, facts["steps"][0])
    return ProcessTrace(
        {**facts, **_place(), "start_ns": begin, "ranks": sorted(ranks.values()), "notes": notes},
        [Slice(x.kind, x.name, x.begin - begin, x.end - begin, x.rank, x.facts) for x in slices],
    )


def _ranks() -> dict[int, int]:
    mine = jax.process_index()
    # XLA numbers CPUs over all processes there, and GPUs in each.
    return {
        device.id if device.platform == "cpu" else device.local_hardware_id: rank
        for rank, device in enumerate(_devices())
        if device.process_index == mine
    }


def _devices() -> list[jax.Device]:
    mesh = this_process.current.mesh
    return jax.devices() if mesh is None else list(mesh.devices.flat)


def _place() -> dict[str, Any]:
    try:
        clock = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        clock = socket.gethostname()
    return {
        "process": jax.process_index(),
        "num_processes": jax.process_count(),
        "host": socket.gethostname(),
        "clock": clock,
        "platform": jax.local_devices()[0].platform,
        "jax": jax.__version__,
    }


def _program(call: MarkedCall) -> str:
    assert call.call is not None
    return "jit_" + re.sub(r"[^\w.\-]", "_", call.call.spec.name)


def _names(found: Mapping[int, Sequence[Operation]]) -> dict[str, set[str]]:
    names: dict[str, set[str]] = {}
    for ran in found.values():
        for each in ran:
            names.setdefault(each.program, set()).add(each.name)
    return names


def _slice(one: Operation, rank: int, known: Mapping[str, Collective]) -> Slice:
    found = known.get(one.name)
    # On a single device XLA runs a collective as a copy.
    if len(_devices()) > 1 and (found is not None or one.looks_like_communication()):
        facts: dict[str, Any] = {"op": one.name}
        if found is not None:
            facts |= {"collective": found.kind, "bytes": found.num_bytes,
                      "algorithm": found.algorithm, "leaves": list(found.leaves),
                      "num_groups": found.num_groups}  # fmt: skip
        name = one.name if found is None else found.name
        return Slice(trace_file.COMMUNICATION, name, one.begin, one.end, rank, facts)
    return Slice(trace_file.COMPUTATION, one.name, one.begin, one.end, rank)


def _phases(marks: Sequence[tuple[int, str]], begin: int, end: int) -> list[Slice]:
    shown = [(max(at, begin), name) for at, name in marks]
    return [
        Slice(trace_file.PHASE, name, at, after)
        for (at, name), (after, _) in zip(shown, [*shown[1:], (end, "")], strict=True)
        if at < after and name != process_status.BETWEEN
    ]


def _runs(ran: Sequence[Operation], calls: Sequence[MarkedCall]) -> list[ProgramRun]:
    return [
        run
        for program in sorted({each.program for each in ran if each.program})
        for run in device_operations.runs(
            ran, program, sum(c.call is not None and _program(c) == program for c in calls)
        )
    ]


def _ends(ran: Sequence[Operation], calls: Sequence[MarkedCall]) -> list[int] | None:
    ends: dict[int, int] = {}
    if any(call.call is None for call in calls):
        return None
    for program in {_program(call) for call in calls}:
        own = [i for i, call in enumerate(calls) if _program(call) == program]
        found = device_operations.runs(ran, program, len(own))
        if len(found) != len(own):
            return None
        ends |= {i: run.end for i, run in zip(own, found, strict=True)}
    # Operations unneeded by later steps may end after the next step.
    return list(itertools.accumulate((ends[i] for i in range(len(calls))), max))


def _steps(rank: int, times: Sequence[int], first: int, asked: int) -> list[Slice]:
    return [
        Slice(trace_file.STEP, f"step {number}", times[i], times[i + 1], rank, {"step": number})
        for i, number in enumerate(range(first, first + len(times) - 1))
        if number >= asked
    ]
