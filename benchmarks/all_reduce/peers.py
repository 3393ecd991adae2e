"""The contestants between processes: jdp and JAX, PyTorch, Open MPI, and memcpy."""

import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import team
from benchmarks.harness.team import Team
from jdp.launch.host import spawn

_PATHS = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
ENVIRONMENT = {
    # The environment in which `jdp run` starts processes on CPUs, also for the peers.
    "GLIBC_TUNABLES": spawn.environment({})["GLIBC_TUNABLES"],
    "PYTHONPATH": os.pathsep.join(filter(None, _PATHS)),
}
# An environment of PyTorch's own, since it pins other packages than JAX does.
_TORCH_FOLDER = Path(__file__).resolve().parents[2] / ".venv-torch"
INSTALL_TORCH = "python3 -m venv .venv-torch && .venv-torch/bin/pip install torch numpy"
TORCH, MPI = "torch gloo", "Open MPI"


class Peers(NamedTuple):
    """The installations of the peers.

    Attributes:
      torch: a Python with PyTorch, or None.
      mpi: a Python with mpi4py, or None.
      mpirun: Open MPI's `mpirun`, or None.
    """

    torch: str | None = None
    mpi: str | None = None
    mpirun: str | None = None

    def missing(self) -> dict[str, str]:
        """Return the requirement that is missing, for each peer that cannot run."""
        reasons = {}
        if self.torch is None:
            reasons[TORCH] = f"no Python with torch. To install it: {INSTALL_TORCH}"
        if self.mpi is None:
            reasons[MPI] = "no Python with mpi4py (--mpi-python)"
        elif self.mpirun is None:
            reasons[MPI] = "no mpirun on the PATH"
        return reasons


def find(torch_python: str | None, mpi_python: str | None) -> Peers:
    """Find the peers that were not passed.

    PyTorch is looked for in the variable JDP_TORCH_PYTHON, in the folder `.venv-torch`, and in this
    Python; mpi4py in this Python.
    """
    has = {name: importlib.util.find_spec(name) is not None for name in ("torch", "mpi4py")}
    torch_python = torch_python or os.environ.get("JDP_TORCH_PYTHON")
    if torch_python is None and (_TORCH_FOLDER / "bin" / "python").exists():
        torch_python = str(_TORCH_FOLDER / "bin" / "python")
    torch_python = torch_python or (sys.executable if has["torch"] else None)
    mpi_python = mpi_python or (sys.executable if has["mpi4py"] else None)
    return Peers(torch_python, mpi_python, shutil.which("mpirun"))


def jax_team(num_processes: int, num_devices: int) -> Team:
    """Start processes of `rank_jax.py` with `num_devices` devices each."""
    environment = {
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",  # a number of devices there would take precedence
        **ENVIRONMENT,
    }
    return Team(_commands(sys.executable, "jax", num_processes), num_processes, environment)


def torch_team(python: str, num_processes: int) -> Team:
    """Start processes of `rank_torch.py`."""
    return Team(
        _commands(python, "torch", num_processes),
        num_processes,
        ENVIRONMENT | {"OMP_NUM_THREADS": "1"},
    )


def memcpy_team(num_processes: int) -> Team:
    """Start processes of `rank_memcpy.py`."""
    commands = [[sys.executable, *_rank("memcpy")]] * num_processes
    return Team(commands, num_processes, ENVIRONMENT)


def mpi_team(peers: Peers, num_processes: int) -> Team:
    """Start processes of `rank_mpi.py`, with Open MPI's own defaults."""
    assert peers.mpirun and peers.mpi
    command = [peers.mpirun, "-n", str(num_processes), peers.mpi, *_rank("mpi")]
    is_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return Team([command], num_processes, ENVIRONMENT | (is_root if os.geteuid() == 0 else {}))


@contextlib.contextmanager
def all_teams(peers: Peers, num_processes: int) -> Iterator[dict[str, Team]]:
    """Start JAX with one device a process, and all peers that are installed, by name."""
    with contextlib.ExitStack() as stack:
        teams = {"jax": stack.enter_context(jax_team(num_processes, 1))}
        missing = peers.missing()
        if TORCH not in missing:
            assert peers.torch
            teams[TORCH] = stack.enter_context(torch_team(peers.torch, num_processes))
        if MPI not in missing:
            teams[MPI] = stack.enter_context(mpi_team(peers, num_processes))
        yield teams


def _commands(python: str, name: str, num_processes: int) -> list[list[str]]:
    port = str(team.free_port())
    return [
        [python, *_rank(name), str(index), port, str(num_processes)]
        for index in range(num_processes)
    ]


def _rank(name: str) -> list[str]:
    return ["-m", f"benchmarks.all_reduce.rank_{name}"]
