"""The native CUDA library, as this process's ranks see it.

It ran on one GPU, with one process and several, never between GPUs.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_char_p, c_double, c_int, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any, NamedTuple

from jdp.collectives.shared_library import LIB, Loaded, load, runtime_version

# The deadline until `set_timeout_s`, the same as on CPUs.
TIMEOUT_S = 300.0

PCIE = 0  # what every GPU has

_PATH = LIB / "libjdp_cuda.so"
_HANDLERS = {
    name: {"initialize": "jdp_ring_initialize", "execute": name}
    for name in ("jdp_ring_start", "jdp_ring_done")
}
_OF_END = (c_int64, c_int32)  # communicator, ordinal
_SIGNATURES = {
    "jdp_cuda_num_devices": (c_int,),
    "jdp_cuda_topology": (c_int,),
    "jdp_cuda_open": (c_int, *_OF_END, c_int32, c_int32, c_int32, c_int32, c_int64),
    "jdp_cuda_close": (c_int, *_OF_END),
    "jdp_cuda_blob_bytes": (c_int64,),
    "jdp_cuda_export": (c_int, *_OF_END, c_void_p),
    "jdp_cuda_import": (c_int, *_OF_END, c_void_p),
    "jdp_cuda_probe_write": (c_int, *_OF_END),
    "jdp_cuda_probe_read": (c_int, *_OF_END),
    "jdp_cuda_reserve": (c_int, *_OF_END, c_int64),
    "jdp_cuda_memory_bytes": (c_int64, *_OF_END),
    "jdp_cuda_describe": (c_char_p, *_OF_END),
    "jdp_cuda_set_timeout_s": (None, c_double),
    "jdp_cuda_check": (c_int, *_OF_END),
    "jdp_cuda_abort": (None,),
    "jdp_cuda_reset": (c_int, *_OF_END),
    "jdp_cuda_last_error": (c_char_p,),
}


class End(NamedTuple):
    """One rank of a communicator, on a GPU of this process.

    Attributes:
      ordinal: XLA's device number, by which a call finds its rank: CUDA's among visible devices,
        `jax.Device.local_hardware_id`.
    """

    communicator: int
    ordinal: int

    def call(self, function: str, *args: Any) -> int:
        """Call a function of `jdp/csrc/cuda/c_api.h` for this rank."""
        return _require(getattr(_functions(), f"jdp_cuda_{function}")(*self, *args))

    def open(self, rank: int, num_ranks: int, topology: int, arena_bytes: int) -> None:
        """Allocate this rank's memory; replaces an equal end."""
        self.call("open", self.ordinal, rank, num_ranks, topology, arena_bytes)
        _open_ends.append(self)

    def close(self) -> bool:
        """End its waits; free its memory, or return that other ranks may still write there."""
        if self not in _open_ends:
            return False
        _open_ends.remove(self)
        return bool(self.call("close"))

    def export(self) -> bytes:
        """Return bytes with which ranks in any process open its memory."""
        blob = ctypes.create_string_buffer(_functions().jdp_cuda_blob_bytes())
        self.call("export", blob)
        return blob.raw

    def connect(self, blobs: Sequence[bytes]) -> None:
        """Open all ranks' memory, given their `export` in rank order."""
        joined = b"".join(blobs)
        self.call("import", ctypes.create_string_buffer(joined, len(joined)))

    def algorithms(self) -> str:
        """Return a line with the algorithm per range of sizes."""
        return _functions().jdp_cuda_describe(*self).decode()


_open_ends: list[End] = []


def why_missing() -> str | None:
    """Return why the CUDA library is missing; loads it, without a GPU."""
    return _loaded().why_missing


def why_no_gpus() -> str | None:
    """Return why this process sees no GPU."""
    num_devices = _functions().jdp_cuda_num_devices()
    if num_devices < 0:
        return f"CUDA found no usable GPU: {_last_error()}."
    return None if num_devices else "CUDA sees no GPU."


def topology(num_ranks: int) -> int:
    """Return how GPUs that reduce together connect: 0 PCIe (or not all are visible), 1 NVLink."""
    functions = _functions()
    if functions.jdp_cuda_num_devices() < num_ranks:
        return PCIE
    return _require(functions.jdp_cuda_topology())


def set_timeout_s(timeout_s: float) -> None:
    """Set the deadline of every wait for another rank."""
    if (functions := _loaded().functions) is not None:
        functions.jdp_cuda_set_timeout_s(timeout_s)


def check() -> None:
    """Raise a RuntimeError if a reduction has failed by now."""
    for end in _open_ends:
        end.call("check")


def abort() -> None:
    """End all waits of this process's GPUs, and of their peers."""
    if _open_ends:
        _functions().jdp_cuda_abort()


def reset() -> None:
    """Clear an abort, and failed and unfinished reductions, while all processes are idle."""
    # The first round waits for all kernels, so none writes after the second clears.
    for end in 2 * _open_ends:
        end.call("reset")


def _require(result: int) -> int:
    if result < 0:
        raise RuntimeError(_last_error())
    return result


def _last_error() -> str:
    return _functions().jdp_cuda_last_error().decode()


@cache
def _loaded() -> Loaded:
    loaded = load(_PATH, _SIGNATURES, _HANDLERS, "CUDA", runtime_version())
    if loaded.functions is not None:
        loaded.functions.jdp_cuda_set_timeout_s(TIMEOUT_S)
    return loaded


def _functions() -> Any:
    return _loaded().required()
