"""The native CPU library, and the waits of both libraries: loaded not before they are used."""

import ctypes
import os
from collections import deque
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from typing import Any, NamedTuple

from jdp.collectives.gpu import runtime as gpu_runtime
from jdp.collectives.shared_library import LIB, Loaded, load
from jdp.collectives.shared_library import runtime_version as _runtime_version
from jdp.worker import progress

TARGET = "jdp_all_reduce"
_PATH = LIB / "libjdp_cpu.so"
_SIGNATURES = {
    "jdp_set_timeout_s": (None, c_double),
    "jdp_timeout_s": (c_double,),
    "jdp_abort": (None, c_char_p),
    "jdp_reset": (c_int,),
    "jdp_last_error": (c_char_p,),
    "jdp_set_progress": (None, c_void_p),
    "jdp_segment_create": (c_int, c_int32, POINTER(c_uint64)),
    "jdp_communicator_attach": (
        *(c_int, c_int64, c_int32, c_int32, POINTER(c_int32)),
        *(c_int32, c_int32, c_int32, c_uint64),
    ),
}


_told_s: deque[float] = deque(maxlen=1)  # the deadline that the author set, if any


def why_missing() -> str | None:
    """Return in a sentence why there is no native library, or None if there is one.

    The library is loaded and its XLA handler is registered by the first call; no backend is
    started.

    >>> why_missing() is None or why_missing().endswith(".")
    True
    """
    return _loaded().why_missing


def set_timeout_s(timeout_s: float) -> None:
    """Set the deadline of every wait for another rank in this process; 300 to begin with.

    Args:
      timeout_s: seconds, > 0.

    Raises:
      ValueError: if `timeout_s` is not positive.
      RuntimeError: if there is no native library.
    """
    if not timeout_s > 0:
        raise ValueError(
            f"timeout_s={timeout_s} would end every wait for another rank before it begins. "
            "Write the seconds after which a silent rank counts as missing, such as 30."
        )
    _told_s.append(timeout_s)
    _functions().jdp_set_timeout_s(timeout_s)
    gpu_runtime.set_timeout_s(timeout_s)


def wait_at_least(seconds: float) -> None:
    """Raise the deadline of every wait for another rank, unless `set_timeout_s` was called.

    Args:
      seconds: > 0.
    """
    if not _told_s and seconds > timeout_s():
        _functions().jdp_set_timeout_s(seconds)
        gpu_runtime.set_timeout_s(seconds)


def timeout_s() -> float:
    """Return the deadline of every wait for another rank in this process, in seconds."""
    return _functions().jdp_timeout_s()


def abort(reason: str) -> None:
    """End all waits for other ranks, present and future, until `reset`.

    Args:
      reason: what the errors of the waiting ranks say; those of GPUs say that they were told to.

    Raises:
      RuntimeError: if there is no native library.
    """
    _functions().jdp_abort(reason.encode())
    gpu_runtime.abort()


def reset() -> None:
    """Forget an abort and failed all-reduces, so that the next ones start afresh.

    After a failed all-reduce every process that took part must call it, once its own calls have
    ended. The order does not matter, nor does an extra call: the next all-reduce waits, up to its
    deadline, for the processes that have not called it yet. Compiled steps stay valid. For GPUs all
    processes must call it before the next all-reduce of any of them.

    Raises:
      OSError: if there is no memory for a new start.
      RuntimeError: if there is no native library.
    """
    functions = _functions()
    if functions.jdp_reset():
        raise OSError(functions.jdp_last_error().decode())
    gpu_runtime.reset()


def check() -> None:
    """Find out whether an all-reduce of GPUs has failed by now; on CPUs its own call fails.

    Raises:
      RuntimeError: if one has, with the rank that did not come. Gradients since then are NaN.
    """
    gpu_runtime.check()


class Segment(NamedTuple):
    """Where processes of one host find the memory that one of them made; plain numbers to send."""

    pid: int
    file: int
    nonce: int


def create_segment(num_ranks: int) -> Segment:
    """Make memory that the ranks of several processes of this host reduce through.

    It is anonymous, and ends with the last process that uses it. Every process, this one
    included, must `attach` it.

    Args:
      num_ranks: ranks of the communicator, over all processes, >= 1.

    Raises:
      OSError: if the system gives no such memory.
      RuntimeError: if there is no native library.
    """
    functions, nonce = _functions(), ctypes.c_uint64()
    file = functions.jdp_segment_create(num_ranks, ctypes.byref(nonce))
    if file < 0:
        raise OSError(functions.jdp_last_error().decode())
    return Segment(os.getpid(), file, nonce.value)


def attach(
    communicator: int, group: int, num_ranks: int, local_ranks: Sequence[int], segment: Segment
) -> None:
    """Let all-reduces of this process's ranks go through a segment.

    Args:
      communicator: key of the communicator, not 0; the handler's attribute.
      group: which of the communicator's groups of ranks, each with a segment of its own.
      num_ranks: as the segment was made for.
      local_ranks: the ranks of this process, from 0 to num_ranks - 1.
      segment: of any process of this host.

    Raises:
      OSError: if the segment cannot be opened from here, or is another one by now.
      RuntimeError: if there is no native library.
    """
    functions, ranks = _functions(), (ctypes.c_int32 * len(local_ranks))(*local_ranks)
    if functions.jdp_communicator_attach(
        communicator, group, num_ranks, ranks, len(ranks), segment.pid, segment.file, segment.nonce
    ):
        raise OSError(functions.jdp_last_error().decode())


@cache
def _loaded() -> Loaded:
    loaded = load(_PATH, _SIGNATURES, {TARGET: {"execute": TARGET}}, "cpu", _runtime_version())
    if loaded.functions is not None:
        loaded.functions.jdp_set_progress(progress.native_numbers())
    return loaded


def _functions() -> Any:
    return _loaded().required()
