"""Forks of a process that waits in `jdp.init()`, on request of its launcher.

A fork shares the script's imports and data within milliseconds. The launcher sends a request on a
separate socket: the fork's slot and four descriptors (its two sockets, stdout and stderr). The
process forks a child, which forks a grandchild and exits. The launcher, a subreaper, becomes the
grandchild's parent and can wait for it. Then the process answers with the grandchild's pid.
"""

import contextlib
import ctypes
import logging
import os
import random
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

from jdp.worker import source_files

# Set by `jdp.init()`; a script that reads them earlier must not be forked.
_NUMBERS = re.compile(
    rb"[\"'](RANK|LOCAL_RANK|GROUP_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_(ADDR|PORT))[\"']"
)
_reads: list[tuple[str, str]] = []  # ("file:line", name), by any module
_copied: list[str] = []  # names that the latest iteration over os.environ returned

# While forking a training process: `os.register_at_fork` handlers keep their state.
is_forking: ContextVar[bool] = ContextVar("jdp_is_forking", default=False)

_PR_SET_PDEATHSIG = 1
_PR_GET_CHILD_SUBREAPER = 37
_NUM_DESCRIPTORS = 4
_MAPPINGS = "os", "collections.abc", "_collections_abc"

_GPUS = "/dev/nvidia", "/dev/kfd", "/dev/dri"
_DEVICES = frozenset(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))
_REMOVE_FOLDER = getattr(getattr(tempfile.TemporaryDirectory, "_cleanup", None), "__func__", ())

# OpenBLAS's function names by build.
_OPENBLAS = [(prefix, suffix) for prefix in ("", "scipy_") for suffix in ("", "64_")]
_OPENBLAS_HAS_OWN_THREADS = 1  # 2: OpenMP's threads


class _RecordingEnvironment(os._Environ):
    """Records reads of the variables set by `jdp.init()`, except those of a copy."""

    def __getitem__(self, key: str) -> str:
        # A copy asks for an iteration's objects.
        if isinstance(key, str) and not any(key is each for each in _copied):
            if _NUMBERS.fullmatch(f"'{key}'".encode(errors="replace")):
                _record_read(key)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:
        _copied[:] = super().__iter__()
        return iter(tuple(_copied))


def record_reads() -> None:
    """Record reads of ranks until `why_not` asks for them."""
    if type(os.environ) is os._Environ:
        os.environ.__class__ = _RecordingEnvironment


def _record_read(key: str) -> None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in _MAPPINGS:
        frame = frame.f_back
    if frame is not None and not frame.f_globals.get("__name__", "").startswith("jdp."):
        _reads.append((f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}", key))


def why_not(own: Collection[int]) -> str | None:
    """Return why not to fork this process; forks share or replace `own` files."""
    if type(os.environ) is _RecordingEnvironment:
        os.environ.__class__ = os._Environ  # type: ignore[assignment]
    if place := source_files.find_executed(_NUMBERS) or next(iter(_reads), None):
        return f"{place[0]} names {place[1]}, which jdp.init() sets"
    others = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
    if others:
        return f"thread {others[0]!r} runs before jdp.init(), and a fork loses it"
    if (extra := len(os.listdir("/proc/self/task")) - 1) not in _sums(_openblas_threads()):
        return f"threads of a native library, {extra} with OpenBLAS's, run before jdp.init()"
    if any(each is _REMOVE_FOLDER for each in _finalizers()):
        return "a temporary folder exists before jdp.init(), and the first fork to end removes it"
    return _why_not_processes() or _why_not_descriptors(own)


class ForkServer:
    """Forks this process while it waits, on requests."""

    def __init__(self, requests: socket.socket, launcher: int) -> None:
        self.requests = requests
        self._launcher = launcher

    def serve(self) -> tuple[int, socket.socket] | None:
        """Answer one request; return (slot, socket) in the fork, else None."""
        slot, descriptors = self._receive()
        connection, requests, out, err = descriptors
        _flush()
        drawn = random.getstate()  # Python reseeds it
        ours, theirs = os.pipe()
        child = _fork()
        if child:
            for each in (*descriptors, theirs):
                os.close(each)
            answer = os.read(ours, 32)  # empty if the child could not fork
            os.close(ours)
            with contextlib.suppress(ChildProcessError):  # a SIGCHLD handler was faster
                os.waitpid(child, 0)
            self.requests.send(answer or b"0")
            return None
        os.close(ours)
        with _ends_at_error():
            grandchild = _fork()
            if grandchild:
                os.setpgid(grandchild, grandchild)
                os.write(theirs, b"%d" % grandchild)
                os._exit(0)
            os.close(theirs)
            os.setpgid(0, 0)
            self._end_with_launcher()
            os.dup2(out, 1)
            os.dup2(err, 2)
            os.close(out)
            os.close(err)
            self.requests.close()
            self.requests = socket.socket(fileno=requests)
            random.setstate(drawn)
        return int(slot), socket.socket(fileno=connection)

    def _receive(self) -> tuple[bytes, list[int]]:
        slot, descriptors, _, _ = socket.recv_fds(self.requests, 32, _NUM_DESCRIPTORS)
        if not slot:
            raise EOFError
        for each in descriptors:
            os.set_inheritable(each, False)
        return slot, descriptors

    def _end_with_launcher(self) -> None:
        # The signal comes when the parent ends, so wait for the right parent.
        while os.getppid() != self._launcher:
            if not os.path.exists(f"/proc/{self._launcher}"):
                os._exit(1)
            time.sleep(0.0002)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._launcher:
            os._exit(1)


def _why_not_processes() -> str | None:
    if found := children():
        return f"child process {min(found)} runs before jdp.init(), and a fork is not its parent"
    adopts = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0)
    if adopts.value:
        return "this process adopts orphans, but the launcher must become the parent of forks"
    timers = signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF
    if any(signal.getitimer(each)[0] for each in timers):
        return "a timer runs before jdp.init(), and a fork loses it"
    return None


