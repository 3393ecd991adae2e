"""The schedule of a compiled step on two lanes, one that computes and one that communicates."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from jdp.collectives import call_order
from jdp.inspect import hlo
from jdp.inspect.computation import Instruction
from jdp.inspect.costs import Costs
from jdp.inspect.hlo import HloProgram
from jdp.inspect.kernels import Kernel
from jdp.inspect.speeds import Speeds, Work
from jdp.inspect.transfers import SentArrays, collective_in, number_of, transfer_of
from jdp.inspect.trip_counts import TripCounts

# These move no data, or only start operations that are counted elsewhere.
_FREE = set(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id "
    "opt-barrier".split()
)
# Loops run so often; the time of further iterations is that of the last one.
_SIMULATED = 3


@dataclass
class Timeline:
    """One simulated run of a program.

    Attributes:
      step_s: seconds of the step.
      computing_s: seconds of them that the computing lane computes.
      flops: operations of its matmuls, by dtype.
      transfers: its collectives, in the order in which they first start.
      spans: `(lane, begin, end, name)` of what the two lanes do, in seconds.
      unknown: what could not be counted, in words.
    """

    step_s: float = 0.0
    computing_s: float = 0.0
    flops: Counter[str] = field(default_factory=Counter)
    transfers: dict[str, SentArrays] = field(default_factory=dict)
    spans: list[tuple[str, float, float, str]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def simulate(program: HloProgram, speeds: Speeds, kernels: Sequence[Kernel] = ()) -> Timeline:
    """Run the schedule of a program on two lanes, one transfer at a time."""
    run = _Simulation(program, speeds, Costs(program.computations, kernels))
    run.computation(program.entry)
    run.timeline.step_s = run.now_s
    return run.timeline


@dataclass
class _UnderWay:
    begins_s: float
    ends_s: float
    transfer: SentArrays
    num_matmuls: int
    meanwhile: Counter[str]


class _Simulation:
    def __init__(self, program: HloProgram, speeds: Speeds, costs: Costs):
        self._program, self._speeds, self._costs = program, speeds, costs
        self._trip_counts = TripCounts(program.computations)
        self._seconds: dict[str, float] = {}  # of the branches of conditionals
        self.timeline = Timeline()
        self.now_s = 0.0
        self._free_s = 0.0  # when the communicating lane is
        self._num_matmuls = 0
        self._under_way: dict[str, _UnderWay] = {}

    def computation(self, name: str) -> None:
        """Run the operations of a computation."""
        for one in self._program.computations[name]:
            self._instruction(one, name)

    def _instruction(self, one: Instruction, name: str) -> None:
        inner = collective_in(one, self._costs)
        if one.op == "while":
            self._loop(one, name)
        elif one.op == "conditional":
            self._branches(one)
        elif one.op == "call" and not inner and not self._costs.flops(one, self._shapes(name)):
            self.computation(one.called()[0])
        elif inner is not None:
            self._collective(one, inner, name)
        elif one.op.endswith("-done"):
            self._done(next(iter(one.operands()), ""))
        elif (part := self._costs.part(one)) and part.is_done:
            self._done(part.chain)
        elif one.op not in _FREE:
            self._compute(one, name)

    def _shapes(self, name: str) -> dict[str, str]:
        return self._program.computations[name].shapes

    def _loop(self, one: Instruction, name: str) -> None:
        try:
            num_times = self._trip_counts.times(one, name)
        except ValueError:
            num_times = 1
            self.timeline.unknown.append(f"the loop {one.name} was counted once")
        if not num_times:
            return
        body = one.computation("body")
        for _ in range(min(num_times, _SIMULATED) - 1):
            self.computation(body)
        before = self._totals()
        self.computation(body)
        self._repeat(before, max(0, num_times - _SIMULATED))

    def _branches(self, one: Instruction) -> None:
        branches = [name for name in one.called() if name in self._program.computations]
        if branches:
            self.timeline.unknown.append(f"of {one.name} the longest branch was counted")
            self.computation(max(branches, key=self._alone_s))

    def _alone_s(self, name: str) -> float:
        """Return the seconds of a computation by itself."""
        if name not in self._seconds:
            alone = _Simulation(self._program, self._speeds, self._costs)
            alone._seconds = self._seconds
            alone.computation(name)
            self._seconds[name] = alone.now_s
        return self._seconds[name]

    def _totals(self) -> tuple:
        found = self.timeline
        own = {
            name: (x.runs, x.took_s, x.exposed_s, x.hidden_runs)
            for name, x in found.transfers.items()
        }
        return self.now_s, found.computing_s, Counter(found.flops), own

    def _repeat(self, before: tuple, num_times: int) -> None:
        """Add what has happened since some totals, so many times more."""
        if not num_times:
            return
        found, (now_s, computing_s, flops, own) = self.timeline, before
        begin_s, took_s = self.now_s, self.now_s - now_s
        self.now_s += num_times * took_s
        self._free_s += num_times * took_s
        found.computing_s += num_times * (found.computing_s - computing_s)
        for dtype, value in found.flops.items():
            found.flops[dtype] = value + num_times * (value - flops[dtype])
        for name, x in found.transfers.items():
            runs, took_s, exposed_s, hidden = own.get(name, (0, 0, 0, 0))
            x.runs += num_times * (x.runs - runs)
            x.took_s += num_times * (x.took_s - took_s)
            x.exposed_s += num_times * (x.exposed_s - exposed_s)
            x.hidden_runs += num_times * (x.hidden_runs - hidden)
        found.spans.append(("computation", begin_s, self.now_s, f"{num_times} more iterations"))

    def _compute(self, one: Instruction, name: str) -> None:
        flops = self._costs.flops(one, self._shapes(name))
        if not flops and (missing := self._costs.uncounted(one)):
            self.timeline.unknown.append(missing)
        shapes = self._shapes(name)
        took_s = self._speeds.compute_s(
            Work(
                flops,
                self._costs.num_bytes(one, shapes),
                self._costs.transcendentals(one),
                not flops and self._costs.is_strided(one),
            )
        )
        self.timeline.flops.update(flops)
        self.timeline.computing_s += took_s
        label = _label(one, bool(flops))
        self._span("computation", self.now_s, self.now_s + took_s, label)
        self.now_s += took_s
        for each in self._under_way.values():
            each.meanwhile[label] += took_s  # type: ignore[assignment]
        if flops:
            self._num_matmuls += 1
            for transfer in self.timeline.transfers.values():
                transfer.after_last_matmul = False

    def _collective(self, one: Instruction, inner: Instruction, name: str) -> None:
        target, number = inner.target(), number_of(inner)
        if target == call_order.DONE:
            self._done(f"ring {number}")
            # The operands and results of a done are its bucket, out of and into place.
            took_s = self._speeds.compute_s(Work({}, 2 * hlo.num_bytes(one.shape)))
            self.now_s += took_s
            self.timeline.computing_s += took_s
            return
        key = f"{name}/{one.name}"
        transfer = self.timeline.transfers.get(key)
        if transfer is None:
            transfer = transfer_of(one, inner, name, self._shapes(name))
            self.timeline.transfers[key] = transfer
        part = self._costs.part(one)
        ring = f"ring {number}" if target == call_order.START else None
        handle = ring or (part.chain if part else one.name)
        self._start(handle, transfer)
        if handle == one.name and not one.op.endswith("-start"):
            self._done(handle)

    def _start(self, handle: str, transfer: SentArrays) -> None:
        took_s = self._speeds.transfer_s(
            transfer.kind, transfer.algorithm, transfer.num_bytes, transfer.groups
        )
        begin_s = max(self._free_s, self.now_s)
        self._free_s = begin_s + took_s
        if not transfer.runs:
            transfer.begins_s = begin_s
        transfer.runs += 1
        transfer.after_last_matmul = True
        transfer.took_s += took_s
        self._span("communication", begin_s, self._free_s, transfer.instruction.name)
        self._under_way[handle] = _UnderWay(
            begin_s, self._free_s, transfer, self._num_matmuls, Counter()
        )

    def _done(self, handle: str) -> None:
        found = self._under_way.pop(handle, None)
        if found is None:  # of a copy, say
            return
        transfer = found.transfer
        transfer.hidden_runs += self._num_matmuls > found.num_matmuls
        if found.ends_s > self.now_s:
            # Others may be in front of it on the lane: each is booked for its own time there.
            for each in (found, *self._under_way.values()):
                waited_s = min(each.ends_s, found.ends_s) - max(each.begins_s, self.now_s)
                each.transfer.exposed_s += max(0.0, waited_s)
            self.now_s = found.ends_s
        if transfer.runs == 1:
            transfer.ends_s = self.now_s
            transfer.meanwhile = found.meanwhile

    def _span(self, lane: str, begin_s: float, end_s: float, label: str) -> None:
        spans = self.timeline.spans
        last = spans[-1] if spans else ("", 0.0, 0.0, "")
        if lane == "computation" and (last[0], *last[2:]) == (lane, begin_s, label):
            spans[-1] = (lane, last[1], end_s, label)
        else:
            spans.append((lane, begin_s, end_s, label))


def _label(one: Instruction, is_matmul: bool) -> str:
    name = one.op_name()
    way = "backward" if "transpose(" in name else "forward" if "jvp(" in name else "update"
    return f"{way if name else 'other'}{' matmul' * is_matmul}"
