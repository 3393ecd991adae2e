"""Forks of a process that waits in `jdp.init()`, on request of its launcher.

A fork shares the imports and the data of the script after milliseconds.

The launcher sends a request to a waiting process on a socket of its own: the slot of the fork, and
four descriptors, for the two sockets of the fork, its standard output and its standard error. The
process forks a child, which forks a grandchild and ends. So the launcher, which is a subreaper,
becomes the parent of the grandchild, can wait for it, and learns its exit code. The answer to the
request is sent after that, and is the pid of the grandchild.
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
from typing import Any

from jdp.worker import source_files

# Variables that a script finds before `jdp.init()`, different ones in each process.
_NUMBERS = re.compile(
    rb"[\"'](RANK|LOCAL_RANK|GROUP_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_(ADDR|PORT))[\"']"
)

# Whether a fork is made that will train: handlers of `os.register_at_fork` keep its state.
is_forking: ContextVar[bool] = ContextVar("jdp_is_forking", default=False)

_PR_SET_PDEATHSIG = 1
_PR_GET_CHILD_SUBREAPER = 37
_NUM_DESCRIPTORS = 4

_GPUS = "/dev/nvidia", "/dev/kfd", "/dev/dri"
_DEVICES = frozenset(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))
_REMOVE_FOLDER = getattr(getattr(tempfile.TemporaryDirectory, "_cleanup", None), "__func__", ())

# Prefixes and suffixes of the functions in the builds of OpenBLAS.
_OPENBLAS = [(prefix, suffix) for prefix in ("", "scipy_") for suffix in ("", "64_")]
_OPENBLAS_HAS_OWN_THREADS = 1  # of openblas_get_parallel; 2: it uses those of OpenMP


def why_not(own: Collection[int]) -> str | None:
    """Return a sentence that says why this process must not be forked, None if it can be.

    Args:
      own: descriptors that every fork shares or replaces.
    """
    if place := source_files.find_executed(_NUMBERS):
        return f"{place[0]} names {place[1]}, which jdp.init() sets"
    others = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
    if others:
        return f"thread {others[0]!r} runs before jdp.init(), and a fork does not have it"
    if (extra := len(os.listdir("/proc/self/task")) - 1) not in _sums(_openblas_threads()):
        return f"threads of a native library, {extra} with OpenBLAS's, run before jdp.init()"
    if any(each is _REMOVE_FOLDER for each in _finalizers()):
        return "a temporary folder exists before jdp.init(), and the first fork to end removes it"
    return _why_not_processes() or _why_not_descriptors(own)


class ForkServer:
    """Forks this process while it waits.

    Args:
      requests: a socket to the launcher, for packets.
      launcher: pid of the launcher.
    """

    def __init__(self, requests: socket.socket, launcher: int) -> None:
        self.requests = requests
        self._launcher = launcher

    def serve(self) -> tuple[int, socket.socket] | None:
        """Answer one request; return slot and socket of a fork in the fork, None in its parent."""
        slot, descriptors = self._receive()
        connection, requests, out, err = descriptors
        _flush()
        drawn = random.getstate()  # Python seeds it anew in a fork
        ours, theirs = os.pipe()
        child = _fork()
        if child:
            for each in (*descriptors, theirs):
                os.close(each)
            answer = os.read(ours, 32)  # empty if the child could not fork
            os.close(ours)
            with contextlib.suppress(ChildProcessError):  # a handler of SIGCHLD was faster
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
        # The signal comes when the parent ends, so the launcher must be the parent by now.
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
        return "this process adopts orphans, and the launcher must become the parent of forks"
    timers = signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF
    if any(signal.getitimer(each)[0] for each in timers):
        return "a timer runs before jdp.init(), and a fork does not have it"
    return None


def _why_not_descriptors(own: Collection[int]) -> str | None:
    descriptors = _descriptors()
    ours = {target for number, target in descriptors if number in own}
    # Each line of a log is appended, wherever the position is.
    own = {*own, *(each.stream.fileno() for each in _file_handlers() if each.stream is not None)}
    num_free = Counter(_mapped_files())  # descriptors of a file that may be open
    for number, target in descriptors:
        if target.startswith(_GPUS):
            return "a GPU is in use before jdp.init()"
        if number in (1, 2) and not target.startswith("pipe:"):
            return f"its output goes to {target}, and that of forks to the launcher"
        # Python keeps a descriptor of memory that it maps, and never moves its position.
        num_free[target] -= 1
        is_shared = number <= 2 or number in own or target in _DEVICES or num_free[target] >= 0
        if not is_shared:
            return f"{target} is open before jdp.init(), and forks would share its position"
    for target in set(_mapped_files("w", "s")) - ours:
        if target.endswith(" (deleted)") or target.startswith("/memfd:"):
            return (
                "shared memory or a lock of multiprocessing exists before jdp.init(), and forks "
                "would have it in common"
            )
    return None


# Or each fork would write what is buffered.
def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, *_file_handlers()):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def _file_handlers() -> list[logging.FileHandler]:
    """Return the handlers of `logging` that append to a file."""
    handlers = [reference() for reference in getattr(logging, "_handlerList", ())]
    return [each for each in handlers if isinstance(each, logging.FileHandler) and each.mode == "a"]


def _fork() -> int:
    token = is_forking.set(True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of JAX and Python: `why_not` knows the threads
        try:
            return os.fork()
        finally:
            is_forking.reset(token)


@contextlib.contextmanager
def _ends_at_error() -> Iterator[None]:
    """End this fork at an error: it must not continue with the script beside its parent."""
    try:
        yield
    except BaseException:
        os._exit(1)


def _openblas_threads() -> list[int]:
    """Return how many threads each loaded OpenBLAS has, or none of them.

    It stops its threads before a fork, and starts them again when they are needed.
    """
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
    """Return the file of each mapping with these permissions, several times if mapped so."""
    with open("/proc/self/maps") as file:
        parts = [line.rstrip("\n").split(maxsplit=5) for line in file]
    return [each[5] for each in parts if len(each) == 6 and {*permissions} <= {*each[1]}]


def children() -> set[int] | None:
    """Return the pids of the children of this process, None if this kernel does not tell."""
    found: set[int] = set()
    try:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
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
        with contextlib.suppress(OSError):  # the one of listdir
            found.append((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return sorted(found)
