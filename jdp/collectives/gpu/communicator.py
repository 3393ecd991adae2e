"""GPUs of one host that reduce among themselves: how they find each other, and are tried.

Nothing of this has run on GPUs.
"""

import base64
import concurrent.futures
import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jdp.collectives.cpu import shared_memory
from jdp.collectives.gpu import runtime as gpu_runtime
from jdp.collectives.gpu import self_test
from jdp.collectives.gpu.runtime import End
from jdp.distributed import kv_store

_log = logging.getLogger("jdp")


class UnavailableError(Exception):
    """These GPUs cannot reduce among themselves; the message is the same on all processes."""


@functools.cache
def communicator(mesh: Mesh, axes: tuple[str, ...]) -> "Communicator":
    """Return the communicator of these GPUs; the first call opens it, and all processes make it.

    Where `mesh` is only described, to compile for it, nothing is opened, and what was compiled
    cannot run.

    Args:
      mesh: of GPUs.
      axes: names of the mesh axes that are reduced over.
    """
    made = Communicator(mesh, axes)
    made.open()
    return made


class _Local(NamedTuple):
    """A rank of this process: its place among all, and its device."""

    group: int
    rank: int
    device: Any


class Communicator:
    """The ranks along some axes of a mesh of GPUs, as this process sees them.

    One key serves all groups of ranks that reduce among themselves: a call finds its rank by the
    key and its device, which is in one group only.

    Args:
      mesh: of GPUs.
      axes: names of the mesh axes that are reduced over.

    Attributes:
      key: of the communicator, in calls.
      why_not: in a sentence, why it cannot be used; None if it can.
    """

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]):
        self.key = shared_memory.key_of(mesh, axes)
        self.why_not: str | None = None
        self._mesh, self._axes = mesh, axes
        self._groups = shared_memory.groups(mesh, axes)
        self._peers = sorted({device.process_index for device in mesh.devices.flat})
        me = jax.process_index()
        self._local = [
            _Local(group, rank, device)
            for (group, rank), device in np.ndenumerate(self._groups)
            # A device that is only described has no number.
            if device.process_index == me and device.local_hardware_id is not None
        ]
        # XLA's number of a GPU is CUDA's.
        self._ends = [End(self.key, one.device.local_hardware_id) for one in self._local]
        self._arena_bytes = 0
        self._bucket_bytes: dict[int, int] = {}  # of the program being traced, by number

    def open(self) -> None:
        """Allocate, connect and try it, or say `why_not`: the same in all processes."""
        if not self._local:
            self.why_not = gpu_runtime.why_missing()
            return
        try:
            with contextlib.ExitStack() as cleanup:
                cleanup.callback(self._close)
                self._require_one_host()
                self._connect()
                self._try()
                cleanup.pop_all()
                self._tell()
        except UnavailableError as error:
            self.why_not = str(error)

    def _close(self) -> None:
        # All are closed before anything is said, and none frees what others may still write.
        num_kept = sum([gpu_runtime.close_end(end) for end in self._ends])
        if num_kept:
            _log.warning(
                f"memory of {num_kept} GPUs stays taken until this process ends: it was opened to "
                "reduce gradients, that failed, and other GPUs may still write there."
            )

    def reserve(self, bucket_bytes: Mapping[int, int]) -> None:
        """Make room for further buckets of a program; those of number 0 begin one.

        Before the arena grows, all steps in flight are waited for.

        Args:
          bucket_bytes: number of a bucket -> `room_of` it.

        Raises:
          UnavailableError: if there is not so much memory, in any process.
        """
        if 0 in bucket_bytes:
            self._bucket_bytes.clear()
        self._bucket_bytes.update(bucket_bytes)
        wanted = sum(self._bucket_bytes.values())
        if wanted <= self._arena_bytes or not self._local:
            return

        def grow() -> None:
            # One that failed is no longer in flight either; whoever waits for it is told.
            for array in jax.live_arrays(self._mesh.devices.flat[0].platform):
                with contextlib.suppress(RuntimeError, ValueError):
                    array.block_until_ready()
            for end in self._ends:
                gpu_runtime.reserve(end, wanted)

        self._all(f"arena/{wanted}", grow)
        self._arena_bytes = wanted

    def _require_one_host(self) -> None:
        if len(self._peers) > 1:
            if not kv_store.is_open():
                raise UnavailableError(shared_memory.NOT_JOINED)
            if reason := shared_memory.why_on_several(self._room(), self._peers):
                raise UnavailableError(reason)

        def require_gpus() -> None:
            if reason := gpu_runtime.why_missing() or gpu_runtime.why_no_gpus():
                raise RuntimeError(reason.removesuffix("."))

        self._all("library", require_gpus)

    # All have done one stage before any begins the next.
    def _connect(self) -> None:
        num_ranks = self._groups.shape[1]
        found = self._all("topology", lambda: gpu_runtime.topology(num_ranks))
        topology = min(found.values())
        self._arena_bytes = sum(
            room_of([jax.ShapeDtypeStruct((n,), t)]) for t, n in self_test.TRIED
        )

        def open_end(end: End, one: _Local) -> list[Any]:
            gpu_runtime.open_end(
                end,
                device=one.device.local_hardware_id,
                rank=one.rank,
                num_ranks=num_ranks,
                topology=topology,
                arena_bytes=self._arena_bytes,
            )
            return [one.group, one.rank, base64.b64encode(gpu_runtime.export(end)).decode()]

        told = self._all("open", lambda: list(map(open_end, self._ends, self._local)))
        blobs = {
            (group, rank): base64.b64decode(blob)
            for blobs in told.values()
            for group, rank, blob in blobs
        }

        def connect(end: End, one: _Local) -> None:
            gpu_runtime.connect(end, [blobs[one.group, rank] for rank in range(num_ranks)])

        self._all("connect", lambda: list(map(connect, self._ends, self._local)))
        self._all("write", lambda: list(map(gpu_runtime.probe_write, self._ends)))
        self._all("read", lambda: list(map(gpu_runtime.probe_read, self._ends)))

    def _try(self) -> None:
        def require_equal() -> None:
            # In a thread of its own: in this one JAX is tracing a program, and would trace this
            # into it.
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                reason = thread.submit(
                    self_test.difference, self._mesh, self._axes, self.key
                ).result()
            if reason:
                raise RuntimeError(reason)

        self._all("tried", require_equal)

    def _tell(self) -> None:
        plan = gpu_runtime.describe(self._ends[0])
        mib = max(map(gpu_runtime.memory_bytes, self._ends)) / 2**20
        _log.info(
            f"gradients of GPUs are summed by jdp's own code: {plan}; {mib:.0f} MiB of each GPU."
        )

    def _all(self, stage: str, action: Callable[[], Any]) -> dict[int, Any]:
        """Do something in all processes: what it gave in each, once all have done it."""
        value, failure = None, ""
        try:
            value = action()
        except RuntimeError as error:
            failure = str(error).removesuffix(".") or repr(error)
        answers = dict(
            shared_memory.exchanged(f"{self._room()}/{stage}", self._peers, [failure, value])
        )
        for process, (failure, _) in answers.items():
            if failure:
                where = f"in process {process} " if len(self._peers) > 1 else ""
                raise UnavailableError(f"{where}{failure}.")
        return {process: value for process, (_, value) in answers.items()}

    def _room(self) -> str:
        return f"jdp/{self.key}/gpus"


def room_of(bucket: Sequence[Any]) -> int:
    """Return the bytes that a bucket takes of an arena, as `jdp/csrc/cuda` counts them.

    >>> room_of([jax.ShapeDtypeStruct((3,), "float32")] * 20)
    512
    """
    padded = [-(-leaf.size * leaf.dtype.itemsize // 16) * 16 for leaf in bucket]
    return max(-(-sum(padded) // 256) * 256, 256)
