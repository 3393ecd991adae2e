"""Discover the other processes of the run, and connect JAX with them."""

import contextlib
import gc
import importlib
import math
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jdp.distributed import cluster_env, fail_fast, preemption
from jdp.worker import source_digest, source_files, watching
from jdp.worker.launcher_client import Assignment, current
from jdp.worker.local_devices import num_gpus

# How long processes wait for each other to join; JAX's own default. Under a launcher, the launcher
# reports a missing process and stops the run.
JOIN_TIMEOUT_S = 300
_JAX_WAITS_LONGER_S = 60
_LAUNCHED_TIMEOUT_S = 24 * 3600

# Without a launcher, only JAX notices that a process is gone. It ends the others after this time;
# JAX's own default is 100 s.
HEARTBEAT_TIMEOUT_S = 30
# A launcher notices it at once. JAX measures this time with the wall clock, and if that clock
# jumped by more, JAX would abort every process.
_LAUNCHED_HEARTBEAT_TIMEOUT_S = 30 * 24 * 3600

# JAX imports the first two when it lowers its first program, in 20 ms; `socket` the third when it
# connects to a host by name.
_LATE_IMPORTS = ("jaxlib.mlir.dialects.mhlo", "jaxlib.mlir.dialects.builtin", "encodings.idna")

_GRPC_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")

# An address at which no other host could reach this process.
_LOOPBACK = ("localhost", "127.", "[::1]")


def join() -> None:
    """Find the other processes, if there are any, and connect JAX with them.

    Under `jdp run`, wait until the launcher assigns a number to this process. Otherwise read the
    environment (`cluster_env`). Without variables for it, this process is alone. A second call does
    nothing, and neither does a call after the user's own `jax.distributed.initialize`.
    """
    source_files.record()
    launched = current()
    if launched is not None:
        assignment = launched.park(_prepare)
        if not jax.distributed.is_initialized():
            start = time.monotonic()
            watching.record_joining()
            _connect_as(assignment)
            launched.tell("joined", s=time.monotonic() - start)
    elif not jax.distributed.is_initialized():
        place = cluster_env.find(os.environ)
        if place is not None:
            _connect(place)
    if launched is not None or jax.distributed.is_initialized():
        fail_fast.fail_fast()
        preemption.let_children_end()


# Work that a standby process does before other processes wait for it.
def _prepare() -> None:
    for name in _LATE_IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    source_digest.of_bytes()  # which processes compare, and which is remembered
    # A full collection would take 60 ms in the next half second. After `freeze`, later collections
    # skip the objects that exist now.
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
                "jdp.init() must connect the processes before JAX starts, but JAX runs already: an "
                "earlier line made an array or asked for a device, as jax.random.key does. Move "
                "jdp.init() to the top of the program."
            ) from error
        raise


# JAX aborts a process that has waited too long, with addresses of C++ functions and no reason.
@contextlib.contextmanager
def _ends_unless_joined(timeout_s: float, place: Mapping[str, Any]) -> Iterator[None]:
    """End this process with an error if the block has not ended in time."""
    names = ("process_id", "num_processes", "coordinator_address")
    process_id, number, address = (place[name] for name in names)
    error = TimeoutError(
        f"process {process_id} has waited {timeout_s} s at {address or 'the address of process 0'} "
        f"for the others, and not all {number or 'processes'} came. Check that all of them run, "
        "each with a number of its own, and that their hosts can connect to that address."
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
    """Let gRPC connect to process 0 directly, even if http_proxy or https_proxy is set.

    A proxy does not reach the loopback interface of this host, and rarely another host of the run.
    gRPC reads `grpc_proxy` first, once for each connection. If it is empty, gRPC uses no proxy.
    """
    before = {name: os.environ[name] for name in _GRPC_PROXIES if name in os.environ}
    if before:  # JAX warns about any such variable
        os.environ["grpc_proxy"] = ""
    try:
        yield
    finally:
        if before:
            del os.environ["grpc_proxy"]
            os.environ.update(before)


# Wait for process 0: JAX pauses for a second after its first failed connection attempt.
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
        f"process 0 did not come within {timeout_s} s: nothing listens at {address}. Check that it "
        "runs, and that this host can connect to that address."
    )
