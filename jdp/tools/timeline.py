"""The schedule of a compiled step on two lanes: computation and communication."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from jdp.collectives import call_order
from jdp.tools import hlo
from jdp.tools.costs import Costs, Kernel
from jdp.tools.hlo import Computation, HloProgram, Instruction, callers_of
from jdp.tools.transfers import SentArrays, collective_in, number_of, transfer_of


class Work(NamedTuple):
    """The work of one operation."""

    flops: Mapping[str, float]
    num_bytes: float


Groups = Sequence[Sequence[int]]


class Speeds(Protocol):
    """Times of operations."""

    def compute_s(self, work: Work) -> float:
        """Return an operation's seconds."""
        ...

    def transfer_s(self, kind: str, algorithm: str, num_bytes: float, groups: Groups = ()) -> float:
        """Return a collective's seconds."""
        ...


_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_INTEGER = re.compile(r"([su]\d+)\[1?\]")
_VALUE = re.compile(r"\{?(-?\d+)\}?\)")
# The result of these is their first operand.
_SAME = frozenset("copy copy-start copy-done bitcast reshape opt-barrier".split())
_FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


class _LoopInteger(NamedTuple):
    """A constant, or an entry of a loop's state plus a constant."""

    entry: int | None
    constant: int


class TripCounts:
    """Counts a program's loop iterations, by XLA's annotation or, on TPUs, the counter."""

    def __init__(self, computations: dict[str, Computation]):
        self._computations = computations
        self._callers = callers_of(computations)

    def times(self, one: Instruction, computation: str) -> int:
        """Return a loop's number of iterations; 1 for other operations."""
        if one.op != "while":
            return 1
        if found := _KNOWN.search(one.rest):
            return int(found[1])
        count = self._derived(one, computation)
        if count is None:
            raise ValueError(
                f"cannot count the loop {one.name}: its number of iterations is unknown."
            )
        return count

    def _derived(self, one: Instruction, computation: str) -> int | None:
        condition = one.computation("condition")
        root = self._root(condition)
        while root is not None and root.op in ("fusion", "call"):
            condition = root.called()[0]
            root = self._root(condition)
        if root is None or root.op != "compare":
            return None
        order = re.findall(r"\bdirection=(\w\w)", root.rest)[0]
        counter, bound = (self._sum(condition, name) for name in root.operands())
        if counter is None or bound is None or order not in _FLIPPED:
            return None
        if not self._step(one, counter):
            counter, bound, order = bound, counter, _FLIPPED[order]
        step = self._step(one, counter)
        if not step or self._step(one, bound) != 0:
            return None
        first, last = (self._constant(self._before(x, one, computation), computation)
                       for x in (counter, bound))  # fmt: skip
        if first is None or last is None:
            return None
        count = _count(first, last, step, order)
        if count is None:
            return None
        # A counter that leaves its type starts anew at the other end.
        dtype = hlo.arrays(self._computations[condition].shapes[root.operands()[0]])[0].dtype
        return count if _fits(first, dtype) and _fits(first + count * step, dtype) else None

    def _step(self, loop: Instruction, value: _LoopInteger) -> int | None:
        if value.entry is None:
            return 0
        body = loop.computation("body")
        root = self._root(body)
        after = None if root is None else self._sum(body, root.name, value.entry)
        return after.constant if after is not None and after.entry == value.entry else None

    def _before(
        self, value: _LoopInteger, loop: Instruction, computation: str
    ) -> _LoopInteger | None:
        if value.entry is None:
            return value
        first = self._sum(computation, loop.operands()[0], value.entry)
        return first and _LoopInteger(first.entry, first.constant + value.constant)

    def _constant(self, value: _LoopInteger | None, computation: str) -> int | None:
        """Return a value constant in all runs of a computation."""
        while value is not None and value.entry is not None:
            callers = self._callers[computation]
            if len(callers) != 1:
                return None
            computation, one = callers[0]
            if one.op == "while":  # an iteration must not change the value
                is_constant = self._step(one, value) == 0
                value = self._before(value, one, computation) if is_constant else None
        return None if value is None else value.constant

    def _root(self, computation: str) -> Instruction | None:
        return self._computations.get(computation, Computation()).root

    def _sum(self, computation: str, name: str, index: int | None = None) -> _LoopInteger | None:
        """Return a constant integer, or a sum with one."""
        one = self._computations[computation].by_name.get(name)
        if one is None:
            return None
        operands = one.operands()
        if one.op == "get-tuple-element":
            return self._sum(computation, operands[0], one.element()) if index is None else None
        if one.op == "tuple":
            return None if index is None else self._sum(computation, operands[index])
        if one.op in _SAME:
            return self._sum(computation, operands[0], index)
        if one.op in ("fusion", "call"):
            root = self._root(one.called()[0])
            return None if root is None else self._sum(one.called()[0], root.name, index)
        if one.op == "while" and index is not None and self._step(one, _LoopInteger(index, 0)) == 0:
            return self._sum(computation, operands[0], index)
        if one.op == "parameter":
            return self._entering(computation, one, index)
        return self._computed(computation, one) if index is None else None

    def _entering(
        self, computation: str, one: Instruction, index: int | None
    ) -> _LoopInteger | None:
        callers = self._callers[computation]
        if callers and all(caller.op == "while" for _, caller in callers):
            return None if index is None else _LoopInteger(index, 0)
        if len(callers) != 1 or callers[0][1].op not in ("fusion", "call"):
            return None
        name, caller = callers[0]
        return self._sum(name, caller.operands()[one.number()], index)

    def _computed(self, computation: str, one: Instruction) -> _LoopInteger | None:
        if one.op not in ("constant", "add") or not _INTEGER.match(one.shape):
            return None
        if one.op == "constant":
            found = _VALUE.match(one.rest)
            return _LoopInteger(None, int(found[1])) if found else None
        lhs, rhs = (self._sum(computation, name) for name in one.operands())
        if lhs is None or rhs is None or None not in (lhs.entry, rhs.entry):
            return None
        entry = rhs.entry if lhs.entry is None else lhs.entry
        return _LoopInteger(entry, lhs.constant + rhs.constant)


