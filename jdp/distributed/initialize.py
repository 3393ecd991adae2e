"""How a process finds the others that it trains with."""

import contextlib
import gc
import importlib
import os
import socket
import time

import jax

from jdp.distributed import cluster_env, fail_fast, preemption
from jdp.worker import progress, source_files
from jdp.worker.launcher_client import Assignment, Member, current
from jdp.worker.local_devices import num_gpus

# How long processes wait for each other to come; JAX's own default. A launcher sees who does not
# come, says so, and gives up by itself.
JOIN_TIMEOUT_S = 300
_LAUNCHED_TIMEOUT_S = 24 * 3600

# Without a launcher only JAX notices that a process is gone, and ends the others after this time;
# its own default is 100 s.
HEARTBEAT_TIMEOUT_S = 30

# An address at which no other host could reach this process.
_LOOPBACK = ("localhost", "127.", "[::1]")


def member() -> Member | None:
    """Return what this process knows of `jdp run`; None without it."""
    return current()


def join() -> None:
    """Find the other processes, if there are any, and connect JAX with them.

    Under `jdp run`, wait until it says which process this is. Else take what the environment says
    (`cluster_env`); a process that is told nothing is alone. A second call does nothing, and what
    the author has joined by `jax.distributed.initialize` stays so.

    Raises:
      RuntimeError: if the others can't be found, or JAX runs already.
      TimeoutError: if process 0 does not come.
    """
    source_files.record()
    launched = member()
    if launched is not None:
        assignment = launched.park(_prepare)
        if not jax.distributed.is_initialized():
            start = time.monotonic()
            progress.joins()
            _connect_as(assignment)
            launched.tell("joined", s=time.monotonic() - start)
    elif not jax.distributed.is_initialized():
        place = cluster_env.find(os.environ)
        if place is not None:
            _connect(place)
    if launched is not None or jax.distributed.is_initialized():
        fail_fast.fail_fast()
        preemption.let_children_end()


# What need not be done when the other processes wait for this one.
def _prepare() -> None:
    # JAX imports it when it lowers its first program: 20 ms.
    with contextlib.suppress(ImportError):
        importlib.import_module("jaxlib.mlir.dialects.mhlo")
    # A full collection takes 60 ms of the next half second otherwise; now what is here is not
    # looked at again.
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
        )
    elif assignment.gpus and len(assignment.gpus) < num_gpus():
        # As jax.distributed.initialize does it.
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


def _initialize(timeout_s: int, **place) -> None:
    address = place["coordinator_address"]
    if address is not None and place["process_id"] > 0:
        _wait_for(address, timeout_s)
    try:
        jax.distributed.initialize(initialization_timeout=timeout_s, **place)
    except RuntimeError as error:
        if "must be called before" in str(error):
            raise RuntimeError(
                "jdp.init() must connect the processes before JAX starts, but JAX runs already: an "
                "earlier line made an array or asked for a device, as jax.random.key does. Move "
                "jdp.init() to the top of the program."
            ) from error
        raise


# JAX waits a second after a first connection that failed.
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
        f"process 0 was not there within {timeout_s} s: nobody listens at {address}. Is it "
        "alive, and can it be reached from this host?"
    )
