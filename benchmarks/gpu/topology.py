"""A mesh of 8 x H200 to compile for, on a machine without such GPUs."""

from jax.sharding import AxisType, Mesh

from jdp.tools import targets
from jdp.tools.rate import GPUS

UnavailableError = targets.MissingPluginError


def mesh_of_h200s(num_devices: int = 8, described: str | None = None) -> Mesh:
    """Make a mesh over "data" of GPUs on one host, to compile for and never to run on.

    Args:
      num_devices: how many.
      described: what `target_config()` gives under JAX 0.12; older plugins do not know.

    Raises:
      UnavailableError: if JAX's CUDA plugin is not installed, or does not describe an H200.
    """
    devices = targets.gpu_devices(described or target_config(), 1, num_devices)
    return Mesh(devices, ("data",), axis_types=(AxisType.Auto,))


def target_config() -> str:
    """Give XLA's own description of an H200, which its CUDA plugin carries since JAX 0.12.

    Raises:
      UnavailableError: if this environment has no such plugin.
    """
    return targets.gpu_description(GPUS["H200"].xla_name)
