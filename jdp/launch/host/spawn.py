"""Starts processes that die with their launcher, and kills them with their children."""

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

_SUFFIX = "-cache"

# Between a file's write time and a program's next run.
_JUST_NOW_S = 1.0


def folder(inherited: Mapping[str, str]) -> str:
    """Return the compilation cache's folder; a temporary one without a home."""
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
    """Remove programs torn by a death, never replaced by JAX."""
    oldest = time.time() - _JUST_NOW_S
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.name.endswith(_SUFFIX) and entry.stat().st_mtime >= oldest:
                    os.unlink(entry)


# Runs in the new process. If the launcher died before prctl, the parent has changed, and no signal
# comes. exec keeps signals that the launcher blocked or a shell ignored for "&".
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
    """A `subprocess.Popen` or a fork."""

    pid: int
    returncode: Any  # None until waited for
    stdout: Any
    stderr: Any

    def wait(self) -> int:
        """Wait, and return the code: -n after signal n."""
        ...


def spawn(
    command: Sequence[str], environment: Mapping[str, str], *, pass_fds: Iterable[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a program in its own process group, out of reach of Ctrl-C.

    It is killed when the calling thread ends, so call this in the main thread. It has these
    variables alone, and keeps the numbers of `pass_fds`. Its stdout and stderr are pipes.
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
    """Return a command that dies with the thread that starts it."""
    # A preexec_fn would run after fork, where other threads' locks stay locked.
    return [sys.executable, "-I", "-S", "-c", _BEFORE, str(os.getpid()), *command]


def kill(process: Started) -> None:
    """Kill a process and its children, before its group number may be reused."""
    if process.returncode is None:
        kill_group(process.pid)


def environment(
    inherited: Mapping[str, str] = os.environ, /, *, num_gpus: int = 0, **own: str
) -> dict[str, str]:
    """Return a process's variables: defaults, inherited, own."""
    defaults = {
        # Output of a killed process.
        "PYTHONUNBUFFERED": "1",
        # Stacks at a crash.
        "PYTHONFAULTHANDLER": "1",
        # A replacement reuses its predecessor's programs.
        VARIABLE: folder(inherited),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    if not num_gpus:
        # XLA:CPU maps temporaries anew in each step, a page fault for every 4 KiB.
        defaults["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    # Others may read the environment, and must not join.
    inherited = {name: value for name, value in inherited.items() if name != "JDP_TOKEN"}
    return {**defaults, **inherited, **own}
