"""Assumes times for a compiled schedule, and sums up how much of its reductions is hidden."""

import bisect
from dataclasses import dataclass

from jdp.tools.hlo import HloProgram
from jdp.tools.timeline import Groups, Work, simulate

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


class _Speeds:
    def compute_s(self, work: Work) -> float:
        return max(sum(work.flops.values()) / FLOPS_PER_S, work.num_bytes / BYTES_PER_S)

    def transfer_s(self, kind: str, algorithm: str, num_bytes: float, groups: Groups = ()) -> float:
        if kind != "all-reduce":
            raise ValueError(f"the time of {kind} is unknown.")
        return all_reduce_s(num_bytes)


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

    sent_bytes: int
    hidden_bytes: int
    tail_bytes: int
    reductions: int
    now_s: float
    waited_s: float
    reducing_s: float


def run(text: str) -> Timeline:
    """Simulate the schedule of `compiled.as_text()`, for GPUs.

    Raises:
      ValueError: if the time of an operation would be a guess.
    """
    found = simulate(HloProgram(text), _Speeds())
    if found.unknown:
        raise ValueError(f"the time would be a guess: {'; '.join(found.unknown)}.")
    sent = found.transfers.values()
    return Timeline(
        sent_bytes=sum(x.runs * x.num_bytes for x in sent),
        hidden_bytes=sum(x.hidden_runs * x.num_bytes for x in sent),
        tail_bytes=sum(x.num_bytes for x in sent if x.after_last_matmul),
        reductions=sum(x.runs for x in sent),
        now_s=found.step_s,
        waited_s=sum(x.exposed_s for x in sent),
        reducing_s=sum(x.took_s for x in sent),
    )
