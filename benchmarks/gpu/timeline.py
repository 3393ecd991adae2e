"""Simulates a compiled schedule: reductions and matmuls in launch order, with assumed times."""

import bisect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.harness import hlo
from benchmarks.harness.hlo import Instruction

MiB = 2**20
FLOPS_PER_S = 600e12  # of a bfloat16 matmul on an H200, not its peak
BYTES_PER_S = 4e12  # of an H200's memory, not its peak

# NCCL's all-reduce on 8 GPUs of compute capability 9.0, published with vLLM's pull request 42324
# (the time of nothing is extrapolated): MiB -> microseconds.
ALL_REDUCE_US = {0: 20, 0.5: 24, 2: 37, 8: 76, 16: 121, 32: 195, 64: 316, 128: 561}

ASSUMPTIONS = (
    f"Assumed: two streams, one computes and one reduces, one reduction at a time; matmuls at "
    f"{FLOPS_PER_S / 1e12:.0f} TFLOP/s, everything else at {BYTES_PER_S / 1e12:.0f} TB/s, "
    "whichever takes longer; a reduction takes what NCCL's takes on 8 such GPUs, "
    + ", ".join(f"{size} MiB {us} us" for size, us in ALL_REDUCE_US.items())
    + ", linear between and beyond; to wait for a ring of jdp's costs a copy of its bytes."
)

_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_BUCKET = re.compile(r"\bbucket = (\d+)")
_CALLED = re.compile(r"\b(?:calls|called_computations)=\{?%?([\w.\-]+)")
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
# These move no data, or only start operations that are counted elsewhere.
_FREE = set("parameter constant tuple get-tuple-element bitcast after-all partition-id".split())


def all_reduce_s(num_bytes: float) -> float:
    """Return the assumed time of one all-reduce."""
    sizes, times = list(ALL_REDUCE_US), list(ALL_REDUCE_US.values())
    i = min(max(bisect.bisect(sizes, num_bytes / MiB), 1), len(sizes) - 1)
    slope = (times[i] - times[i - 1]) / (sizes[i] - sizes[i - 1])
    return (times[i] + slope * (num_bytes / MiB - sizes[i])) * 1e-6


@dataclass
class Timeline:
    """One simulated run of a schedule.

    Attributes:
      sent_bytes: bytes of all reductions.
      hidden_bytes: bytes of reductions in flight while a matmul runs.
      tail_bytes: bytes of reductions that start after the last matmul.
      reductions: number of reductions.
      now_s: time at which the compute stream is done.
      waited_s: seconds for which the compute stream waited for reductions.
      reducing_s: total seconds of all reductions.
    """

    sent_bytes: int = 0
    hidden_bytes: int = 0
    tail_bytes: int = 0
    reductions: int = 0
    now_s: float = 0.0
    waited_s: float = 0.0
    reducing_s: float = 0.0
    _num_matmuls: int = 0
    _free_s: float = 0.0  # when the reducing stream is
    # For each reduction in flight: its end, its bytes, and the number of matmuls before it.
    _under_way: dict[str, tuple[float, int, int]] = field(default_factory=dict)

    def compute(self, flops: float, num_bytes: float) -> None:
        self.now_s += max(flops / FLOPS_PER_S, num_bytes / BYTES_PER_S)
        if flops:
            self._num_matmuls += 1
            self.tail_bytes = 0

    def start(self, name: str, num_bytes: int) -> None:
        took = all_reduce_s(num_bytes)
        self._free_s = max(self._free_s, self.now_s) + took
        self._under_way[name] = self._free_s, num_bytes, self._num_matmuls
        self.sent_bytes += num_bytes
        self.tail_bytes += num_bytes
        self.reductions += 1
        self.reducing_s += took

    def done(self, name: str) -> None:
        ends_s, num_bytes, before = self._under_way.pop(name)
        if self._num_matmuls > before:
            self.hidden_bytes += num_bytes
        if ends_s > self.now_s:
            self.waited_s += ends_s - self.now_s
            self.now_s = ends_s


def run(text: str) -> Timeline:
    """Simulate the schedule of `compiled.as_text()`, for GPUs.

    Raises:
      ValueError: if a reduction is waited for that was not started, or the time of an
        operation would be a guess.
    """
    return _Run(text).timeline


