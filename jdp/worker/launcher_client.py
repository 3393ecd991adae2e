"""The launcher, as seen by a process of `jdp run`."""

import atexit
import functools
import json
import logging
import os
import re
import select
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jdp.worker import SWITCHED_ON, build_info, bytecode, fork_server, source_files
from jdp.worker.fork_server import ForkServer
from jdp.worker.messages import MAX_LINE_BYTES, decode, encode

VARIABLE = "JDP_LAUNCHER"
_log = logging.getLogger("jdp")


class Assignment(NamedTuple):
    """A process's place in a generation.

    Args:
      generation: from 0; each recovery and resize begins the next.
      local_id, num_local: of the processes on this host.
      coordinator: "address:port" of process 0.
      resumes: whether a state to resume from may exist.
      gpus: indices of this process's GPUs; None if the host has none.
    """

    generation: int
    process_id: int
    num_processes: int
    local_id: int
    num_local: int
    coordinator: str
    resumes: bool
    gpus: list[int] | None
    run_id: str
    host_id: int = 0


def environment(assignment: Assignment) -> dict[str, str]:
    """Return torchrun's variables for an assignment."""
    address, _, port = assignment.coordinator.rpartition(":")
    return {
        "RANK": str(assignment.process_id),
        "LOCAL_RANK": str(assignment.local_id),
        "WORLD_SIZE": str(assignment.num_processes),
        "LOCAL_WORLD_SIZE": str(assignment.num_local),
        "GROUP_RANK": str(assignment.host_id),
        "MASTER_ADDR": address.strip("[]"),
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": str(assignment.generation),
        "TORCHELASTIC_RUN_ID": assignment.run_id,
    }


class LauncherClient:
    """This process as a run's member.

    Args:
      board_file: descriptor of the host's progress board.
      commit_file: memfd of the host's commits.
      forks: answers fork requests while this process waits.

    Attributes:
      forked: called in a fork once it has its own slot.
    """

    def __init__(
        self,
        connection: socket.socket,
        board_file: int,
        slot: int,
        commit_file: int,
        forks: ForkServer | None = None,
    ) -> None:
        self.forked: list[Callable[[], None]] = []
        self.board_file = board_file
        self.slot = slot
        self.commit_file = commit_file
        self.assignment: Assignment | None = None
        self.woken = 0.0  # monotonic, at `go`
        self._has_ended = self._is_fork = False
        self._pid = os.getpid()
        self._connection = connection
        self._forks = forks
        self._lock = threading.Lock()

    def park(self, prepare: Callable[[], None] | None = None) -> Assignment:
        """Wait for an assignment while the launcher lives, and set the environment."""
        if self.assignment is None:
            if prepare is not None and not select.select([self._connection], [], [], 0)[0]:
                prepare()
            self._tell_parked()
            self._serve_forks()
            with self._connection.makefile("rb") as lines:
                line = lines.readline(MAX_LINE_BYTES)
            if not line:
                if self._is_fork:
                    os._exit(1)  # a late fork: the script must not clean up
                raise SystemExit("jdp: the launcher has ended, and so does this process.")
            self.woken = time.monotonic()
            _, facts = decode(line)
            self.assignment = Assignment(**facts)
            os.environ.update(environment(self.assignment))
            self._tell_slow_imports(self.assignment)
            _warn_of_local_rank(self.assignment)
            # JAX's exit handler waits for other processes. Imported before, it runs after this one,
            # so the launcher learns of the end first.
            atexit.register(self.tell_end)
        return self.assignment

    def _tell_parked(self) -> None:
        why = None
        if self._forks is not None:
            descriptors = self._connection.fileno(), self._forks.requests.fileno()
            why = fork_server.why_not({*descriptors, self.board_file, self.commit_file})
        self.tell("parked", pid=os.getpid(), cannot_fork=why)

    def _serve_forks(self) -> None:
        """Fork on request until a message comes; also returns in forks."""
        while self._forks is not None:
            requests = self._forks.requests
            ready, _, _ = select.select([self._connection, requests], [], [])
            if requests not in ready:
                break
            try:
                fork = self._forks.serve()
            except (EOFError, OSError):
                break
            if fork is not None:
                self._become(*fork)
        if self._forks is not None:
            self._forks.requests.close()
            self._forks = None

    def _become(self, slot: int, connection: socket.socket) -> None:
        self._connection.close()
        self._is_fork = True
        self._connection, self.slot, self._pid = connection, slot, os.getpid()
        for call in self.forked:
            call()
        self.tell("parked", pid=self._pid, cannot_fork=None)

    # Once a host: its processes share an installation.
    def _tell_slow_imports(self, assignment: Assignment) -> None:
        if assignment.generation == assignment.local_id == 0:
            found = bytecode.slow_imports()
            if found is not None:
                self.tell("compiled_imports", **found._asdict())

    def tell_end(self, **facts: Any) -> None:
        """Report once that the script has ended."""
        if not self._has_ended:
            self._has_ended = True
            self.tell("ended", **facts)

    def tell(self, kind: str, **facts: Any) -> None:
        """Send a message of `jdp.worker.messages`, from any thread."""
        if os.getpid() != self._pid:
            return  # a forked data loader
        data = encode(kind, facts)
        with self._lock:
            try:
                self._connection.sendall(data)
            except OSError:
                pass  # the kernel is about to kill this process


_LOCAL_RANK = (
    "jdp: %s reads %s, which jdp run does not set, so each process uses its default. jdp.init() "
    "chooses the devices; after it os.environ['LOCAL_RANK'] is the number."
)


# As `torch.distributed.launch` passed it, and torchrun does not.
def _warn_of_local_rank(assignment: Assignment) -> None:
    if assignment.generation or assignment.process_id or assignment.num_processes == 1:
        return
    found = source_files.find_executed(re.compile(rb"[\"'](--local[-_]rank)[\"']"))
    is_known = "local_rank" in " ".join(sys.argv).replace("-", "_")
    if found and not is_known and not source_files.find_executed(re.compile(rb"(LOCAL_RANK)")):
        _log.warning(_LOCAL_RANK, *found)


def invitation(**where: int) -> dict[str, str]:
    """Return the environment for `current`."""
    build = {
        "protocol": build_info.source_digest(build_info.PROTOCOL),
        "package": str(build_info.PACKAGE),
    }
    return {VARIABLE: json.dumps({**where, **build})}


def is_asked_to_resume() -> bool:
    """Whether JDP_RESUME asks for a resume."""
    return os.environ.get("JDP_RESUME", "").lower() in SWITCHED_ON


@functools.cache
def current() -> LauncherClient | None:
    """Return this process's launcher."""
    description = os.environ.get(VARIABLE)
    if description is None:
        return None
    fds = json.loads(description)
    if not _is_socket(fds["socket"]):
        return None  # inherited, without the descriptors
    if not build_info.is_build_of(fds.get("protocol"), fds.get("package")):
        raise RuntimeError(
            f"{sys.executable} has a different build of jdp than `jdp run`, so they cannot "
            "communicate. Start both from one environment: python -m jdp run ..."
        )
    # Children inherit neither.
    os.environ.pop(VARIABLE)
    for name in ("socket", "board", "commit", "requests"):
        if name in fds:
            os.set_inheritable(fds[name], False)
    forks = None
    if "requests" in fds:
        forks = ForkServer(socket.socket(fileno=fds["requests"]), fds["launcher"])
    return LauncherClient(
        socket.socket(fileno=fds["socket"]), fds["board"], fds["slot"], fds["commit"], forks
    )


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False
