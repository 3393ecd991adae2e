"""A mesh of 8 x H200 to compile for, on a machine without such GPUs."""

import importlib.util
import os
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

# Without it the CUDA plugin asks for cuDNN, which only a run would need.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

_NAME = b'name: "NVIDIA H200 141GB HBM3e"'
_END = b'device_description_str: "NVIDIA H200 141GB HBM3e"'


class UnavailableError(Exception):
    """Says what is missing."""


def mesh_of_h200s(num_devices: int = 8, described: str | None = None) -> Mesh:
    """Make a mesh over "data" of GPUs on one host, to compile for and never to run on.

    Args:
      num_devices: how many.
      described: what `target_config()` gives under JAX 0.12; older plugins do not know.

    Raises:
      UnavailableError: if JAX's CUDA plugin is not installed, or does not describe an H200.
    """
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology=f"1x1x{num_devices}",
            target_config=described or target_config(),
        )
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        raise UnavailableError(f"JAX cannot describe {num_devices} GPUs here: {error}") from error
    return topologies.make_mesh(topology, (num_devices,), ("data",))


def target_config() -> str:
    """Give XLA's own description of an H200, which its CUDA plugin carries since JAX 0.12.

    Raises:
      UnavailableError: if this environment has no such plugin.
    """
    found = importlib.util.find_spec("jax_plugins")
    folders = [Path(folder) for folder in found.submodule_search_locations or ()] if found else []
    libraries = [path for folder in folders for path in folder.glob("xla_cuda*/xla_cuda_plugin.so")]
    if not libraries:
        raise UnavailableError(
            f"JAX's CUDA plugin is not installed: pip install --no-deps "
            f"jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__}"
        )
    library = libraries[0].read_bytes()
    if _NAME not in library:
        raise UnavailableError("this CUDA plugin does not describe an H200; that of JAX 0.12 does.")
    start = library.rindex(b"gpu_device_info {", 0, library.index(_NAME))
    end = library.index(_END, start) + len(_END)
    lines = library[start:end].decode().splitlines()
    # JAX 0.10 knows no such field.
    return "\n".join(line for line in lines if "collective_memory_granularity" not in line)
