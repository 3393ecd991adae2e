"""Which GPUs of a host each of its processes drives."""

import os
from collections.abc import Mapping

# NCCL refuses two ranks on one GPU without it, and before NCCL 2.30 always.
SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"
# JAX takes this part of a GPU when it starts, unless the other variables say otherwise.
_TAKEN = 0.75
_FRACTION = "XLA_CLIENT_MEM_FRACTION"
_OF_MEMORY = (_FRACTION, "XLA_PYTHON_CLIENT_MEM_FRACTION")


def gpus_of_slots(
    num_gpus: int, num_slots: int, environment: Mapping[str, str] = os.environ
) -> list[list[int] | None]:
    """Divide the GPUs of a host among its slots.

    Args:
      num_slots: processes of this host, >= 1.

    >>> gpus_of_slots(4, 2)
    [[0, 1], [2, 3]]
    >>> gpus_of_slots(1, 2, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
    [[0], [0]]
    """
    if not num_gpus:
        return [None] * num_slots
    if num_gpus % num_slots == 0:
        each = num_gpus // num_slots
        return [[*range(i * each, (i + 1) * each)] for i in range(num_slots)]
    if num_slots % num_gpus == 0 and environment.get(SHARE) == "1":
        return [[i * num_gpus // num_slots] for i in range(num_slots)]
    divisors = [n for n in range(1, num_gpus + 1) if num_gpus % n == 0]
    shared = (
        f" To test several processes on few GPUs, set {SHARE}=1: NCCL 2.30 and later then lets "
        f"{num_slots // num_gpus} of them share a GPU, and they are slow."
        if num_slots % num_gpus == 0
        else ""
    )
    raise ValueError(
        f"{num_slots} processes cannot divide the {num_gpus} GPU{'s' * (num_gpus > 1)} of this "
        f"host evenly. Write --nproc-per-node with one of {', '.join(map(str, divisors))}; with 1, "
        f"one process drives all GPUs. To train on CPUs, set JAX_PLATFORMS=cpu.{shared}"
    )


def memory_of_shared(
    num_gpus: int, num_slots: int, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables by which processes that share a GPU divide its memory.

    >>> memory_of_shared(1, 2, {})
    {'XLA_CLIENT_MEM_FRACTION': '0.375'}
    """
    if not 0 < num_gpus < num_slots or any(map(environment.get, _OF_MEMORY)):
        return {}
    return {_FRACTION: f"{_TAKEN * num_gpus / num_slots:.3g}"}
