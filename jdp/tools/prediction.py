"""A step's predicted time, at likely, best and worst rates."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jdp.tools import timeline
from jdp.tools.calibration import CollectiveLaw
from jdp.tools.costs import Kernel
from jdp.tools.hlo import HloProgram
from jdp.tools.rate import LEAST_GIVEN, MOST_GIVEN, UNUSED, Rate, time_interval
from jdp.tools.report import StepTime
from jdp.tools.timeline import Groups, Timeline, Work

# A rank's sent share of its arrays, over (n - 1) / n.
_SENT = {"all-reduce": 2.0}
_PERMUTE = "collective-permute"
# Each rank reads the others' arrays, or a part of each and then the other sums.
_ONE_SHOT, _TWO_SHOT = "triton one-shot", "triton two-shot"
_WHY_UNUSED = {
    "matmul_flops": ": matmuls of float32 take matmul_flops_f32",
    "matmul_flops_f32": ": matmuls of 16 bits take matmul_flops",
}


class Likely:
    """Times of operations at some rates: `which` of `value`, `low` or `high`."""

    def __init__(
        self,
        rates: Mapping[str, Rate],
        num_ranks: int,
        hosts: Sequence[int],
        which: str = "value",
        laws: Mapping[tuple[str, str], CollectiveLaw] | None = None,
    ):
        self._laws = laws or {}
        self._which = which

        def rate(name: str) -> float:
            return getattr(rates[name], which)

        other = {"low": "high", "high": "low"}.get(which, which)
        self._matmul, self._matmul_f32 = rate("matmul_flops"), rate("matmul_flops_f32")
        self._memory, self._link = rate("memory_bytes_per_s"), rate("link_bytes_per_s")
        self._start_s = getattr(rates["operation_start_s"], other)
        self._reduction_start_s = getattr(rates["reduction_start_s"], other)
        if "kernel_reduction_start_s" in rates:
            self._kernel_start_s = getattr(rates["kernel_reduction_start_s"], other)
        if len({*hosts}) > 1:
            self._host_link = rate("host_link_bytes_per_s")
            self._host_start_s = getattr(rates["host_reduction_start_s"], other)
        self._num_ranks, self._hosts = num_ranks, hosts

    def compute_s(self, work: Work) -> float:
        """Return an operation's seconds: of its matmuls or its memory."""
        wide = sum(value for dtype, value in work.flops.items() if dtype in ("f32", "f64"))
        narrow = sum(work.flops.values()) - wide
        matmul_s = wide / self._matmul_f32 + narrow / self._matmul
        return self._start_s + max(matmul_s, work.num_bytes / self._memory)

    def transfer_s(self, kind: str, algorithm: str, num_bytes: float, groups: Groups = ()) -> float:
        """Return a collective's seconds: measured, or its start and its bytes over links."""
        n = len(groups[0]) if groups else self._num_ranks
        if n == 1:
            return self._start_s
        measured = "xla" if algorithm in (_ONE_SHOT, _TWO_SHOT) else algorithm
        if n == self._num_ranks and (law := self._laws.get((kind, measured))):
            # Measured times differ from the law: between two sizes it is a line through both.
            is_between = law.points[0][0] <= num_bytes <= law.points[-1][0]
            shortest, longest = time_interval(0.0 if is_between else law.largest_error)
            factor = {"value": 1.0, "low": longest, "high": shortest}[self._which]
            return factor * law.seconds(num_bytes)
        sent = num_bytes if kind == _PERMUTE else _SENT.get(kind, 1.0) * num_bytes * (n - 1) / n
        leaving = self._leaving_host(kind, num_bytes, sent, groups or [range(len(self._hosts))])
        if algorithm == _ONE_SHOT:
            sent = num_bytes * (n - 1)
        if algorithm in (_ONE_SHOT, _TWO_SHOT):
            return self._kernel_start_s + sent / self._link
        if leaving is None:
            return self._reduction_start_s + sent / self._link
        return self._host_start_s + max(sent / self._link, leaving / self._host_link)

    def _leaving_host(
        self, kind: str, num_bytes: float, sent: float, groups: Groups
    ) -> float | None:
        """Return the most bytes that leave a host; None if each group is on one."""
        leaving: dict[int, float] = defaultdict(float)
        for group in groups:
            on_host = Counter(self._hosts[rank] for rank in group)
            if len(on_host) == 1:
                continue
            if kind == _PERMUTE:  # a pair, sender first
                on_host = Counter([self._hosts[group[0]]])
            for host, num in on_host.items():
                others = num * (len(group) - num) / len(group)  # of an array of each of its ranks
                leaving[host] += num_bytes * others if "all-to-all" in kind else sent
        return max(leaving.values(), default=None)


class PredictedStep(NamedTuple):
    """A compiled step, simulated at rates; see `Likely`."""

    program: HloProgram
    num_ranks: int
    hosts: Sequence[int]
    laws: Mapping[tuple[str, str], CollectiveLaw]
    kernels: Sequence[Kernel]

    def at(self, rates: Mapping[str, Rate], which: str = "value") -> Timeline:
        """Return the schedule at some rates; `which` as for `Likely`."""
        speeds = Likely(rates, self.num_ranks, self.hosts, which, self.laws)
        return timeline.simulate(self.program, speeds, self.kernels)

    def time(self, rates: Mapping[str, Rate], found: Timeline) -> StepTime:
        """Return the time with its interval."""
        return StepTime(
            likely_s=found.step_s,
            low_s=self.at(rates, "high").step_s,
            high_s=self.at(rates, "low").step_s,
            computing_s=found.computing_s,
            exposed_s=sum(transfer.exposed_s for transfer in found.transfers.values()),
            matmul_flops=sum(found.flops.values()),
        )

    def unused(
        self, given: Mapping[str, Rate], rates: Mapping[str, Rate], found: Timeline
    ) -> dict[str, Rate]:
        """Return given rates without effect, with a source that says so."""
        same = {}
        for name, rate in given.items():
            worst = MOST_GIVEN if name.endswith("_start_s") else LEAST_GIVEN
            if self.at({**rates, name: replace(rate, value=worst)}).step_s == found.step_s:
                same[name] = replace(rate, source=f"{UNUSED}{_WHY_UNUSED.get(name, '')}")
        return same