def _count(first: int, bound: int, step: int, order: str) -> int | None:
    """Count first, first + step, ... before one that is not `order` bound."""
    if order in ("GT", "GE"):
        return _count(-first, -bound, -step, _FLIPPED[order])
    if order == "NE":
        count, rest = divmod(bound - first, step)
        return None if rest or count < 0 else count
    distance = bound - first + (order == "LE")
    if distance <= 0:
        return 0
    return -(-distance // step) if step > 0 else None


def _fits(value: int, dtype: str) -> bool:
    bits = int(dtype[1:]) - (dtype[0] == "s")
    return -(2**bits) * (dtype[0] == "s") <= value < 2**bits


# These move no data, or start operations counted elsewhere.
_FREE = set(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id "
    "opt-barrier".split()
)
# Further iterations take the time of the last simulated one.
_SIMULATED = 3
# The label of the others.
MORE_ITERATIONS = "more iterations"


@dataclass
class Timeline:
    """One simulated run of a program; `spans` are `(lane, begin, end, name)`, in seconds."""

    step_s: float = 0.0
    computing_s: float = 0.0
    flops: Counter[str] = field(default_factory=Counter)
    transfers: dict[str, SentArrays] = field(default_factory=dict)
    spans: list[tuple[str, float, float, str]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def simulate(program: HloProgram, speeds: Speeds, kernels: Sequence[Kernel] = ()) -> Timeline:
    """Run a program's schedule on two lanes, one transfer at a time."""
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
        self._free_s = 0.0  # when the communicating lane is free
        self._num_matmuls = 0
        self._under_way: dict[str, _UnderWay] = {}

    def computation(self, name: str) -> None:
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
        found.spans.append(("computation", begin_s, self.now_s, f"{num_times} {MORE_ITERATIONS}"))

    def _compute(self, one: Instruction, name: str) -> None:
        flops = self._costs.flops(one, self._shapes(name))
        if not flops and (missing := self._costs.uncounted(one)):
            self.timeline.unknown.append(missing)
        shapes = self._shapes(name)
        took_s = self._speeds.compute_s(Work(flops, self._costs.num_bytes(one, shapes)))
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
            # A done's operands and results are its bucket, out of and into place.
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
        if found is None:
            return
        transfer = found.transfer
        transfer.hidden_runs += self._num_matmuls > found.num_matmuls
        if found.ends_s > self.now_s:
            # Earlier transfers on the lane are charged for their own time.
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
