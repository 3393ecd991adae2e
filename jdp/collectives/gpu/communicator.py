"""Connects GPUs of one host, and tests a first reduction; `runtime.py` says where it ran."""

import base64
import concurrent.futures
import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdp.collectives.cpu import shared_memory
from jdp.collectives.gpu import runtime as gpu_runtime
from jdp.collectives.gpu.runtime import End
from jdp.collectives.gpu.start_done import pairs
from jdp.collectives.xla import xla
from jdp.distributed import agree, kv_store

# The test compares a reduction with lax.psum. XLA must be able to load a matmul beside it, while it
# waits.


# (dtype, size), at least one per algorithm of jdp/csrc/cuda/plan.cc. Values count up to the
# modulus, so all sums are exact.
TRIED = (("bfloat16", 1001), ("float32", 3), ("float32", 300_001), ("float32", 4_300_001))
_MODULUS = {"bfloat16": 7, "float32": 251}
_WIDTH = 512  # of the matmul


def self_test_difference(mesh: Mesh, axes: tuple[str, ...], key: int) -> str:
    """Return how sums of known numbers differ from lax.psum's, or ""."""
    try:
        compared = jax.block_until_ready(comparison(mesh, axes, key)())
    except (RuntimeError, ValueError) as error:  # JAX raises either for a failed run
        return f"the first reduction failed ({error})"
    *of_buckets, of_matmul = compared
    for (dtype, size), of_bucket in zip(TRIED, of_buckets, strict=True):
        what = f"of {size} sums of {dtype} on {{}} differ from lax.psum"
        if reason := _reason(what, of_bucket):
            return reason
    what = f"of {_WIDTH**2} elements of a concurrent matmul on {{}} are wrong"
    return _reason(what, of_matmul)


