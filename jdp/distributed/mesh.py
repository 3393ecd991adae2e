"""The mesh: the devices of the data axis."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jdp import axis
from jdp.axis import AxisName
from jdp.distributed import initialize, kv_store, this_process
from jdp.distributed.checks import startup
from jdp.validation import int_at_least
from jdp.worker import watching
from jdp.worker.local_devices import require_few_cpu_ranks


def init(
    mesh: Mesh | None = None,
    *,
    axis_name: AxisName = "data",
    cpu_ranks: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    timeout_s: float | None = 600.0,
    progress: bool = True,
) -> Mesh:
    """Make the mesh that jdp trains on, and remember it.

    With several processes, `init` finds the others, and the mesh spans the devices of all of them:
    under `jdp run`, mpiexec, Slurm's srun or Kubernetes, with torchrun's variables, or after your
    own `jax.distributed.initialize()`. It must then precede anything that creates an array. Under
    `jdp run`, standby processes also run the lines before `init`, and wait in it. A second call
    replaces the mesh. States that are already on another mesh stay there.

    Args:
      mesh: a mesh of your own, with any further axes; jdp uses only `axis_name`.
      axis_name: name of the data axis, or a tuple of names of axes of `mesh` that form it.
      cpu_ranks: train on this many virtual CPU devices, 1 to 1024. Must precede anything that asks
        JAX for a device.
      devices: the devices of the mesh, in rank order. Default: all devices of all processes.
      timeout_s: seconds, > 0, after which a run that completes no step is ended with exit code 124;
        after 30 s it reports where each process is. Compiling, evaluating, saving and the time
        before the first step may take six times as long; see `jdp.phase`. `jdp run --timeout-s`
        takes precedence. None: no limit. There is also no limit for a program that makes no step
        and takes no batch of `jdp.batches`, such as plain inference. A process that trains alone is
        ended only in a step or while it waits for `jdp.batches`, and never at a prompt.
      progress: whether process 0 shows how far it is: one line on a terminal and in a notebook,
        elsewhere a line every 30 s. JDP_PROGRESS=off turns it off, too. Under `jdp run` the
        launcher shows it, see `--progress`.

    Returns:
      The mesh. Rank r is its r-th device along `axis_name`.

    Raises:
      TypeError: if an option has another type.
      ValueError: if `mesh` has no such axis, a device is listed twice, `cpu_ranks` comes too late,
        or `timeout_s` is not positive; on every process, if a process has other versions, devices,
        XLA_FLAGS or another mesh.
      RuntimeError: if the other processes cannot be found, or JAX is already running.

    >>> import jdp
    >>> mesh = jdp.init(cpu_ranks=4)
    >>> mesh.shape["data"]
    4
    """
    wanted = axis.names(axis_name)
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(
            f"init got mesh={mesh!r}, which is not a jax.sharding.Mesh. Write "
            "jdp.init(cpu_ranks=4) for ranks of this CPU, jdp.init(devices=...) for some devices, "
            "jdp.init() for all."
        )
    if devices is not None:
        _require_devices(devices)
    if sum(choice is not None for choice in (mesh, cpu_ranks, devices)) > 1:
        raise ValueError("init takes only one of mesh, cpu_ranks and devices: each names devices.")
    watching.require_limit(timeout_s)
    if not isinstance(progress, bool):
        raise TypeError(f"init got progress={progress!r}. Write progress=False to show none.")
    initialize.join()
    if mesh is None:
        mesh = _mesh_of(_cpu_devices(cpu_ranks) if cpu_ranks is not None else devices, wanted)
    require_axes(mesh, wanted)
    startup.require_start(mesh, timeout_s)
    if mesh.is_multi_process and mesh.devices.flat[0].platform == "cpu":
        kv_store.keep_programs_of_all()
    watching.begin_watching(
        timeout_s, jax.process_index(), jax.process_count(), shows_progress=progress
    )
    this_process.current.mesh = mesh
    return mesh


def _mesh_of(devices: Sequence[jax.Device] | None, wanted: tuple[str, ...]) -> Mesh:
    if len(wanted) > 1:
        raise ValueError(
            f"axis_name={wanted} names {len(wanted)} axes, and init cannot know how many "
            "devices lie along each. Write init(jax.make_mesh((2, 4), ...), axis_name=...)."
        )
    chosen = jax.devices() if devices is None else list(devices)
    return Mesh(np.array(chosen), wanted, axis_types=(AxisType.Auto,))


def _require_devices(devices: Any) -> None:
    if isinstance(devices, int) or not all(isinstance(each, jax.Device) for each in devices):
        raise TypeError(
            f"init got devices={devices!r}, which is not a list of devices. Write "
            "jdp.init(devices=jax.devices()[:4]), or jdp.init(cpu_ranks=4) for ranks of this CPU."
        )
    if not len(devices):
        raise ValueError("init got devices=[], but a mesh needs at least one: leave devices= out.")
    if len(set(devices)) < len(devices):
        raise ValueError(
            f"init got {len(devices)} devices, of which {len(set(devices))} are different, but "
            "each rank needs a device of its own. List each once, or write "
            f"jdp.init(cpu_ranks={len(devices)}) for virtual devices of this CPU."
        )


def current_mesh() -> Mesh:
    """Return the mesh that `init` made."""
    mesh = this_process.current.mesh
    if mesh is None:
        raise RuntimeError(
            "jdp has no mesh yet, so it cannot know how many ranks share the batch. "
            "Call jdp.init() once, before the first step or batch."
        )
    return mesh


def mesh_of(leaves: Sequence[Any], axis_name: AxisName) -> Mesh:
    """Return the mesh of a state's leaves, or else that of `init`, with the axis `axis_name`."""
    names = axis.names(axis_name)
    wanted = set(names)
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            if wanted.issubset(sharding.mesh.axis_names):
                return sharding.mesh
    mesh = current_mesh()
    require_axes(mesh, names)
    return mesh


