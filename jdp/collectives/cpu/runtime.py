"""The native CPU library, loaded on first use, and deadlines."""

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
REDUCE_SCATTER, ALL_GATHER = "jdp_reduce_scatter", "jdp_all_gather"
ALL_TO_ALL = "jdp_all_to_all"
TARGETS = TARGET, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL
COPY_OUT = "jdp_copy_out"  # waits for no rank
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

_timeout_of_author_s: deque[float] = deque(maxlen=1)  # empty until `set_timeout_s`


def why_missing() -> str | None:
    """Return why the native library is missing; loads it without a backend."""
    return _loaded().why_missing


def set_timeout_s(timeout_s: float) -> None:
    """Set the deadline of every wait for another rank in this process; initially 300 s.

    Args:
      timeout_s: seconds, > 0.

    Raises:
      ValueError: `timeout_s` is not positive.
      RuntimeError: there is no native library.
    """
    if not timeout_s > 0:
        raise ValueError(
            f"timeout_s={timeout_s} must be positive: every wait for another rank would end at "
            "once. Write the seconds after which a silent rank counts as lost, such as 30."
        )
    _timeout_of_author_s.append(timeout_s)
    _functions().jdp_set_timeout_s(timeout_s)
    gpu_runtime.set_timeout_s(timeout_s)


def wait_at_least(seconds: float) -> None:
    """Raise the deadline for other ranks, unless the user has set it."""
    if not _timeout_of_author_s and seconds > timeout_s():
        _functions().jdp_set_timeout_s(seconds)
        gpu_runtime.set_timeout_s(seconds)


def timeout_s() -> float:
    """Return the deadline of every wait for another rank."""
    return _functions().jdp_timeout_s()


def abort(reason: str) -> None:
    """End all waits for other ranks, until `reset`."""
    _functions().jdp_abort(reason.encode())
    gpu_runtime.abort()


def reset() -> None:
    """Clear an abort and failed all-reduces, so new ones can start.

    After a failed all-reduce, every process that took part must call it once its own calls have
    ended. The order does not matter, and extra calls do no harm: the next all-reduce waits, up to
    its deadline, for processes that have not called it yet. Compiled steps stay valid. With GPUs,
    all processes must call it before any process's next all-reduce.

    Raises:
      OSError: there is no memory for a new segment.
      RuntimeError: there is no native library.
    """
    functions = _functions()
    if functions.jdp_reset():
        raise OSError(functions.jdp_last_error().decode())
    gpu_runtime.reset()


def check() -> None:
    """Raise a RuntimeError naming the missing rank if a GPU all-reduce failed, which makes NaN."""
    gpu_runtime.check()


class Segment(NamedTuple):
    """Shared memory that one process created, as numbers that open it."""

    pid: int
    file: int
    nonce: int


def create_segment(num_ranks: int) -> Segment:
    """Create anonymous memory for this host's ranks; every process must `attach` it."""
    functions, nonce = _functions(), ctypes.c_uint64()
    file = functions.jdp_segment_create(num_ranks, ctypes.byref(nonce))
    if file < 0:
        raise OSError(functions.jdp_last_error().decode())
    return Segment(os.getpid(), file, nonce.value)


def attach(
    communicator: int, group: int, num_ranks: int, local_ranks: Sequence[int], segment: Segment
) -> None:
    """Attach a `group`'s segment for this process's `local_ranks`."""
    functions, ranks = _functions(), (ctypes.c_int32 * len(local_ranks))(*local_ranks)
    if functions.jdp_communicator_attach(
        communicator, group, num_ranks, ranks, len(ranks), segment.pid, segment.file, segment.nonce
    ):
        raise OSError(functions.jdp_last_error().decode())


def target(name: str, *, beside_xla: bool) -> str:
    """Return a call's XLA target; `beside_xla` blocks a jdp thread, microseconds slower."""
    return f"{name}_start" if beside_xla else name


@cache
def _loaded() -> Loaded:
    names = [target(name, beside_xla=flag) for name in TARGETS for flag in (False, True)]
    handlers = {name: {"execute": name} for name in [*names, COPY_OUT]}
    loaded = load(_PATH, _SIGNATURES, handlers, "cpu", _runtime_version())
    if loaded.functions is not None:
        loaded.functions.jdp_set_progress(progress.native_numbers())
    return loaded


def _functions() -> Any:
    return _loaded().required()
