"""Starts the processes of the contestants."""

import os
import sys
from pathlib import Path

from benchmarks.all_reduce import peers
from benchmarks.harness import team
from benchmarks.harness.team import Team


def jax_team(folder: Path, *, is_tiny: bool, num_processes: int, num_devices: int) -> Team:
    """Start processes of `rank_jax.py` with `num_devices` CPU devices each."""
    environment = {
        **peers.ENVIRONMENT,
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "0",
        "XLA_FLAGS": "",  # a number of devices there would take precedence
    }
    arguments = [str(folder), "tiny" if is_tiny else "real"]
    return _team(sys.executable, "rank_jax", arguments, num_processes, environment)


def torch_team(python: str, folder: Path, *, num_processes: int) -> Team:
    """Start processes of `rank_torch.py`, which share the cores."""
    threads = str(max(1, (os.cpu_count() or 1) // num_processes))
    environment = {**peers.ENVIRONMENT, "OMP_NUM_THREADS": threads}
    return _team(python, "rank_torch", [str(folder), threads], num_processes, environment)


def _team(
    python: str, module: str, arguments: list[str], num_processes: int, environment: dict[str, str]
) -> Team:
    program, port = [python, "-m", f"benchmarks.compare.{module}", *arguments], team.free_port()
    commands = [
        [*program, str(index), str(port), str(num_processes)] for index in range(num_processes)
    ]
    return Team(commands, num_processes, environment)
