"""Programs of a single device, whatever the script has set for its own."""

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh


@contextlib.contextmanager
def single_device_programs() -> Iterator[None]:
    """Let programs with arrays of one device run in the with block.

    JAX refuses them under `jax.set_mesh`, whose mesh has other devices, and refuses their NumPy
    arguments under `jax.transfer_guard`.
    """
    with jax.set_mesh(Mesh(np.empty((), object), ())), jax.transfer_guard("allow"):
        yield
