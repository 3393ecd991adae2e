"""This host's GPUs and CPUs, found without JAX."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

# Each CPU device costs XLA three threads and 0.3 MB; with some ten thousand the process aborts.
MAX_CPU_RANKS = 1024

# JAX_PLATFORMS for a GPU.
_OF_GPUS = {"gpu", "cuda", "rocm"}
_MIG = "MIG-"


def num_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """Count the GPUs that a process started with `environment` would find.

    >>> num_gpus({"CUDA_VISIBLE_DEVICES": "GPU-8f2a,GPU-61c0"})
    2
    >>> num_gpus({"CUDA_VISIBLE_DEVICES": ""})
    0
    """
    platforms = {name.strip().lower() for name in environment.get("JAX_PLATFORMS", "").split(",")}
    if platforms != {""} and not platforms & _OF_GPUS:
        return 0
    present = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in devices.glob("nvidia*"))
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in environment:
            return _num_listed(environment[name], present or None)
    return present


def _num_listed(text: str, num_present: int | None) -> int:
    """Return how many listed devices CUDA uses; `num_present` may be unknown."""
    listed = text.split(",")
    # Numbers, or names such as GPU-8f2a or MIG-GPU-8f2a/1/0.
    kind = next((kind for kind in ("GPU-", _MIG) if listed[0].startswith(kind)), "")
    found: list[str | int] = []
    for device in listed:
        if kind:
            known: str | int | None = device if device.startswith(kind) else None
        else:
            # CUDA ignores what follows the digits.
            number = re.match(r"\s*\+?([0-9]+)", device, re.ASCII)
            known = int(number[1]) if number else None
        if known is None or isinstance(known, int) and known >= (num_present or known + 1):
            # CUDA stops at the first that is no device: -1, an empty one, Slurm's NoDevFiles, a
            # name after a blank.
            break
        if known in found:
            return 0  # CUDA uses none
        found.append(known)
    # A process uses at most one MIG slice.
    return min(len(found), 1) if kind == _MIG else len(found)


def require_few_cpu_ranks(name: str, num: int) -> None:
    """Refuse more virtual CPU devices than a process can have; `name` is the option.

    >>> require_few_cpu_ranks("--cpu-ranks", 10**6)
    Traceback (most recent call last):
    ValueError: --cpu-ranks is 1000000, but a process has at most 1024 virtual CPU devices. XLA \
starts threads for each and would abort. Write a smaller number; jdp plan predicts larger runs.
    """
    if num > MAX_CPU_RANKS:
        raise ValueError(
            f"{name} is {num}, but a process has at most {MAX_CPU_RANKS} virtual CPU devices. "
            "XLA starts threads for each and would abort. Write a smaller number; jdp plan "
            "predicts larger runs."
        )


def num_cpus() -> int:
    """Count this process's CPU cores."""
    return len(os.sched_getaffinity(0))
