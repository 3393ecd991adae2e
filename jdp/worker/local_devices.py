"""The GPUs and CPUs that this host lets us use, found without asking JAX."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

# XLA starts three threads for each CPU device and keeps 0.3 MB for it; with some ten thousand the
# process aborts.
MAX_CPU_RANKS = 1024

# A number, or a name that begins with letters such as GPU-8f2a or MIG-GPU-8f2a.
_DEVICE = re.compile(r"\d+$|(GPU|MIG)-")


def num_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """Count the GPUs that a process started with `environment` would find.

    Args:
      environment: CUDA_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES are obeyed.
      devices: where the driver's device files lie.

    >>> num_gpus({"CUDA_VISIBLE_DEVICES": "2,3"}, Path("/dev"))
    2
    >>> num_gpus({"CUDA_VISIBLE_DEVICES": ""}, Path("/dev"))
    0
    """
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in environment:
            listed = [device.strip() for device in environment[name].split(",")]
            # CUDA stops at the first that is not a device: -1, an empty one, or Slurm's NoDevFiles.
            ends = [i for i, device in enumerate(listed) if not _DEVICE.match(device)]
            return min(ends, default=len(listed))
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in devices.glob("nvidia*"))


def require_few_cpu_ranks(name: str, num: int) -> None:
    """Raise an error if a process cannot have so many virtual CPU devices.

    Args:
      name: of the option, for the error.
      num: the number of devices.

    Raises:
      ValueError: if they are more than `MAX_CPU_RANKS`.

    >>> require_few_cpu_ranks("--cpu-ranks", 10**6)
    Traceback (most recent call last):
    ValueError: --cpu-ranks is 1000000, and a process has at most 1024 virtual CPU devices: XLA \
starts threads for each and would abort. Write a smaller number; jdp plan predicts larger runs.
    """
    if num > MAX_CPU_RANKS:
        raise ValueError(
            f"{name} is {num}, and a process has at most {MAX_CPU_RANKS} virtual CPU devices: XLA "
            "starts threads for each and would abort. Write a smaller number; jdp plan predicts "
            "larger runs."
        )


def num_cpus() -> int:
    """Count the CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0))