def comparison(mesh: Mesh, axes: tuple[str, ...], key: int) -> Any:
    """Jit the self-test: `[ranks, 2]` float32, wrong values and largest error, of each bucket."""

    def on_rank() -> list[jax.Array]:
        place = lax.axis_index(mesh.axis_names)
        buckets = [[_values(place, dtype, size)] for dtype, size in TRIED]
        numbers = range(len(buckets))
        products = []

        def between(tokens: list[jax.Array]) -> list[jax.Array]:
            # Integers below 8 with sums below 2^24 are exact on every unit that multiplies.
            a = jnp.tile(jnp.arange(8, dtype=jnp.float32), (_WIDTH, _WIDTH // 8))
            a, tokens = lax.optimization_barrier((a, tokens))
            product, tokens = lax.optimization_barrier((a.T @ a, tokens))
            products.append(product)
            return tokens

        ours = pairs(buckets, axes, scale=0.5, numbers=numbers, communicator=key, between=between)
        theirs = xla(buckets, axes, scale=0.5)
        row = jnp.arange(_WIDTH) % 8
        expected = _WIDTH * row[:, None] * row[None, :]
        compared = [_compared(a, b) for [a], [b] in zip(ours, theirs, strict=True)]
        return [*compared, _compared(products[0], expected)]

    return jax.jit(
        jax.shard_map(
            on_rank, mesh=mesh, in_specs=(), out_specs=P(mesh.axis_names), check_vma=False
        )
    )


def _reason(what: str, differences: jax.Array) -> str:
    for shard in differences.addressable_shards:
        num_wrong, largest = np.asarray(shard.data)[0]
        if num_wrong:
            return f"{num_wrong:.0f} {what.format(shard.device)}, by up to {largest:g}"
    return ""


def _values(place: jax.Array, dtype: str, size: int) -> jax.Array:
    return ((jnp.arange(size) * 3 + place * 5) % _MODULUS[dtype]).astype(dtype)


def _compared(ours: jax.Array, theirs: jax.Array) -> jax.Array:
    apart = jnp.abs(ours.astype(jnp.float32) - theirs.astype(jnp.float32))
    return jnp.stack([jnp.sum(apart != 0, dtype=jnp.float32), jnp.max(apart)])[None]


_log = logging.getLogger("jdp")


class UnavailableError(Exception):
    """These GPUs cannot reduce together; equal on all processes."""


@functools.cache
def communicator(mesh: Mesh, axes: tuple[str, ...]) -> "Communicator":
    """Return a GPU mesh's communicator along `axes`; all processes make the first call."""
    made = Communicator(mesh, axes)
    made.open()
    return made


class Communicator:
    """This process's ranks along axes of a GPU mesh; a call finds its rank by key and device."""

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]):
        self.key = shared_memory.key_of(mesh, axes)
        self.why_not: str | None = None
        self._mesh, self._axes = mesh, axes
        self._groups = shared_memory.groups(mesh, axes)
        self._peers = tuple(sorted({device.process_index for device in mesh.devices.flat}))
        me = jax.process_index()
        # Rank -> (group, rank). XLA and CUDA number the GPUs equally.
        self._ends = {
            End(self.key, device.local_hardware_id): place
            for place, device in np.ndenumerate(self._groups)
            # A described device has no number.
            if device.process_index == me and device.local_hardware_id is not None
        }
        self._arena_bytes = 0
        self._bucket_bytes: dict[int, int] = {}  # of the traced program, by number

    def open(self) -> None:
        """Allocate, connect and test, or set `why_not`; equal in all processes."""
        if not self._ends:
            self.why_not = gpu_runtime.why_missing()
            return
        try:
            with contextlib.ExitStack() as cleanup:
                cleanup.callback(self._close)
                self._require_one_host()
                self._connect()
                self._test()
                cleanup.pop_all()
                self._log()
        except UnavailableError as error:
            self.why_not = str(error)

    def _close(self) -> None:
        num_kept = sum([end.close() for end in self._ends])
        if num_kept:
            _log.warning(
                f"memory of {num_kept} GPUs stays allocated until this process ends: opening it "
                "for gradient reductions failed, and other GPUs may still write there."
            )

    def reserve(self, bucket_bytes: Mapping[int, int]) -> None:
        """Reserve memory for buckets, number -> `room_of`; number 0 starts a program."""
        if 0 in bucket_bytes:
            self._bucket_bytes.clear()
        self._bucket_bytes.update(bucket_bytes)
        wanted = sum(self._bucket_bytes.values())
        if wanted <= self._arena_bytes or not self._ends:
            return

        def grow() -> None:
            # A failed step is not in flight; its reader gets the error.
            for array in jax.live_arrays(self._mesh.devices.flat[0].platform):
                with contextlib.suppress(RuntimeError, ValueError):
                    array.block_until_ready()
            for end in self._ends:
                end.call("reserve", wanted)

        self._all("made room for its buckets", grow)
        self._arena_bytes = wanted

    def _require_one_host(self) -> None:
        if len(self._peers) > 1:
            if not kv_store.is_open():
                raise UnavailableError(shared_memory.NOT_JOINED)
            if reason := shared_memory.why_on_several(self._peers):
                raise UnavailableError(reason)

        def require_gpus() -> None:
            if reason := gpu_runtime.why_missing() or gpu_runtime.why_no_gpus():
                raise RuntimeError(reason.removesuffix("."))

        self._all("looked for GPUs", require_gpus)

    # All processes finish a stage before the next.
    def _connect(self) -> None:
        num_ranks = self._groups.shape[1]
        found = self._all(
            "looked up how its GPUs are connected", lambda: gpu_runtime.topology(num_ranks)
        )
        topology = min(found.values())
        self._arena_bytes = sum(room_of([jax.ShapeDtypeStruct((n,), t)]) for t, n in TRIED)

        def open_end(end: End) -> list[Any]:
            group, rank = self._ends[end]
            end.open(rank, num_ranks, topology, self._arena_bytes)
            return [group, rank, base64.b64encode(end.export()).decode()]

        exported = self._all("opened memory of its GPUs", lambda: [*map(open_end, self._ends)])
        blobs = {
            (group, rank): base64.b64decode(blob)
            for blobs in exported.values()
            for group, rank, blob in blobs
        }

        def connect(end: End) -> None:
            group, _ = self._ends[end]
            end.connect([blobs[group, rank] for rank in range(num_ranks)])

        self._all("connected its GPUs", lambda: [*map(connect, self._ends)])
        for doing, probe in (
            ("wrote to other GPUs", "probe_write"),
            ("read what other GPUs wrote", "probe_read"),
        ):
            self._all(doing, lambda probe=probe: [end.call(probe) for end in self._ends])

    def _test(self) -> None:
        def require_equal() -> None:
            # This one traces a program that would include the test.
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                reason = thread.submit(
                    self_test_difference, self._mesh, self._axes, self.key
                ).result()
            if reason:
                raise RuntimeError(reason)

        self._all("tried a reduction of GPUs", require_equal)

    def _log(self) -> None:
        plan = next(iter(self._ends)).algorithms()
        mib = max(end.call("memory_bytes") for end in self._ends) / 2**20
        _log.info(
            f"gradients of GPUs are summed by jdp's kernels: {plan}; {mib:.0f} MiB of each GPU."
        )

    def _all(self, doing: str, action: Callable[[], Any]) -> dict[int, Any]:
        """Call `action` in all processes; return their results once all have ended."""
        value, failure = None, ""
        with agree.propagating_errors(self._peers, f"while it {doing}"):
            try:
                value = action()
            except RuntimeError as error:
                failure = str(error).removesuffix(".") or repr(error)
        answers = agree.all_gather(self._peers, [failure, value], what=f"how each {doing}")
        for process, (failure, _) in answers.items():
            if failure:
                where = f"in process {process} " if len(self._peers) > 1 else ""
                raise UnavailableError(f"{where}{failure}.")
        return {process: value for process, (_, value) in answers.items()}


def room_of(bucket: Sequence[Any]) -> int:
    """Return a bucket's bytes in an arena, as `jdp/csrc/cuda` counts them."""
    padded = [-(-leaf.size * leaf.dtype.itemsize // 16) * 16 for leaf in bucket]
    return max(-(-sum(padded) // 256) * 256, 256)
