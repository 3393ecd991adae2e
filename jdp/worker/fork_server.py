"""Forks of a process that waits in `jdp.init()`, on request of its launcher.

A fork has the imports and the data of the script after milliseconds, and shares their memory.

The launcher sends a request to a waiting process on a socket of its own: the slot of the fork, and
four descriptors, for the two sockets of the fork, its standard output and its standard error. The
process forks a child, which forks a grandchild and ends. So the launcher, which is a subreaper,
becomes the parent of the grandchild, can wait for it, and learns its exit code. The answer to the
request is sent after that, and is the pid of the grandchild.

A process is forked only if `why_not` knows no reason against it.
"""

import contextlib
import ctypes
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
from collections.abc import Collection, Iterator
from typing import Any

from jdp.worker import source_files

# Variables that a script finds before `jdp.init()`, different ones in each process.
_NUMBERS = re.compile(
    rb"\b(RANK|LOCAL_RANK|GROUP_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_(ADDR|PORT))\b"
)

# Whether a fork is made now that will train: handlers of `os.register_at_fork` leave it its state.
is_forking = False

_PR_SET_PDEATHSIG = 1
_NUM_DESCRIPTORS = 4

_GPUS = "/dev/nvidia", "/dev/kfd", "/dev/dri"
_DEVICES = frozenset(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))
_REMOVE_FOLDER = getattr(getattr(tempfile.TemporaryDirectory, "_cleanup", None), "__func__", ())

# Functions of the builds of OpenBLAS that return the number of its threads.
_OPENBLAS = [
    f"{prefix}openblas_get_num_threads{suffix}"
    for prefix in ("", "scipy_")
    for suffix in ("", "64_")
]


def why_not(own: Collection[int]) -> str | None:
    """Return a sentence that says why this process must not be forked, None if it can be.

    Args:
      own: descriptors that every fork shares or replaces.
    """
    source_files.record()
    if place := source_files.find_executed(_NUMBERS):
        return f"{place[0]} reads {place[1]} before jdp.init() sets it"
    others = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
    if others:
        return f"thread {others[0]!r} runs before jdp.init(), and a fork does not have it"
    if (extra := _num_native_threads() - _num_openblas_threads()) > 1:
        return f"{extra - 1} threads of a native library run before jdp.init()"
    if any(each is _REMOVE_FOLDER for each in _finalizers()):
        return "a temporary folder exists before jdp.init(), and the first fork to end removes it"
    mapped = _mapped_files()
    for number, target in _descriptors():
        if target.startswith(_GPUS):
            return "a GPU is in use before jdp.init()"
        # Python keeps descriptors of memory that it maps, and never moves their position.
        is_shared = number <= 2 or number in own or target in _DEVICES or target in mapped
        if not is_shared:
            return f"{target} is open before jdp.init(), and forks would share its position"
    return None


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
        """Answer one request."""
        slot, descriptors, _, _ = socket.recv_fds(self.requests, 32, _NUM_DESCRIPTORS)
        if not slot:
            raise EOFError
        connection, requests, out, err = descriptors
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        ctypes.CDLL(None).fflush(None)  # or each fork would write what C buffered
        drawn = random.getstate()  # Python seeds it anew in a fork
        ours, theirs = os.pipe()
        child = _fork()
        if child:
            for each in (*descriptors, theirs):
                os.close(each)
            answer = os.read(ours, 32)  # empty if the child could not fork
            os.close(ours)
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

    def _end_with_launcher(self) -> None:
        # The signal comes when the parent ends, so the launcher must be the parent by now.
        while os.getppid() != self._launcher:
            if not _is_alive(self._launcher):
                os._exit(1)
            time.sleep(0.0002)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._launcher:
            os._exit(1)


def _fork() -> int:
    global is_forking
    is_forking = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of JAX and Python: `why_not` knows the threads
        try:
            return os.fork()
        finally:
            is_forking = False


@contextlib.contextmanager
def _ends_at_error() -> Iterator[None]:
    """End this fork at an error: it must not continue with the script beside its parent."""
    try:
        yield
    except BaseException:
        os._exit(1)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _num_native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


# OpenBLAS stops its threads before a fork, and starts them again when they are needed.
def _num_openblas_threads() -> int:
    found = 0
    for path in _mapped_files():
        if "openblas" in path:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            name = next((each for each in _OPENBLAS if hasattr(library, each)), None)
            found += getattr(library, name)() - 1 if name is not None else 0
    return found


def _mapped_files() -> set[str]:
    with open("/proc/self/maps") as file:
        parts = [line.rstrip("\n").split(maxsplit=5) for line in file]
    return {each[5] for each in parts if len(each) == 6}


def _finalizers() -> list[Any]:
    functions = [each.func for each in getattr(weakref.finalize, "_registry", {}).values()]
    return [getattr(each, "__func__", each) for each in functions]


def _descriptors() -> list[tuple[int, str]]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of listdir
            found.append((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return sorted(found)
