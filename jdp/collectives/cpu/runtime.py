"""The native CPU library, loaded on first use, and the deadlines of both libraries."""

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

_timeout_of_author_s: deque[float] = deque(maxlen=1)  # empty until `set_timeout_s` is called


def why_missing() -> str | None:
    """Return a sentence that says why there is no native library, or None if there is one.

    The first call loads the library and registers its XLA handlers. It does not start a backend.

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
    _timeout_of_author_s.append(timeout_s)
    _functions().jdp_set_timeout_s(timeout_s)
    gpu_runtime.set_timeout_s(timeout_s)


def wait_at_least(seconds: float) -> None:
    """Raise the deadline of every wait for another rank, unless the user called `set_timeout_s`."""
    if not _timeout_of_author_s and seconds > timeout_s():
        _functions().jdp_set_timeout_s(seconds)
        gpu_runtime.set_timeout_s(seconds)


def timeout_s() -> float:
    """Return the deadline of every wait for another rank in this process, in seconds."""
    return _functions().jdp_timeout_s()


def abort(reason: str) -> None:
    """End all waits for other ranks, present and future, until `reset`.

    The waiting ranks on CPUs raise an error with `reason`.
    """
    _functions().jdp_abort(reason.encode())
    gpu_runtime.abort()


def reset() -> None:
    """Forget an abort and failed all-reduces, so that new ones can start.

    After a failed all-reduce, every process that took part must call it once its own calls have
    ended. The order does not matter, and extra calls do no harm: the next all-reduce waits, up to
    its deadline, for the processes that have not called it yet. Compiled steps stay valid. With
    GPUs, all processes must call it before the next all-reduce of any process.

    Raises:
      OSError: if there is no memory for a new segment.
      RuntimeError: if there is no native library.
    """
    functions = _functions()
    if functions.jdp_reset():
        raise OSError(functions.jdp_last_error().decode())
    gpu_runtime.reset()


def check() -> None:
    """Raise a RuntimeError that names the missing rank if an all-reduce between GPUs has failed.

    Gradients since then are NaN. On CPUs, the call itself fails.
    """
    gpu_runtime.check()


class Segment(NamedTuple):
    """Memory that one process of a host created for all of them, as numbers that open it."""

    pid: int
    file: int
    nonce: int


def create_segment(num_ranks: int) -> Segment:
    """Create memory through which `num_ranks` ranks, of several processes of this host, reduce.

    The memory is anonymous, and freed with the last process that uses it. Every process, this one
    included, must `attach` it.
    """
    functions, nonce = _functions(), ctypes.c_uint64()
    file = functions.jdp_segment_create(num_ranks, ctypes.byref(nonce))
    if file < 0:
        raise OSError(functions.jdp_last_error().decode())
    return Segment(os.getpid(), file, nonce.value)


def attach(
    communicator: int, group: int, num_ranks: int, local_ranks: Sequence[int], segment: Segment
) -> None:
    """Attach a segment, which the all-reduces of this process's ranks then use.

    Args:
      group: number of a group of ranks of the communicator. Each group has its own segment.
      local_ranks: the ranks of this process, from 0 to num_ranks - 1.
    """
    functions, ranks = _functions(), (ctypes.c_int32 * len(local_ranks))(*local_ranks)
    if functions.jdp_communicator_attach(
        communicator, group, num_ranks, ranks, len(ranks), segment.pid, segment.file, segment.nonce
    ):
        raise OSError(functions.jdp_last_error().decode())


def target(name: str, *, beside_xla: bool) -> str:
    """Return the XLA target of a call.

    Args:
      beside_xla: whether XLA's own collectives may run at the same time. The call then blocks one
        of jdp's threads and none of XLA's, which takes some microseconds longer.
    """
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
