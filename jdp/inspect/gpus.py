"""What is published about GPUs, their links and NCCL. Needs no JAX."""

from typing import NamedTuple

# NCCL's all-reduce on 8 GPUs of compute capability 9.0, published with vLLM's pull request 42324:
# 128 MiB take 561 us, and nothing takes 20 us.
NCCL_START_S, NCCL_BYTES_PER_S = 20e-6, 2 * 7 / 8 * 128 * 2**20 / 541e-6
NVLINK = {"A100": 230e9, "H100": NCCL_BYTES_PER_S, "H200": NCCL_BYTES_PER_S}
OTHER_NVLINK = 700e9
VLLM = "NCCL on 8 GPUs, vLLM's pull request 42324"


class Gpu(NamedTuple):
    """The peaks of a GPU, from NVIDIA's data sheets.

    Attributes:
      flops: dense bfloat16 operations per second.
      memory_bytes_per_s: bytes per second.
      memory_bytes: bytes.
    """

    flops: float
    memory_bytes_per_s: float
    memory_bytes: float


GPUS = {
    "A100": Gpu(312e12, 2.04e12, 80e9),
    "H100": Gpu(989e12, 3.35e12, 80e9),
    "H200": Gpu(989e12, 4.8e12, 141e9),
    "B200": Gpu(2250e12, 8e12, 180e9),
}
