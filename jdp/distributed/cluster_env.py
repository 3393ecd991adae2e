"""This process's place by the environment of JAX, mpiexec, Slurm, Kubernetes or torchrun.

`jax.distributed.initialize()` alone would use a Slurm allocation without srun, wait for processes
never started, and assign one GPU to each process.
"""

import importlib.util
import re
from collections.abc import Mapping
from typing import NamedTuple


def number(name: str, environment: Mapping[str, str], default: int | None = None) -> int:
    """Return a variable's value.

    >>> number("RANK", {"RANK": "3"}), number("LOCAL_RANK", {}, 0)
    (3, 0)
    """
    text = environment.get(name, str(default))
    if not re.fullmatch(r"\d+", text):
        raise RuntimeError(
            f"{name}={text!r} must be an integer, because processes find each other by it. "
            "Correct it, or unset it and start the processes with jdp run."
        )
    return int(text)


def _size_and_id(names: tuple[str, ...], environment: Mapping[str, str]) -> tuple[int, int]:
    """Return (number of processes, this process's id).

    >>> _size_and_id(("WORLD_SIZE", "RANK"), {"RANK": "1", "WORLD_SIZE": "2"})
    (2, 1)
    """
    of_size, of_id, *_ = names
    size, process_id = number(of_size, environment), number(of_id, environment)
    if process_id >= size:
        raise RuntimeError(
            f"{of_id}={process_id} must be from 0 to {size - 1}, because {of_size}={size}."
        )
    return size, process_id


# JAX's formula for Slurm: the port follows from the job id.
_FIRST_PORT, _NUM_PORTS = 61440, 4096
# JAX gives all steps of a job one port: their processes would join each other's runs.
_JOBS_BETWEEN_STEPS = 997


def coordinator(environment: Mapping[str, str]) -> str:
    """Return "address:port" of process 0; JAX_COORDINATOR_PORT overrides, as in JAX.

    >>> coordinator({"SLURM_STEP_NODELIST": "n[01-03,7]", "SLURM_JOB_ID": "7"})
    'n01:61447'
    """
    job, step = number("SLURM_JOB_ID", environment), number("SLURM_STEP_ID", environment, 0)
    port = _FIRST_PORT + (job + _JOBS_BETWEEN_STEPS * step) % _NUM_PORTS
    host = _first_host(environment["SLURM_STEP_NODELIST"])
    return f"{host}:{number('JAX_COORDINATOR_PORT', environment, port)}"


def _first_host(hosts: str) -> str:
    """Return a Slurm list's first host.

    >>> _first_host("node[007,010-015],login"), _first_host("rack1-n[2-3]-ib")
    ('node007', 'rack1-n2-ib')
    """
    first = re.match(r"(\[[^]]*\]|[^,\[])*", hosts)
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", first[0] if first else hosts)


def _num_tasks_here(environment: Mapping[str, str]) -> int:
    """Count this step's tasks on this host.

    >>> _num_tasks_here({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"})
    3
    """
    tasks = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        each, _, times = part.rstrip(")").partition("(x")
        tasks += [int(each)] * int(times or 1)
    return tasks[min(number("SLURM_NODEID", environment, 0), len(tasks) - 1)]


# MPICH and Intel MPI: size, rank, local rank, local size.
_PMI = ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{x}" for x in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"))
# torchrun, and JAX (Kubeflow's JAX runtime): size, rank, where process 0 listens.
_TORCHRUN = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
_JAX = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS")
# Set by srun per task.
_SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")


class ProcessPlace(NamedTuple):
    """This process's place among several.

    Attributes:
      method: JAX's method to find None values: its name, "deactivate" if none is missing, or
        None for the one that JAX detects.
      process_id: from 0, on all hosts.
      coordinator: "address:port" of process 0.
      local_id: from 0, on this host.
    """

    method: str | None
    num_processes: int | None = None
    process_id: int | None = None
    coordinator: str | None = None
    local_id: int = 0
    num_local: int = 1

    def devices(self, num_gpus: int, environment: Mapping[str, str]) -> list[int]:
        """Return this process's visible GPUs, [] for all of them.

        >>> ProcessPlace("slurm", local_id=1, num_local=2).devices(8, {})
        [4, 5, 6, 7]
        """
        if listed := environment.get("JAX_LOCAL_DEVICE_IDS"):
            if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", listed):
                raise RuntimeError(
                    f"JAX_LOCAL_DEVICE_IDS={listed!r} must list GPU numbers of this process from "
                    "0, as in 0,1."
                )
            return [int(number) for number in listed.split(",")]
        bound = environment.get("SLURM_GPUS_ON_NODE", str(num_gpus)) != str(num_gpus)
        if bound or num_gpus < self.num_local or self.num_local == 1:
            return []
        each = num_gpus // self.num_local
        return [*range(self.local_id * each, (self.local_id + 1) * each)]


def find(environment: Mapping[str, str]) -> ProcessPlace | None:
    """Return this process's place among several, or None if alone.

    WORLD_SIZE=1 or JAX_NUM_PROCESSES=1 means alone, whatever the other variables are. Empty
    variables do not count.

    >>> find({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}) is None  # an allocation, without srun
    True
    """
    environment = {name: value for name, value in environment.items() if value}
    if "1" in (environment.get("WORLD_SIZE"), environment.get("JAX_NUM_PROCESSES")):
        return None
    for place_of in (_torchrun, _jax, _open_mpi, _slurm, _other_mpi, _kubernetes):
        place = place_of(environment)
        if place is not None:
            return place
    _require_all(_TORCHRUN, environment)
    _require_all(_JAX, environment)
    # Without Slurm or mpiexec, as by prun, PMIx does not tell the size.
    if "SLURM_PROCID" not in environment and number("PMIX_RANK", environment, 0) > 0:
        raise RuntimeError(
            f"PMIX_RANK={environment['PMIX_RANK']} means several processes, but this one cannot "
            "find the others through PMIx. Start with mpiexec or jdp run, or set WORLD_SIZE=1 if "
            "each process trains alone."
        )
    return None


