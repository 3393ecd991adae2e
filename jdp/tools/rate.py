"""Assumed and published rates of GPUs and links. Needs no JAX."""

import re
from dataclasses import dataclass
from typing import NamedTuple

PUBLISHED, ASSUMED, GIVEN = "published", "assumed", "given"
UNUSED = f"{GIVEN}, but no operation of this step takes it"
# Sums and quotients of numbers within these are finite.
LEAST_GIVEN, MOST_GIVEN = 1e-30, 1e30
LEAST_ERROR, MOST_ERROR = 0.25, 0.75


@dataclass(frozen=True)
class Rate:
    """A rate or another number: the likely value, lowest and highest."""

    value: float
    low: float
    high: float
    unit: str
    source: str

    def times(self, factor: float, why: str) -> "Rate":
        """Return the rate times a factor, with the reason in its source."""
        value, low, high = (factor * x for x in (self.value, self.low, self.high))
        return Rate(value, low, high, self.unit, f"{self.source}{why}")

    def __str__(self) -> str:
        interval = "" if self.low == self.high else f" ({self.low:.3g} to {self.high:.3g})"
        return f"{self.value:.3g}{interval} {self.unit}: {self.source}"


def time_interval(error: float) -> tuple[float, float]:
    """Return the shortest and longest time for a predicted time of 1.

    `error`, the largest |predicted / measured - 1|, is at least `LEAST_ERROR`, for a busy machine,
    and for the longest time at most `MOST_ERROR`.

    >>> [round(x, 3) for x in time_interval(0.5)]  # predicted / measured was 1.5 at most
    [0.667, 2.0]
    """
    error = max(error, LEAST_ERROR)
    return 1 / (1 + error), 1 / (1 - min(error, MOST_ERROR))


def part_of(peak: float, parts: tuple[float, float, float], unit: str, source: str) -> Rate:
    """Return a peak's lowest, likely and highest parts."""
    low, likely, high = (peak * part for part in parts)
    return Rate(likely, low, high, unit, source)


def given_rate(value: float, unit: str) -> Rate:
    """Return a user's number, without interval."""
    return Rate(value, value, value, unit, GIVEN)


# NCCL's all-reduce on 8 GPUs of compute capability 9.0, from vLLM's pull request 42324: 128 MiB
# take 561 us, and 0 bytes 20 us.
NCCL_START_S, NCCL_BYTES_PER_S = 20e-6, 2 * 7 / 8 * 128 * 2**20 / 541e-6


class Gpu(NamedTuple):
    """A GPU's peaks from NVIDIA's data sheets; `flops` are of dense bfloat16, per second."""

    xla_name: str
    flops: float
    memory_bytes_per_s: float
    memory_bytes: float
    per_host: int = 8


GPUS = {
    "A100": Gpu("NVIDIA A100-SXM4-80GB", 312e12, 2.04e12, 80e9),
    "H100": Gpu("NVIDIA H100 80GB HBM3", 989e12, 3.35e12, 80e9),
    "H200": Gpu("NVIDIA H200 141GB HBM3e", 989e12, 4.8e12, 141e9),
    "B200": Gpu("NVIDIA B200", 2250e12, 8e12, 180e9),
    "GB200": Gpu("NVIDIA GB200", 2500e12, 8e12, 186e9, per_host=4),
    "B300": Gpu("NVIDIA B300", 2250e12, 8e12, 270e9),
}


def kind_of(device_kind: str) -> str:
    """Return the GPU of `GPUS` for JAX's `device_kind`, or ""."""
    return next((name for name in GPUS if re.search(rf"\b{name}\b", device_kind)), "")


def nvlink(gpu: str) -> Rate:
    """Return the bytes per second from a GPU to its host's others."""
    if gpu in ("H100", "H200"):
        source = f"{PUBLISHED} (NCCL on 8 GPUs, vLLM's pull request 42324)"
        return part_of(NCCL_BYTES_PER_S, (0.85, 1, 1.1), "B/s", source)
    return part_of(230e9 if gpu == "A100" else 700e9, (0.6, 1, 1.3), "B/s", ASSUMED)
