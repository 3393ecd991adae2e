"""Starts processes that end with their launcher, and kills them with their children."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from jdp.launch.host.reaper import kill_group

VARIABLE = "JAX_COMPILATION_CACHE_DIR"

_SUFFIX = "-cache"  # of JAX's entries

# Longer than between two pieces of one file, shorter than between a program and its next run.
_JUST_NOW_S = 1.0


def folder(inherited: Mapping[str, str]) -> str:
    """Return the folder of programs of all runs: that of the environment, or else of the user.

    A user without a home, as in a container with an arbitrary user id, gets a new one.
    """
    if VARIABLE in inherited:
        return inherited[VARIABLE]
    caches = inherited.get("XDG_CACHE_HOME")
    if not caches:
        try:
            caches = Path.home() / ".cache"
        except RuntimeError:
            caches = tempfile.mkdtemp(prefix="jdp-cache-")
    return str(Path(caches, "jdp", "xla"))


def drop_torn(folder: Path) -> None:
    """Remove programs that were being written when a process was killed.

    JAX writes a program in place. For a truncated one, each process warns and compiles it
    again, and does not replace it.
    """
    oldest = time.time() - _JUST_NOW_S
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.name.endswith(_SUFFIX) and entry.stat().st_mtime >= oldest:
                    os.unlink(entry)


# Runs before the program, in its process. The death signal comes when the launcher dies, but not if
# it died before prctl was called: then the process has another parent already. A handler of the
# launcher may have blocked signals, a shell ignores Ctrl-C and Ctrl-\ for programs that it runs
# with "&", and exec keeps both.
_BEFORE = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
signal.pthread_sigmask(signal.SIG_SETMASK, [])
for number in signal.SIGINT, signal.SIGQUIT:
    signal.signal(number, signal.SIG_DFL)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"jdp run: {sys.argv[2]} cannot be started: {error.strerror}")
"""


class Started(Protocol):
    """A started process: a `subprocess.Popen` or a fork."""

    pid: int
    returncode: Any  # None before it was waited for
    stdout: Any
    stderr: Any

    def wait(self) -> int:
        """Wait for its end, and return its code: -n after signal n."""
        ...


def spawn(
    command: Sequence[str], environment: Mapping[str, str], *, pass_fds: Iterable[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a program in a process group of its own, which Ctrl-C does not reach.

    It is killed when the thread that called `spawn` ends, so that must be the main thread. Its
    standard output and error are pipes, which `jdp.launch.host.output` reads.
    """
    return subprocess.Popen(
        ends_with_this(command),
        env=environment,
        pass_fds=tuple(pass_fds),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        process_group=0,
    )


def ends_with_this(command: Sequence[str]) -> list[str]:
    """Return a command whose process is killed when the thread that starts it ends."""
    # A preexec_fn would run Python between fork and exec, where the locks of other threads, such as
    # the one that reads logs, are never released.
    return [sys.executable, "-I", "-S", "-c", _BEFORE, str(os.getpid()), *command]


def kill(process: Started) -> None:
    """Kill a process and its children, such as the processes of a data loader.

    Call it before the process is waited for, also if it has ended: until then no other group can
    have its number.
    """
    if process.returncode is None:
        kill_group(process.pid)


def environment(
    inherited: Mapping[str, str] = os.environ, /, *, num_gpus: int = 0, **own: str
) -> dict[str, str]:
    """Return the variables of each process: defaults, the inherited ones, and its own.

    >>> environment({"PYTHONUNBUFFERED": "x"}, JDP_GUARDIAN="7")["PYTHONUNBUFFERED"]
    'x'
    """
    defaults = {
        # Output is shown at once, also when the process is killed.
        "PYTHONUNBUFFERED": "1",
        # A crash inside a library shows where each thread was.
        "PYTHONFAULTHANDLER": "1",
        # A process that takes over finds the programs of the process before.
        VARIABLE: folder(inherited),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    if not num_gpus:
        # XLA on CPU maps its temporaries anew in each step, which costs a page fault for every
        # 4 KiB. With huge pages the time of synchronisation in a step of 100 MB fell from 54 to
        # 10 ms.
        defaults["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    # A reader of the environment of a process must not be able to join the run.
    inherited = {name: value for name, value in inherited.items() if name != "JDP_TOKEN"}
    return {**defaults, **inherited, **own}