class _Run:
    def __init__(self, text: str):
        self._computations, entry = hlo.parse(text)
        self._flops: dict[str, float] = {}
        self.timeline = Timeline()
        self._run(entry)

    def _run(self, name: str) -> None:
        computation = self._computations[name]
        shapes = {one.name: one.shape for one in computation}
        starts: set[str] = set()  # all-reduces among what XLA may start: fusions, copies
        for one in computation:
            kind, number = self._ring(one)
            if one.op == "while":
                for _ in range(hlo.times(one)):
                    self._run(_BODY.findall(one.rest)[0])
            elif kind == "jdp_ring_start":
                self._start_ring(one, number, shapes)
            elif kind == "jdp_ring_done":
                self.timeline.done(number)
                # The operands and results of a done are its bucket, out of and into place.
                self.timeline.compute(0, 2 * hlo.num_bytes(one.shape))
            elif one.op == "all-reduce" or (self._reduces(one) and not one.op.endswith("-start")):
                self.timeline.start(one.name, _operand_bytes(one, shapes))
                self.timeline.done(one.name)
            elif self._reduces(one):
                starts.add(one.name)
                self.timeline.start(one.name, _operand_bytes(one, shapes))
            elif one.op.endswith("-done"):
                if one.operands()[0] in starts:
                    self.timeline.done(one.operands()[0])
            elif one.op not in _FREE:
                self._compute(one, shapes)

    def _start_ring(self, one: Instruction, number: str, shapes: dict[str, str]) -> None:
        # The first operand is the scale.
        operands = [x for x in one.operands() if not re.match(r"f(32|64)\[\]", shapes[x])]
        self.timeline.start(number, sum(hlo.num_bytes(shapes[x]) for x in operands))

    def _ring(self, one: Instruction) -> tuple[str, str]:
        """Return the target and the bucket of a call of jdp, possibly inside a fusion that
        slices."""
        for each in [one, *self._inside(one)]:
            target = _TARGET.search(each.rest)
            if target and target[1].startswith("jdp_ring"):
                return target[1], _BUCKET.findall(each.rest)[0]
        return "", ""

    def _inside(self, one: Instruction) -> Iterator[Instruction]:
        called = _CALLED.search(one.rest)
        if called and one.op not in ("all-reduce", "all-reduce-start", "reduce", "while"):
            yield from self._computations.get(called[1], [])

    def _reduces(self, one: Instruction) -> bool:
        if one.op in ("all-reduce", "all-reduce-start"):
            return True
        return any(each.op in ("all-reduce", "all-reduce-start") for each in self._inside(one))

    def _compute(self, one: Instruction, shapes: dict[str, str]) -> None:
        if one.op in ("conditional", "call"):
            raise ValueError(f"the time of {one.op} {one.name} is unknown.")
        self.timeline.compute(self._flops_of(one, shapes), self._bytes_of(one, shapes))

    def _flops_of(self, one: Instruction, shapes: dict[str, str]) -> float:
        if one.op == "dot":
            return hlo.dot_flops(one, shapes)
        target = _TARGET.search(one.rest)
        if target and re.search("gemm|matmul", target[1]):
            # [m, k] [k, n] -> [m, n]: the product of all sizes is the square of m k n.
            sizes = [hlo.num_elements(shapes[x]) for x in one.operands()[:2]]
            return 2 * (sizes[0] * sizes[1] * hlo.num_elements(one.shape)) ** 0.5
        called = _CALLED.search(one.rest)
        if not called or called[1] not in self._computations or one.op == "reduce":
            return 0
        if called[1] not in self._flops:
            inner = self._computations[called[1]]
            shapes = {each.name: each.shape for each in inner}
            self._flops[called[1]] = sum(self._flops_of(each, shapes) for each in inner)
        return self._flops[called[1]]

    def _bytes_of(self, one: Instruction, shapes: dict[str, str]) -> int:
        """Count what is read and written: of an array that is sliced, the slice."""
        inner = list(self._inside(one)) if one.op in ("fusion", "fusion-start") else []
        if one.op.endswith("-start"):  # its shape includes its operands
            one = one._replace(shape=_result_shape(inner) or one.shape)
        whole = _operand_bytes(one, shapes) + hlo.num_bytes(one.shape)
        if not any(each.op.startswith("dynamic-") for each in inner):
            return whole
        inner_shapes = {each.name: each.shape for each in inner}
        for each in inner:
            if each.op == "dynamic-slice":
                whole -= hlo.num_bytes(inner_shapes[each.operands()[0]])
                whole += hlo.num_bytes(each.shape)
            elif each.op == "dynamic-update-slice":
                whole -= 2 * hlo.num_bytes(each.shape)
                whole += hlo.num_bytes(inner_shapes[each.operands()[1]])
        return max(whole, 0)


def _result_shape(computation: list[Instruction]) -> str:
    return computation[-1].shape if computation else ""


def _operand_bytes(one: Instruction, shapes: dict[str, str]) -> int:
    return sum(hlo.num_bytes(shapes.get(x, "")) for x in one.operands())
