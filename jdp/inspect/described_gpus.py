"""GPUs that are not here, as XLA's CUDA plugin describes them, to compile for."""

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jdp.inspect.gpus import GPUS


class MissingPluginError(Exception):
    """Raised where something is missing to compile for a target; names it."""


def gpus_of(name: str) -> tuple[str, int, int]:
    """Return the kind of GPU of a target, the number of hosts, and GPUs of each host.

    >>> gpus_of("12xH200")
    ('H200', 2, 6)
    """
    number, _, kind = name.upper().partition("X")
    num, most = int(number), GPUS[kind].per_host
    num_hosts = -(-num // most)
    if num % num_hosts:
        equal = -(-num // num_hosts) * num_hosts
        raise ValueError(
            f"{name}: {num} GPUs are not the same number on each of {num_hosts} hosts, of "
            f"{most} GPUs at most. Write {equal}x{kind}."
        )
    return kind, num_hosts, num // num_hosts


def gpu_devices(description: str, num_hosts: int, num_per_host: int) -> list[Any]:
    """Return GPUs to compile for and never to run on."""
    # Without it the CUDA plugin asks for cuDNN, which only a run would need.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    # Each host is a domain of its own: in one of several hosts XLA takes kernels that read the
    # memory of any GPU, and its compiler aborts for 64 of them.
    shape = f"{num_hosts}x1x{num_per_host}"
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", topology=shape, target_config=description
        )
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        raise MissingPluginError(
            f"JAX cannot describe {num_hosts * num_per_host} GPUs here: {error}"
        ) from error
    return list(topology.devices)


@functools.cache  # the library has hundreds of megabytes
def gpu_description(name: str) -> str:
    """Return XLA's own description of a GPU, which its CUDA plugin carries since JAX 0.12."""
    found = importlib.util.find_spec("jax_plugins")
    folders = [Path(folder) for folder in found.submodule_search_locations or ()] if found else []
    libraries = [path for folder in folders for path in folder.glob("xla_cuda*/xla_cuda_plugin.so")]
    if not libraries:
        raise MissingPluginError(
            "to compile for GPUs that are not here, install JAX's CUDA plugin (no GPU or driver is "
            "needed): pip install 'jdp[explain-gpu]'"
        )
    library = libraries[0].read_bytes()
    end = f'device_description_str: "{name}"'.encode()  # in every description; `name:` is in some
    if end not in library:
        raise MissingPluginError(
            f"this CUDA plugin does not describe {name}; that of JAX 0.12 does."
        )
    stop = library.index(end) + len(end)
    start = library.rindex(b"gpu_device_info {", 0, stop)
    lines = library[start:stop].decode().splitlines()
    # JAX 0.10 knows no such field.
    return "\n".join(line for line in lines if "collective_memory_granularity" not in line)
