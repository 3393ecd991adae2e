"""The devices that a step is compiled for, also absent ones."""

import functools
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from jdp.distributed import mesh as meshes
from jdp.distributed import this_process
from jdp.tools.rate import GPUS
from jdp.worker.local_devices import require_few_cpu_ranks


class MissingPluginError(Exception):
    """Something is missing to compile for a target."""


def _gpus_of(name: str) -> tuple[str, int, int]:
    number, _, kind = name.upper().partition("X")
    num, most = int(number), GPUS[kind].per_host
    num_hosts = -(-num // most)
    if num % num_hosts:
        equal = -(-num // num_hosts) * num_hosts
        raise ValueError(
            f"{name}: {num} GPUs do not divide equally over {num_hosts} hosts with at most {most} "
            f"GPUs each. Write {equal}x{kind}."
        )
    return kind, num_hosts, num // num_hosts


def gpu_devices(description: str, num_hosts: int, num_per_host: int) -> list[Any]:
    """Return GPUs to compile for."""
    # Otherwise the CUDA plugin needs cuDNN, as for a run.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    # In a domain of several hosts XLA uses kernels that read any GPU's memory, and its compiler
    # aborts for 64 GPUs.
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
    """Return XLA's description of a GPU, in its CUDA plugin since JAX 0.12."""
    found = importlib.util.find_spec("jax_plugins")
    folders = [Path(folder) for folder in found.submodule_search_locations or ()] if found else []
    libraries = [path for folder in folders for path in folder.glob("xla_cuda*/xla_cuda_plugin.so")]
    if not libraries:
        raise MissingPluginError(
            "to compile for absent GPUs, install JAX's CUDA plugin (no GPU or driver is needed): "
            "pip install 'jdp[explain-gpu]'"
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
    # JAX 0.10 does not know this field.
    return "\n".join(line for line in lines if "collective_memory_granularity" not in line)


_FORMS = '"8xH200" for GPUs (' + ", ".join(GPUS) + '), "v5e:2x4" for a topology of TPUs, or "cpu:4"'


# Sizes by name of mesh axes beside the data axis.
Further = Mapping[str, int]
NONE: Further = MappingProxyType({})


@dataclass(frozen=True)
class TargetDevices:
    """Devices to compile for, with the host number of each; `description` is XLA's of a GPU."""

    name: str
    mesh: Mesh
    hosts: Sequence[int]
    description: str = ""

    @property
    def num_hosts(self) -> int:
        """The number of hosts."""
        return len({*self.hosts})

    @property
    def platform(self) -> str:
        """The platform: cpu, gpu or tpu."""
        platform = self.mesh.devices.flat[0].platform
        return "gpu" if platform in ("cuda", "rocm") else platform

    @property
    def device_kind(self) -> str:
        """The kind of device, such as `NVIDIA H200 141GB HBM3e`."""
        return self.mesh.devices.flat[0].device_kind

    def memory_bytes(self) -> int | None:
        """Return a device's memory."""
        found = re.search(r"device_memory_size: (\d+)", self.description)
        return int(found[1]) if found else None


def target(on: str | Mesh, axis_names: tuple[str, ...], further: Further = NONE) -> TargetDevices:
    """Return the devices of a name such as `8xH200`, as a mesh with the data axis outermost."""
    if isinstance(on, Mesh):
        return _of_mesh(on, axis_names)
    if not isinstance(on, str):
        raise TypeError(f"on={on!r} is neither a string nor a jax.sharding.Mesh. Write {_FORMS}.")
    require_name(on)
    if on.startswith("cpu:"):
        devices = _cpu_devices(int(on.removeprefix("cpu:")))
        mesh = _mesh(devices, axis_names, further, num_hosts=1)
        return TargetDevices(on, mesh, [0] * len(devices))
    if on.startswith("v"):
        return _tpus(on, axis_names, further)
    return _gpus(on, axis_names, further)


def require_name(on: str) -> None:
    """Raise a ValueError with the forms of names if a text is not a target's name.

    >>> require_name("cpu:0")
    Traceback (most recent call last):
    ValueError: the target 'cpu:0' is unknown. Write "8xH200" for GPUs (A100, H100, H200, B200, \
GB200, B300), "v5e:2x4" for a topology of TPUs, or "cpu:4".
    """
    forms = (r"cpu:[1-9][0-9]*", r"v\d\w*:\d+(x\d+)*", rf"(?i:[1-9][0-9]*x({'|'.join(GPUS)}))")
    if not any(re.fullmatch(form, on) for form in forms):
        raise ValueError(f"the target {on!r} is unknown. Write {_FORMS}.")
    if on.startswith("cpu:"):
        require_few_cpu_ranks("the number of ranks of cpu:N", int(on.removeprefix("cpu:")))
    elif not on.startswith("v"):
        _gpus_of(on)


def _of_mesh(mesh: Mesh, axis_names: tuple[str, ...]) -> TargetDevices:
    meshes.require_axes(mesh, axis_names)
    first, size = mesh.devices.flat[0], mesh.size
    processes = [device.process_index for device in mesh.devices.flat]
    found = this_process.numbered_hosts(processes) if _is_of_this_run(first) else processes
    if first.platform == "cpu":
        return TargetDevices(f"cpu:{size}", mesh, found)
    name = f"{size}x{first.device_kind}"
    if first.platform == "tpu":  # with equal links within a host and between hosts
        return TargetDevices(name, mesh, [0] * size)
    try:
        description = gpu_description(first.device_kind)
    except MissingPluginError:  # JAX before 0.12, or another kind of GPU
        description = ""
    return TargetDevices(name, mesh, found, description)


def _is_of_this_run(device: Any) -> bool:
    """Whether JAX runs a device, rather than describes it with other process numbers."""
    try:
        return device in jax.devices(device.platform)
    except RuntimeError:
        return False


def _mesh(devices: Any, axis_names: tuple[str, ...], further: Further, num_hosts: int) -> Mesh:
    if len(axis_names) > 2 or num_hosts == 1 and len(axis_names) > 1:
        raise ValueError(
            f"the data axis of this step is {axis_names}, but {len(devices)} devices of "
            f"{num_hosts} host(s) do not determine the size of each. Pass a jax.sharding.Mesh."
        )
    data = (-1,) if len(axis_names) == 1 else (num_hosts, -1)
    num_outside = num_hosts if len(axis_names) > 1 else 1
    if len(devices) % (num_outside * math.prod(further.values())):
        raise ValueError(
            f"the mesh of this step has the further axes {dict(further)}, whose sizes do not "
            f"divide {len(devices)} devices of {num_hosts} host(s). Name another number."
        )
    names = (*axis_names, *further)
    grid = np.array(devices).reshape(*data, *further.values())
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def _cpu_devices(num: int) -> list[Any]:
    try:
        if jax.config.jax_num_cpu_devices < num:  # the script may need more than this target
            jax.config.update("jax_num_cpu_devices", num)
    except RuntimeError:
        pass  # a running backend may have enough devices
    found = [device for device in jax.devices("cpu") if device.process_index == jax.process_index()]
    if not 1 <= num <= len(found):
        raise MissingPluginError(
            f"JAX runs with {len(found)} CPU device(s) here, and cannot compile for {num}. Call "
            f"jdp.init(cpu_ranks={num}) or jax.config.update('jax_num_cpu_devices', {num}) "
            "before using a device, or run `jdp explain` on the command line."
        )
    return found[:num]


def _gpus(name: str, axis_names: tuple[str, ...], further: Further) -> TargetDevices:
    kind, num_hosts, num_per_host = _gpus_of(name)
    description = gpu_description(GPUS[kind].xla_name)
    devices = gpu_devices(description, num_hosts, num_per_host)
    mesh = _mesh(devices, axis_names, further, num_hosts)
    found = [device.process_index for device in mesh.devices.flat]
    return TargetDevices(name, mesh, found, description)


def _tpus(name: str, axis_names: tuple[str, ...], further: Further) -> TargetDevices:
    if importlib.util.find_spec("libtpu") is None:
        raise MissingPluginError(
            "to compile for absent TPUs, install libtpu (no TPU is needed): pip install "
            "'jdp[explain-tpu]'"
        )
    # Otherwise libtpu asks the network which TPU this is.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    if not [*Path("/dev").glob("accel*"), *Path("/dev").glob("vfio/*")]:
        # Without TPUs, two processes cannot take the same one.
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if "lockfile" in str(error):
            raise RuntimeError(
                "another process of this machine has loaded libtpu, which allows one at a time. "
                f"Wait for its end ({error})"
            ) from error
        raise ValueError(f"libtpu does not know the topology {name!r}: {error}") from error
    devices = topologies.make_mesh(topology, (len(topology.devices),), ("data",)).devices
    num_hosts = len({device.process_index for device in devices})
    # A topology's links are the same within a host and between hosts.
    mesh = _mesh(list(devices), axis_names, further, num_hosts)
    return TargetDevices(name, mesh, [0] * len(devices))
