"""What is published about GPUs, their links and NCCL. Needs no JAX."""

import re
from typing import NamedTuple

from jdp.inspect.rate import ASSUMED, PUBLISHED, Rate, part_of

# NCCL's all-reduce on 8 GPUs of compute capability 9.0, published with vLLM's pull request 42324:
# 128 MiB take 561 us, and nothing takes 20 us.
NCCL_START_S, NCCL_BYTES_PER_S = 20e-6, 2 * 7 / 8 * 128 * 2**20 / 541e-6


class Gpu(NamedTuple):
    """A GPU: its name, and its peaks from NVIDIA's data sheets.

    Attributes:
      xla_name: its name in XLA's descriptions.
      flops: dense bfloat16 operations per second.
      memory_bytes_per_s: bytes per second.
      memory_bytes: bytes.
      per_host: GPUs of a host.
    """

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
    """Return the GPU of `GPUS` that JAX calls `device_kind`, or "".

    >>> kind_of("NVIDIA GB200"), kind_of("NVIDIA H100 80GB HBM3"), kind_of("Tesla T4")
    ('GB200', 'H100', '')
    """
    return next((name for name in GPUS if re.search(rf"\b{name}\b", device_kind)), "")


def nvlink(gpu: str) -> Rate:
    """Return the bytes that a GPU sends to others of its host in a second."""
    if gpu in ("H100", "H200"):
        source = f"{PUBLISHED} (NCCL on 8 GPUs, vLLM's pull request 42324)"
        return part_of(NCCL_BYTES_PER_S, (0.85, 1, 1.1), "B/s", source)
    return part_of(230e9 if gpu == "A100" else 700e9, (0.6, 1, 1.3), "B/s", ASSUMED)
