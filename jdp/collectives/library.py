"""The native CPU library: found, checked, loaded and registered, once and not before it is used."""

import ctypes
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax

TARGET = "jdp_all_reduce"
_PATH = Path(__file__).parent.parent / "lib" / "libjdp_cpu.so"


def why_missing() -> str | None:
    """Say in a sentence why there is no native library, or None if there is one.

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
    _functions().jdp_set_timeout_s(timeout_s)


def timeout_s() -> float:
    """Give the deadline of every wait for another rank in this process, in seconds."""
    return _functions().jdp_timeout_s()


def abort(reason: str) -> None:
    """End all waits for other ranks, present and future, until `reset`.

    Args:
      reason: what the errors of the waiting ranks say.

    Raises:
      RuntimeError: if there is no native library.
    """
    _functions().jdp_abort(reason.encode())


def reset() -> None:
    """Forget an abort and failed all-reduces, and leave all communicators.

    No all-reduce may be running.

    Raises:
      RuntimeError: if there is no native library.
    """
    _functions().jdp_reset()


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


class _Loaded(NamedTuple):
    functions: ctypes.CDLL | None
    why_missing: str | None


@cache
def _loaded() -> _Loaded:
    if not _PATH.exists():
        reason = _PATH.with_suffix(".txt")  # what the build wrote
        why = reason.read_text().strip() if reason.exists() else "install jdp with pip"
        return _Loaded(None, f"{_PATH.name} was not built: {why}.")
    try:
        functions = ctypes.CDLL(str(_PATH))
    except OSError as error:
        return _Loaded(None, f"{_PATH.name} does not load: {error}.")
    # XLA would refuse a handler that is newer than itself together with the whole CPU backend.
    built_with, runtime = divmod(functions.jdp_ffi_api_version(), 1000), _runtime_version()
    if runtime is None or built_with[0] != runtime[0] or built_with > runtime:
        return _Loaded(
            None,
            f"{_PATH.name} was built with version {built_with} of XLA's FFI, and this jaxlib has "
            f"{runtime}: install jdp again with this jaxlib, or with jaxlib 0.10.2's headers.",
        )
    functions.jdp_set_timeout_s.argtypes = [ctypes.c_double]
    functions.jdp_set_timeout_s.restype = None
    functions.jdp_timeout_s.restype = ctypes.c_double
    functions.jdp_abort.argtypes = [ctypes.c_char_p]
    functions.jdp_abort.restype = None
    functions.jdp_reset.restype = None
    functions.jdp_last_error.restype = ctypes.c_char_p
    functions.jdp_segment_create.argtypes = [ctypes.c_int32, ctypes.POINTER(ctypes.c_uint64)]
    functions.jdp_communicator_attach.argtypes = [
        *(ctypes.c_int64, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32)),
        *(ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_uint64),
    ]
    handler = jax.ffi.pycapsule(functions.jdp_all_reduce)
    jax.ffi.register_ffi_target(TARGET, handler, platform="cpu")
    return _Loaded(functions, None)


# The (major, minor) version of XLA's FFI in the installed jaxlib, as its headers tell.
def _runtime_version() -> tuple[int, int] | None:
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    if not header.exists():
        return None
    text = header.read_text()
    major = re.search(r"#define XLA_FFI_API_MAJOR (\d+)", text)
    minor = re.search(r"#define XLA_FFI_API_MINOR (\d+)", text)
    return (int(major[1]), int(minor[1])) if major and minor else None


def _functions() -> ctypes.CDLL:
    functions, why = _loaded()
    if functions is None:
        raise RuntimeError(f"{why} jdp.collectives.xla needs no library.")
    return functions
