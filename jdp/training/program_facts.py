"""On what a traced program depends that is not the author's: versions, devices, types."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.worker.version import version


def facts(types: Sequence[Any], mesh: Mesh, is_part: bool) -> list[Any]:
    """Return what may make two programs of one step differ, as lists for JSON."""
    devices = [*mesh.devices.flat]
    return [
        [jax.__version__, version(), cpu_runtime.why_missing() is None, is_part],
        [devices[0].platform, devices[0].device_kind, dict(mesh.shape)],
        [device.process_index for device in devices],
        [[str(x.dtype), x.shape] for x in types],
    ]
