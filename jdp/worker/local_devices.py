"""The GPUs and CPUs that this host lets us use, found without asking JAX."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

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


def num_cpus() -> int:
    """Count the CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0))
