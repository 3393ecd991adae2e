"""`init`: joins the processes, and makes the mesh of the data axis."""

import contextlib
import functools
import gc
import importlib
import math
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jdp import axis
from jdp.axis import AxisName
from jdp.distributed import cluster_env, fail_fast, kv_store, preemption, this_process
from jdp.distributed.checks import startup
from jdp.validation import int_at_least
from jdp.worker import build_info, source_files, watching
from jdp.worker.launcher_client import Assignment, current
from jdp.worker.local_devices import num_gpus, require_few_cpu_ranks

# JAX's default; a launcher reports a missing process.
JOIN_TIMEOUT_S = 300
_JAX_WAITS_LONGER_S = 60
_LAUNCHED_TIMEOUT_S = 24 * 3600

# Without a launcher, JAX ends the others this long after a loss; its default is 100.
HEARTBEAT_TIMEOUT_S = 30
# A launcher notices it at once. JAX measures with the wall clock, and a jump beyond this would
# abort every process.
_LAUNCHED_HEARTBEAT_TIMEOUT_S = 30 * 24 * 3600

# JAX imports the first two to lower its first program; `socket` the third for a host by name.
_LATE_IMPORTS = ("jaxlib.mlir.dialects.mhlo", "jaxlib.mlir.dialects.builtin", "encodings.idna")

_GRPC_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")

_LOOPBACK = ("localhost", "127.", "[::1]")


def join() -> None:
    """Connect JAX with processes of the launcher or of `cluster_env`, unless it is connected."""
    source_files.record()
    launched = current()
    if launched is not None:
        assignment = launched.park(_prepare)
        if not jax.distributed.is_initialized():
            start = time.monotonic()
            watching.record_joining()
            try:
                _connect_as(assignment)
            except Exception:
                fail_fast.fail_fast()  # the launcher gets the traceback
                raise
            launched.tell("joined", s=time.monotonic() - start)
    elif not jax.distributed.is_initialized():
        place = cluster_env.find(os.environ)
        if place is not None:
            _connect(place)
    if launched is not None or jax.distributed.is_initialized():
        fail_fast.fail_fast()
        preemption.let_children_end()


# What a standby does before other processes wait for it.
def _prepare() -> None:
    for name in _LATE_IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    build_info.source_digest()  # processes compare it, and it is cached
    # After `freeze`, later collections skip the existing objects.
    gc.collect()
    gc.freeze()


def _connect_as(assignment: Assignment) -> None:
    if assignment.num_processes > 1:
        _initialize(
            _LAUNCHED_TIMEOUT_S,
            coordinator_address=assignment.coordinator,
            coordinator_bind_address=assignment.coordinator,
            num_processes=assignment.num_processes,
            process_id=assignment.process_id,
            local_device_ids=assignment.gpus or [],
            heartbeat_timeout_seconds=_LAUNCHED_HEARTBEAT_TIMEOUT_S,
        )
    elif assignment.gpus and len(assignment.gpus) < num_gpus():
        # jax.distributed.initialize does the same.
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, assignment.gpus)))


def _connect(place: cluster_env.ProcessPlace) -> None:
    address = place.coordinator
    local = address is not None and address.startswith(_LOOPBACK)
    _initialize(
        JOIN_TIMEOUT_S,
        coordinator_address=address,
        coordinator_bind_address=address if local else None,
        num_processes=place.num_processes,
        process_id=place.process_id,
        local_device_ids=place.devices(num_gpus(), os.environ),
        cluster_detection_method=place.method,
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
    )


def _initialize(timeout_s: int, **place: Any) -> None:
    address = place["coordinator_address"]
    if address is not None and place["process_id"] > 0:
        _wait_for(address, timeout_s)
    try:
        with _without_grpc_proxy(), _ends_unless_joined(timeout_s, place):
            limit_s = math.ceil(timeout_s) + _JAX_WAITS_LONGER_S
            jax.distributed.initialize(initialization_timeout=limit_s, **place)
    except RuntimeError as error:
        if "must be called before" in str(error):
            raise RuntimeError(
                "jdp.init() must connect the processes before JAX starts, but JAX already runs: "
                "an earlier line made an array or used a device, as jax.random.key does. Move "
                "jdp.init() to the top of the program."
            ) from error
        raise


# JAX aborts a process that waited too long, with C++ addresses and no reason.
@contextlib.contextmanager
def _ends_unless_joined(timeout_s: float, place: Mapping[str, Any]) -> Iterator[None]:
    names = ("process_id", "num_processes", "coordinator_address")
    process_id, number, address = (place[name] for name in names)
    error = TimeoutError(
        f"process {process_id} waited {timeout_s} s at {address or 'the address of process 0'}, "
        f"but not all {number or 'processes'} joined. Check that all run, each with its own "
        "number, and that their hosts can connect to that address."
    )
    timer = threading.Timer(timeout_s, fail_fast.end_process, [error])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _without_grpc_proxy() -> Iterator[None]:
    """Let gRPC connect to process 0 directly, even if http_proxy or https_proxy is set."""
    before = {name: os.environ[name] for name in _GRPC_PROXIES if name in os.environ}
    if before:  # JAX warns about any such variable
        os.environ["grpc_proxy"] = ""
    try:
        yield
    finally:
        if before:
            del os.environ["grpc_proxy"]
            os.environ.update(before)


