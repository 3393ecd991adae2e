"""System limits: files, shared memory, locked memory, memory, proxies."""

import os
import resource
from collections.abc import Mapping
from pathlib import Path

from jdp.tools.doctor.diagnosis import ERROR, OK, WARNING, Diagnosis

# Open files: of JAX, its threads and its cache; and of links to other processes.
_FILES, _FILES_PER_PROCESS = 128, 8
_ENOUGH_FILES = 1024
_MiB = 2**20
_LEAST_MEMORY, _ENOUGH_MEMORY = 512 * _MiB, 2048 * _MiB
_ENOUGH_SHARED = 1024 * _MiB
PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def files(num_processes: int) -> Diagnosis:
    """Return whether a process may open enough files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES + _FILES_PER_PROCESS * num_processes
    facts = {"soft": soft, "hard": hard, "needed": needed}
    found = f"a process may open {_count(soft)} files (hard limit {_count(hard)})"
    if soft == resource.RLIM_INFINITY or soft >= max(needed, _ENOUGH_FILES):
        return Diagnosis("file descriptors", OK, f"{found}.", facts=facts)
    return Diagnosis(
        "file descriptors",
        ERROR if soft < needed else WARNING,
        f"{found}, and a run of {num_processes} processes needs about {needed}.",
        "Connections between processes, checkpoints and data files each need one, and fail with "
        "'Too many open files' during a run.",
        f"Run `ulimit -n {max(needed, _ENOUGH_FILES)}` before jdp, or raise nofile in "
        "/etc/security/limits.conf (docker: --ulimit nofile=65536).",
        facts,
    )


def shared_memory(platform: str, folder: str = "/dev/shm") -> Diagnosis:
    """Check the named shared memory, unused by jdp."""
    stat = os.statvfs(folder)
    size, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    facts = {"bytes": size, "free_bytes": free}
    found = f"{folder} has {_mib(size)}, of which {_mib(free)} are free"
    if free >= _ENOUGH_SHARED:
        return Diagnosis("shared memory", OK, f"{found}.", facts=facts)
    on_gpu = platform == "gpu"
    return Diagnosis(
        "shared memory",
        ERROR if on_gpu and free < 64 * _MiB else WARNING,
        f"{found}, less than {_mib(_ENOUGH_SHARED)}.",
        "NCCL and the worker processes of data loaders exchange data through it, and fail with "
        "bus errors or 'No space left on device'. jdp's own shared memory is not in it.",
        "Mount a larger one: docker run --shm-size=8g; in Kubernetes an emptyDir with medium: "
        "Memory at /dev/shm.",
        facts,
    )


def locked_memory(infiniband: str = "/sys/class/infiniband") -> Diagnosis:
    """Check that a process may lock memory, for RDMA."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cards = sorted(path.name for path in Path(infiniband).glob("*"))
    facts = {"soft": soft, "hard": hard, "cards": cards}
    found = f"a process may lock {_bytes(soft)} (hard limit {_bytes(hard)})"
    if not cards or soft == resource.RLIM_INFINITY:
        names = f", and the RDMA cards are {', '.join(cards)}" if cards else "; no RDMA card"
        return Diagnosis("locked memory", OK, f"{found}{names}.", facts=facts)
    return Diagnosis(
        "locked memory",
        WARNING,
        f"{found}, and this host has the RDMA cards {', '.join(cards)}.",
        "NCCL registers its buffers with the card, which locks them, and fails with 'ibv_reg_mr "
        "failed' or falls back to TCP.",
        "Run `ulimit -l unlimited` before jdp, or docker run --ulimit memlock=-1.",
        facts,
    )


def memory(root: str = "/") -> Diagnosis:
    """Return the process's free memory, by host and control group."""
    lines = Path(root, "proc/meminfo").read_text().splitlines()
    of_host = {name: 1024 * int(rest.split()[0]) for name, rest in (x.split(":") for x in lines)}
    total, free = of_host["MemTotal"], of_host["MemAvailable"]
    limit = _number(Path(root, "sys/fs/cgroup/memory.max"))
    used = _number(Path(root, "sys/fs/cgroup/memory.current"))
    if limit is not None and used is not None and limit < total:
        total, free = limit, min(free, limit - used)
    facts = {"bytes": total, "free_bytes": free}
    found = f"{_mib(free)} of {_mib(total)} are free"
    if free >= _ENOUGH_MEMORY:
        return Diagnosis("memory", OK, f"{found}.", facts=facts)
    return Diagnosis(
        "memory",
        ERROR if free < _LEAST_MEMORY else WARNING,
        f"{found}. JAX needs about 200 MiB in each process and standby, and commits need three "
        "times the state.",
        "The kernel kills a process that needs more (exit code 137).",
        "Give the container more memory, or run fewer processes (jdp run --standbys 0).",
        facts,
    )


def proxies(environment: Mapping[str, str] = os.environ) -> Diagnosis:
    """Return set proxy variables, without values, which may hold passwords."""
    names = sorted(name for name in environment if name.lower() in PROXIES)
    facts = {"names": names}
    if not names or environment.get("grpc_proxy") == "":
        found = f"{', '.join(names)}, which grpc_proxy= (empty) overrides" if names else "none set"
        return Diagnosis("proxies", OK, f"{found}.", facts=facts)
    return Diagnosis(
        "proxies",
        WARNING,
        f"{', '.join(names)} {'are' if len(names) > 1 else 'is'} set.",
        "gRPC contacts process 0 through a proxy, also on the same host. `jdp.init()` connects "
        "directly, but a script that calls jax.distributed.initialize() itself hangs.",
        "Write jdp.init() instead, or set grpc_proxy= (empty).",
        facts,
    )


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such group, or "max"
        return None


def _count(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else str(limit)


def _bytes(limit: int) -> str:
    return "any amount" if limit == resource.RLIM_INFINITY else f"{limit // 1024} KiB"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes // _MiB} MiB"