def _why_not_descriptors(own: Collection[int]) -> str | None:
    descriptors = _descriptors()
    ours = {target for number, target in descriptors if number in own}
    # Log handlers append, whatever the position.
    own = {*own, *(each.stream.fileno() for each in _file_handlers() if each.stream is not None)}
    num_free = Counter(_mapped_files())  # descriptors of a mapped file
    for number, target in descriptors:
        if target.startswith(_GPUS):
            return "a GPU is in use before jdp.init()"
        if number in (1, 2) and not target.startswith("pipe:"):
            return f"its output goes to {target}, but that of forks to the launcher"
        # Python keeps a mapped file's descriptor, and never moves its position.
        num_free[target] -= 1
        is_shared = number <= 2 or number in own or target in _DEVICES or num_free[target] >= 0
        if not is_shared:
            return f"{target} is open before jdp.init(), and forks would share its position"
    for target in set(_mapped_files("w", "s")) - ours:
        if target.endswith(" (deleted)") or target.startswith("/memfd:"):
            return (
                "shared memory or a lock of multiprocessing exists before jdp.init(), and forks "
                "would share it"
            )
    return None


# Otherwise each fork would write the buffers.
def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, *_file_handlers()):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def _file_handlers() -> list[logging.FileHandler]:
    handlers = [reference() for reference in getattr(logging, "_handlerList", ())]
    return [each for each in handlers if isinstance(each, logging.FileHandler) and each.mode == "a"]


def _fork() -> int:
    token = is_forking.set(True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which `why_not` checks
        try:
            return os.fork()
        finally:
            is_forking.reset(token)


@contextlib.contextmanager
def _ends_at_error() -> Iterator[None]:
    """A failed fork must never continue the script beside its parent."""
    try:
        yield
    except BaseException:
        os._exit(1)


def _openblas_threads() -> list[int]:
    """Return each OpenBLAS's threads, which stop before a fork and restart on demand."""
    found = []
    for path in {each for each in _mapped_files() if "openblas" in each}:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        for prefix, suffix in _OPENBLAS:
            if hasattr(library, f"{prefix}openblas_get_parallel{suffix}"):
                parallel = getattr(library, f"{prefix}openblas_get_parallel{suffix}")
                number = getattr(library, f"{prefix}openblas_get_num_threads{suffix}")
                if parallel() == _OPENBLAS_HAS_OWN_THREADS:
                    found.append(number() - 1)
                break
    return found


def _sums(numbers: Iterable[int]) -> set[int]:
    sums = {0}
    for number in numbers:
        sums |= {each + number for each in sums}
    return sums


def _mapped_files(*permissions: str) -> list[str]:
    with open("/proc/self/maps") as file:
        parts = [line.rstrip("\n").split(maxsplit=5) for line in file]
    return [each[5] for each in parts if len(each) == 6 and {*permissions} <= {*each[1]}]


def children() -> set[int] | None:
    """Return this process's children, or None on kernels without the list."""
    found: set[int] = set()
    try:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                with open(f"/proc/self/task/{thread}/children") as file:
                    found |= {*map(int, file.read().split())}
    except OSError:
        return None
    return found if os.path.exists("/proc/thread-self/children") else None


def _finalizers() -> list[Any]:
    functions = [each.func for each in getattr(weakref.finalize, "_registry", {}).values()]
    return [getattr(each, "__func__", each) for each in functions]


def _descriptors() -> list[tuple[int, str]]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of listdir
            found.append((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return sorted(found)
