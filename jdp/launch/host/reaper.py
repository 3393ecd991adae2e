"""A process that briefly outlives the launcher, to kill the run's processes.

The death signal of `spawn` does not reach grandchildren. The guardian holds a pipe, which closes
when the launcher ends in any way. It runs without jdp, so it starts at once.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

# Marks processes that may leave their group.
MARK = "JDP_GUARDIAN"

# A resource tracker needs milliseconds.
_TRACKER_S = 2.0


class Guardian:
    """Watches over one launcher's processes, started after it.

    Start each with the variables of `environment`, and add its group; remove the group after
    waiting for the process. `added` and `removed` get the pid of each child of the launcher.
    """

    def __init__(
        self,
        added: Callable[[int], None] = lambda pid: None,
        removed: Callable[[int], None] = lambda pid: None,
    ) -> None:
        self._added, self._removed = added, removed
        mark = secrets.token_hex(16)
        # A launcher may run in another launcher's process.
        marks = filter(None, [os.environ.get(MARK), mark])
        self.environment = {MARK: ",".join(marks)}
        """Variables that each process must be started with."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,  # Ctrl-C and a closed terminal are for the launcher
        )
        added(self._process.pid)

    def add(self, group: int) -> None:
        """Kill this group when the launcher is gone."""
        self._added(group)
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Forget a group: its number may soon be reused."""
        self._removed(group)
        self._tell(f"-{group}\n")

    def kill_all(self, timeout_s: float = 5.0) -> None:
        """Kill all remaining processes, and wait."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise TimeoutError(
                f"processes with {MARK}={self.environment[MARK]} in their environment did not "
                f"end within {timeout_s} s of SIGKILL. They may wait for a disk or a driver."
            ) from None

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        # Without a guardian, spawn's death signal remains.
        with suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())


def main() -> None:
    """Read groups until the launcher is gone, then kill them."""
    for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2"):
        signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_IGN)
    mark = sys.argv[1].encode()
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        kill_group(group)
    end = time.monotonic() + _TRACKER_S
    # Repeated: a process may start another meanwhile.
    while marked := _marked(mark):
        for pid in marked:
            if not _is_tracker(pid) or time.monotonic() > end:
                _kill(pid)
        time.sleep(0.005)


def kill_group(group: int) -> None:
    """Kill all processes of a group except Python's resource trackers, which clean up /dev/shm."""
    members = [pid for pid in _processes() if _group_of(pid) == group]
    trackers = {*filter(_is_tracker, members)}
    if trackers:
        for pid in members:
            if pid not in trackers:
                _kill(pid)
    else:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None


def _is_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"resource_tracker import main" in file.read()
    except OSError:
        return False


# A zombie's environment is empty.
def _marked(mark: bytes) -> list[int]:
    found = []
    for pid in _processes():
        with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if mark in file.read():
                found.append(pid)
    return found


if __name__ == "__main__":
    main()