# JAX pauses for a second after its first failed connection attempt.
def _wait_for(address: str, timeout_s: float) -> None:
    host, _, port = address.rpartition(":")
    start = time.monotonic()
    while (waited_s := time.monotonic() - start) < timeout_s:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
            return
        except OSError:
            time.sleep(min(0.001 + waited_s / 50, 0.1))
    raise TimeoutError(
        f"process 0 did not join within {timeout_s} s: {address} does not answer. Check that it "
        "runs, and that this host can connect to that address."
    )


def init(
    mesh: Mesh | None = None,
    *,
    axis_name: AxisName = "data",
    axes: Mapping[str, int] | None = None,
    cpu_ranks: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    timeout_s: float | None = 600.0,
    progress: bool = True,
) -> Mesh:
    """Make the mesh that jdp trains on, and remember it.

    With several processes, `init` finds the others, and the mesh spans the devices of all: under
    `jdp run`, mpiexec, Slurm's srun or Kubernetes, with torchrun's variables, or after your own
    `jax.distributed.initialize()`. Call it before anything that creates an array. Under `jdp run`,
    standby processes run the lines before `init`, and wait in it. A second call replaces the mesh;
    states already on another mesh stay there.

    Args:
      mesh: your own mesh, with any further axes; jdp uses only `axis_name`.
      axis_name: name of the data axis, or a tuple of names of axes that form it.
      axes: sizes by name, each >= 1, of a mesh with further axes, such as `{"model": 4}`. One data
        axis may be left out: it gets the remaining devices. The data axis is outermost, so the
        devices of a further axis are neighbours, on one host if its size divides theirs.
      cpu_ranks: train on this many virtual CPU devices, 1 to 1024. Must precede anything that asks
        JAX for a device.
      devices: the mesh's devices, in rank order. Default: all devices of all processes.
      timeout_s: seconds, > 0, without a finished step after which the run ends with exit code 124;
        after 30 s it reports where each process is. Compiling, evaluating, saving and the time
        before the first step may take six times as long; see `jdp.phase`. `jdp run --timeout-s`
        overrides it. None: no limit, as for a program without a step or a batch of `jdp.batches`.
        A lone process is ended only in a step or while it waits for `jdp.batches`, and never at a
        prompt.
      progress: whether process 0 shows progress: one line on a terminal or in a notebook, else a
        line every 30 s. JDP_PROGRESS=off also turns it off. Under `jdp run` the launcher shows it
        (`--progress`).

    Returns:
      The mesh. Rank r is its r-th device along `axis_name`.

    Raises:
      TypeError: an option has another type.
      ValueError: `mesh` lacks the axis or has further ones of type Explicit, `axes` do not fit the
        devices, a device is listed twice, `cpu_ranks` comes too late, or `timeout_s` is not
        positive; on every process, if a process has other versions, devices, XLA_FLAGS or another
        mesh.
      RuntimeError: the other processes cannot be found, or JAX is already running.

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
        raise ValueError(
            "init takes only one of mesh, cpu_ranks and devices, because each selects devices."
        )
    if axes is not None:
        _require_sizes(axes, mesh)
    watching.require_limit(timeout_s)
    if not isinstance(progress, bool):
        raise TypeError(f"init got progress={progress!r}. Write progress=False to hide it.")
    join()
    if mesh is None:
        chosen = _cpu_devices(cpu_ranks) if cpu_ranks is not None else devices
        mesh = _mesh_of(chosen, wanted, axes or {})
    require_axes(mesh, wanted)
    require_auto(mesh, wanted)
    startup.require_start(mesh, timeout_s)
    if mesh.is_multi_process and mesh.devices.flat[0].platform == "cpu":
        kv_store.keep_programs_of_all()
    watching.begin_watching(
        timeout_s, jax.process_index(), jax.process_count(), shows_progress=progress
    )
    this_process.current.mesh = mesh
    return mesh


def _mesh_of(
    devices: Sequence[jax.Device] | None, wanted: tuple[str, ...], axes: Mapping[str, int]
) -> Mesh:
    chosen = jax.devices() if devices is None else [*devices]
    left_out = [name for name in wanted if name not in axes]
    if len(left_out) > 1:
        raise ValueError(
            f"axis_name={wanted} names {len(wanted)} axes, but init does not know their sizes. "
            f"Write init(axes={dict.fromkeys(wanted, 2)}, axis_name={wanted})."
        )
    num_left, rest = divmod(len(chosen), math.prod(axes.values()))
    if rest or not left_out and num_left != 1:
        raise ValueError(
            f"axes={dict(axes)} asks for {math.prod(axes.values())} devices, but this mesh has "
            f"{len(chosen)}. Write sizes whose product divides {len(chosen)}, and leave out "
            f"{wanted[0]!r}, which gets the remaining devices."
        )
    sizes = {name: axes.get(name, num_left) for name in wanted} | dict(axes)
    types = (AxisType.Auto,) * len(sizes)
    grid = np.array(chosen).reshape(*sizes.values())
    if axes and devices is None and chosen[0].platform == "tpu":
        with contextlib.suppress(NotImplementedError):  # neighbours in the network
            grid = mesh_utils.create_device_mesh(grid.shape, chosen, allow_split_physical_axes=True)
    return Mesh(grid, (*sizes,), axis_types=types)


@functools.lru_cache
def require_auto(mesh: Mesh, wanted: tuple[str, ...]) -> None:
    """Refuse further axes of type Explicit."""
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if name not in wanted and kind == AxisType.Explicit:
            further = {each: mesh.shape[each] for each in mesh.axis_names if each not in wanted}
            raise ValueError(
                f"the axis {name!r} of this mesh is Explicit, as jax.make_mesh makes it, but jdp "
                f"leaves further axes to the compiler. Write mesh = jdp.init(axes={further}), and "
                "place arrays on that mesh."
            )


def _require_sizes(axes: Any, mesh: Mesh | None) -> None:
    if mesh is not None:
        raise ValueError("init got mesh= and axes=, but mesh= already has axes. Remove axes=.")
    if not isinstance(axes, Mapping) or not all(isinstance(name, str) for name in axes):
        raise TypeError(f'init got axes={axes!r}. Write sizes by name, axes={{"model": 4}}.')
    for name, size in axes.items():
        int_at_least(f"axes[{name!r}]", size, least=1)


def _require_devices(devices: Any) -> None:
    if isinstance(devices, int) or not all(isinstance(each, jax.Device) for each in devices):
        raise TypeError(
            f"init got devices={devices!r}, which is not a list of devices. Write "
            "jdp.init(devices=jax.devices()[:4]), or jdp.init(cpu_ranks=4) for ranks of this CPU."
        )
    if not len(devices):
        raise ValueError("init got devices=[], but a mesh needs at least one. Remove devices=.")
    if len(set(devices)) < len(devices):
        raise ValueError(
            f"init got {len(devices)} devices, {len(set(devices))} of them different, but each "
            "rank needs its own device. List each once, or write "
            f"jdp.init(cpu_ranks={len(devices)}) for virtual devices of this CPU."
        )


def current_mesh() -> Mesh:
    """Return the mesh of `init`."""
    mesh = this_process.current.mesh
    if mesh is None:
        raise RuntimeError(
            "jdp has no mesh yet, so the number of ranks is unknown. Call jdp.init() once, "
            "before the first step or batch."
        )
    return mesh


def mesh_of(leaves: Sequence[Any], axis_name: AxisName) -> Mesh:
    """Return the mesh of a state's leaves, or else of `init`, with this axis."""
    names = axis.names(axis_name)
    wanted = set(names)
    for leaf in leaves:
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(mesh, Mesh) and wanted.issubset(mesh.axis_names):
            require_auto(mesh, names)
            return mesh
    mesh = current_mesh()
    require_axes(mesh, names)
    return mesh