# The first name is the number of processes.
def _require_all(names: tuple[str, ...], environment: Mapping[str, str]) -> None:
    size, *_ = names
    missing = [name for name in names if name not in environment]
    if size in environment and missing:
        raise RuntimeError(
            f"{size}={environment[size]} means several processes, but this one cannot find the "
            f"others without {', '.join(missing)}. Start it with jdp run, or set WORLD_SIZE=1 if "
            "it runs alone."
        )


def _torchrun(environment: Mapping[str, str]) -> ProcessPlace | None:
    if not set(_TORCHRUN) <= set(environment):
        return None
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise RuntimeError(
            f"torchrun already listens on MASTER_PORT={environment['MASTER_PORT']}, which JAX's "
            "processes need to find each other. Start the script with jdp run instead of "
            "torchrun; it accepts the same flags."
        )
    address, port = environment["MASTER_ADDR"], number("MASTER_PORT", environment)
    return ProcessPlace(
        "deactivate",
        *_size_and_id(_TORCHRUN, environment),
        f"[{address}]:{port}" if re.fullmatch(r"[^\[]*:.*", address) else f"{address}:{port}",
        number("LOCAL_RANK", environment, 0),
        number("LOCAL_WORLD_SIZE", environment, 1),
    )


# JAX itself reads only the address.
def _jax(environment: Mapping[str, str]) -> ProcessPlace | None:
    if not set(_JAX) <= set(environment):
        return None
    coordinator = environment["JAX_COORDINATOR_ADDRESS"]
    if not re.search(r":\d+$", coordinator):
        raise RuntimeError(
            f"JAX_COORDINATOR_ADDRESS={coordinator} has no port for process 0 to listen on. "
            f"Write a free port of its host, as in {coordinator.rstrip(':')}:29400."
        )
    return ProcessPlace("deactivate", *_size_and_id(_JAX, environment), coordinator)


# Before Slurm: inside a Slurm job, mpiexec starts its daemons with srun.
def _open_mpi(environment: Mapping[str, str]) -> ProcessPlace | None:
    if number("OMPI_COMM_WORLD_SIZE", environment, 1) == 1:
        return None
    # Before version 5 a variable holds the address of mpiexec; since then only MPI knows it.
    if "OMPI_MCA_orte_hnp_uri" in environment:
        return _mpi("ompi", _OPEN_MPI, environment)
    return _mpi("mpi4py", _OPEN_MPI, environment)


def _other_mpi(environment: Mapping[str, str]) -> ProcessPlace | None:
    if number("PMI_SIZE", environment, 1) == 1:
        return None
    return _mpi("mpi4py", _PMI, environment)


def _mpi(method: str, names: tuple[str, ...], environment: Mapping[str, str]) -> ProcessPlace:
    size, rank, local_rank, local_size = names
    if method == "mpi4py" and importlib.util.find_spec("mpi4py") is None:
        raise RuntimeError(
            f"{size}={environment[size]} means that MPI started several processes, but mpi4py, "
            "which finds the first of them, is not installed: pip install mpi4py. Or start with "
            "jdp run --nproc-per-node instead of mpiexec -n, or set WORLD_SIZE=1 if each process "
            "trains alone."
        )
    return ProcessPlace(
        method,
        *_size_and_id(names, environment),
        local_id=number(local_rank, environment, 0),
        num_local=number(local_size, environment, 1),
    )


# SLURM_NTASKS, which JAX reads, is also set in an allocation without srun.
def _slurm(environment: Mapping[str, str]) -> ProcessPlace | None:
    if number("SLURM_STEP_NUM_TASKS", environment, 1) == 1 or "SLURM_PROCID" not in environment:
        return None
    # mpiexec of MPICH and Intel MPI starts daemons by srun, and these its processes.
    if "MPI_LOCALNRANKS" in environment and number("PMI_SIZE", environment, 1) > 1:
        return None
    _require_all(_SLURM, environment)
    return ProcessPlace(
        "deactivate",
        *_size_and_id(_SLURM, environment),
        environment.get("JAX_COORDINATOR_ADDRESS") or coordinator(environment),
        number("SLURM_LOCALID", environment, 0),
        _num_tasks_here(environment),
    )


# A pod knows its own index; JAX asks Kubernetes for the number of pods.
def _kubernetes(environment: Mapping[str, str]) -> ProcessPlace | None:
    if not {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= set(environment):
        return None
    if importlib.util.find_spec("kubernetes") is None:
        raise RuntimeError(
            f"JOB_COMPLETION_INDEX={environment['JOB_COMPLETION_INDEX']} means a pod of an "
            "Indexed Job, but the Python package kubernetes, by which JAX finds the other pods, "
            "is not installed. Start with jdp run --nnodes, as in "
            "examples/kubernetes/indexed_job.yaml, or set JAX_NUM_PROCESSES, JAX_PROCESS_ID and "
            "JAX_COORDINATOR_ADDRESS, or WORLD_SIZE=1 if each pod trains alone."
        )
    # JAX has this method, but no name for it.
    return ProcessPlace(None, process_id=number("JOB_COMPLETION_INDEX", environment))
