"""The native CUDA library: communicators of GPUs, each seen from the ranks of this process.

Built and loaded without a GPU; what runs on one never ran.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_char_p, c_double, c_int, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any, NamedTuple

from jdp.collectives.shared_library import LIB, Loaded, load, runtime_version

# Of every wait for another rank, until `set_timeout_s`: the same as on CPUs.
TIMEOUT_S = 300.0

PCIE = 0  # of topologies, the one that asks least

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
    """A communicator as one GPU of this process has it.

    Attributes:
      communicator: key, the attribute of XLA's calls.
      ordinal: XLA's number of the device, by which a call finds its rank. On GPUs that is CUDA's
        number among the devices that this process sees: `jax.Device.local_hardware_id`.
    """

    communicator: int
    ordinal: int


_open_ends: list[End] = []


def why_missing() -> str | None:
    """Return in a sentence why there is no CUDA library, or None if there is one.

    The first call loads it and registers its handlers, for which no GPU is needed.
    """
    return _loaded().why_missing


def why_no_gpus() -> str | None:
    """Return in a sentence why this process sees no GPU, or None if it does."""
    num_devices = _functions().jdp_cuda_num_devices()
    if num_devices < 0:
        return f"there are no GPUs that CUDA could use: {_last_error()}."
    return None if num_devices else "CUDA sees no GPU."


def topology(num_ranks: int) -> int:
    """Return what connects the GPUs: 0 PCIe, 1 NVLink.

    Args:
      num_ranks: how many GPUs reduce together. A process that sees fewer, as with
        CUDA_VISIBLE_DEVICES, cannot tell what is between them, and takes it for PCIe.

    Raises:
      RuntimeError: if the driver does not say.
    """
    functions = _functions()
    if functions.jdp_cuda_num_devices() < num_ranks:
        return PCIE
    return _require(functions.jdp_cuda_topology())


def open_end(
    end: End, *, device: int, rank: int, num_ranks: int, topology: int, arena_bytes: int
) -> None:
    """Allocate one rank's memory; `export`, `connect` and the probes follow.

    Args:
      end: which; replaces one that was opened before.
      device: CUDA's number of it.
      rank: among those that reduce together.
      num_ranks: how many these are.
      topology: of all of them, see `topology`.
      arena_bytes: room for the results of all buckets between their start and their done.

    Raises:
      RuntimeError: if there is not enough memory, or the GPU cannot run the kernels.
    """
    functions = _functions()
    _require(functions.jdp_cuda_open(*end, device, rank, num_ranks, topology, arena_bytes))
    _open_ends.append(end)


def close_end(end: End) -> bool:
    """End its waits, and free its memory if no other rank can write there any more.

    Returns:
      Whether its memory stays taken until the process ends; False if it is not open.
    """
    if end not in _open_ends:
        return False
    _open_ends.remove(end)
    return bool(_require(_functions().jdp_cuda_close(*end)))


def export(end: End) -> bytes:
    """Return what the other ranks must know, also those of other processes of the host."""
    functions = _functions()
    blob = ctypes.create_string_buffer(functions.jdp_cuda_blob_bytes())
    _require(functions.jdp_cuda_export(*end, blob))
    return blob.raw


def connect(end: End, blobs: Sequence[bytes]) -> None:
    """Reach the memory of all ranks.

    Args:
      end: of one of them.
      blobs: what they `export`, in their order.

    Raises:
      RuntimeError: if a GPU cannot reach another, or they would not do the same.
    """
    whole = b"".join(blobs)
    _require(_functions().jdp_cuda_import(*end, ctypes.create_string_buffer(whole, len(whole))))


def probe_write(end: End) -> None:
    """Write to all ranks; `probe_read` follows, once all have."""
    _require(_functions().jdp_cuda_probe_write(*end))


def probe_read(end: End) -> None:
    """Look for what all ranks have written; RuntimeError if it is something else."""
    _require(_functions().jdp_cuda_probe_read(*end))


def reserve(end: End, arena_bytes: int) -> None:
    """Make the arena at least so large; RuntimeError if it cannot be, or is in use."""
    _require(_functions().jdp_cuda_reserve(*end, arena_bytes))


def memory_bytes(end: End) -> int:
    """Return what this rank has taken of its GPU's memory."""
    return _functions().jdp_cuda_memory_bytes(*end)


def describe(end: End) -> str:
    """Return in a line which algorithm is taken for which size."""
    return _functions().jdp_cuda_describe(*end).decode()


def set_timeout_s(timeout_s: float) -> None:
    """Set the deadline of every wait for another rank."""
    if (functions := _loaded().functions) is not None:
        functions.jdp_cuda_set_timeout_s(timeout_s)


def check() -> None:
    """Raise a RuntimeError if a reduction of this process's GPUs has failed by now."""
    for end in _open_ends:
        _require(_functions().jdp_cuda_check(*end))


def abort() -> None:
    """End all waits of this process's GPUs, and of those that they reduce with."""
    if _open_ends:
        _functions().jdp_cuda_abort()


def reset() -> None:
    """Forget an abort, failed and unfinished reductions. Nothing may run, in any process."""
    # The second time all kernels have ended that the first one waited for, and write no more.
    for end in 2 * _open_ends:
        _require(_functions().jdp_cuda_reset(*end))


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