def num_ranks(mesh: Mesh, axis_name: AxisName) -> int:
    """Count the ranks along `axis_name`."""
    names = axis_name if isinstance(axis_name, tuple) else axis.names(axis_name)
    return _num_ranks(mesh, names)


@functools.lru_cache  # each call of a step asks
def _num_ranks(mesh: Mesh, names: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in axis.names(names))


@functools.lru_cache
def sharding_of_rows(mesh: Mesh, names: tuple[str, ...]) -> NamedSharding:
    """Return the sharding of a batch's rows along some axes."""
    return NamedSharding(mesh, PartitionSpec(names))


def _cpu_devices(num: int) -> list[jax.Device]:
    num = int_at_least("cpu_ranks", num, least=1)
    require_few_cpu_ranks("cpu_ranks", num)
    try:
        if jax.config.jax_num_cpu_devices < num:  # JAX_NUM_CPU_DEVICES may ask for more
            jax.config.update("jax_num_cpu_devices", num)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:
        pass  # a running backend may have enough devices
    found = [device for device in jax.devices("cpu") if device.process_index == jax.process_index()]
    if len(found) < num:
        raise ValueError(
            f"cpu_ranks={num}, but JAX already runs with {len(found)} CPU device(s) and cannot "
            "change that. Call jdp.init(cpu_ranks=...) before using a device (jnp arrays, "
            "jax.devices()), or restart."
        )
    return jax.devices("cpu") if jax.process_count() > 1 else found[:num]


def require_axes(mesh: Mesh, wanted: tuple[str, ...]) -> None:
    """Refuse a mesh without these axes."""
    missing = [name for name in wanted if name not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"the mesh has the axes {mesh.axis_names}, but not {missing[0]!r}. Name the axis "
            f"that splits the batch: axis_name={mesh.axis_names[0]!r}."
        )