def num_ranks(mesh: Mesh, axis_name: AxisName) -> int:
    """Return the number of ranks of `mesh` along `axis_name`, a name or a tuple of names."""
    names = axis_name if isinstance(axis_name, tuple) else axis.names(axis_name)
    return _num_ranks(mesh, names)


@functools.lru_cache  # each call of a step asks
def _num_ranks(mesh: Mesh, names: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in axis.names(names))


@functools.lru_cache
def sharding_of_rows(mesh: Mesh, names: tuple[str, ...]) -> NamedSharding:
    """Return how the rows of a batch are split over the ranks of `mesh` along some of its axes."""
    return NamedSharding(mesh, PartitionSpec(names))


def _cpu_devices(num: int) -> list[jax.Device]:
    num = int_at_least("cpu_ranks", num, least=1)
    require_few_cpu_ranks("cpu_ranks", num)
    try:
        if jax.config.jax_num_cpu_devices < num:  # JAX_NUM_CPU_DEVICES may ask for more
            jax.config.update("jax_num_cpu_devices", num)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:
        pass  # a backend is already running, and may have enough devices
    found = [device for device in jax.devices("cpu") if device.process_index == jax.process_index()]
    if len(found) < num:
        raise ValueError(
            f"cpu_ranks={num}, but JAX already runs with {len(found)} CPU device(s) and cannot "
            "change that. Call jdp.init(cpu_ranks=...) before anything that uses a device (jnp "
            "arrays, jax.devices()), or start again."
        )
    return jax.devices("cpu") if jax.process_count() > 1 else found[:num]


def require_axes(mesh: Mesh, wanted: tuple[str, ...]) -> None:
    """Raise an error for a mesh without the axes `wanted`."""
    missing = [name for name in wanted if name not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"the mesh has the axes {mesh.axis_names}, none called {missing[0]!r}. "
            f"Name the axis that splits the batch: axis_name={mesh.axis_names[0]!r}."
        )
