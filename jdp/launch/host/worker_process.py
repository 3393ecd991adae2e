"""One of this host's processes, perhaps a standby."""

import asyncio
import contextlib
import ctypes
import mmap
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jdp.launch.connection import Channel
from jdp.launch.host import spawn
from jdp.launch.host.output import OutputMux
from jdp.launch.host.reaper import Guardian
from jdp.launch.options import Options
from jdp.worker.fork_server import children
from jdp.worker.launcher_client import Assignment, environment, invitation
from jdp.worker.local_devices import num_gpus
from jdp.worker.process_status import COMPILING, STARTING
from jdp.worker.progress_board import Board

# Without it NCCL refuses two ranks on a GPU; before 2.30 always.
SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"
# JAX's default fraction of a GPU.
_TAKEN = 0.75
_FRACTION = "XLA_CLIENT_MEM_FRACTION"
_OF_MEMORY = (_FRACTION, "XLA_PYTHON_CLIENT_MEM_FRACTION")


def gpus_of_slots(
    num_gpus: int, num_slots: int, environment: Mapping[str, str] = os.environ
) -> list[list[int] | None]:
    """Divide a host's GPUs among its slots."""
    if not num_gpus:
        return [None] * num_slots
    if num_gpus % num_slots == 0:
        each = num_gpus // num_slots
        return [[*range(i * each, (i + 1) * each)] for i in range(num_slots)]
    if num_slots % num_gpus == 0 and environment.get(SHARE) == "1":
        return [[i * num_gpus // num_slots] for i in range(num_slots)]
    divisors = [n for n in range(1, num_gpus + 1) if num_gpus % n == 0]
    shared = (
        f" To test several processes on few GPUs, set {SHARE}=1: NCCL 2.30 and later then lets "
        f"{num_slots // num_gpus} of them share a GPU, slowly."
        if num_slots % num_gpus == 0
        else ""
    )
    raise ValueError(
        f"{num_slots} processes cannot divide the {num_gpus} GPU{'s' * (num_gpus > 1)} of this "
        f"host evenly. Write --nproc-per-node with one of {', '.join(map(str, divisors))}; with "
        f"1, one process drives all GPUs. To train on CPUs, set JAX_PLATFORMS=cpu.{shared}"
    )


def memory_of_shared(
    num_gpus: int, num_slots: int, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return variables that divide a shared GPU's memory."""
    if not 0 < num_gpus < num_slots or any(map(environment.get, _OF_MEMORY)):
        return {}
    return {_FRACTION: f"{_TAKEN * num_gpus / num_slots:.3g}"}


# A helper started with `setsid` and an empty environment escapes the guardian (`reaper.py`). But
# the launcher is a subreaper (`man 2 prctl`), and becomes its parent.
_PR_SET_CHILD_SUBREAPER = 36


class _Orphans:
    """The launcher's adopted children, if it `adopts` any."""

    def __init__(self) -> None:
        self.own: set[int] = set()  # children of the launcher
        self.adopts = False

    def start_adopting(self) -> None:
        """Adopt orphans from now on, unless the launcher has children, such as a sidecar."""
        found = children()
        if found is not None and found <= self.own:
            self.adopts = _set_subreaper(True) == 0

    def stop_adopting(self) -> None:
        """Leave later orphans to the system."""
        if self.adopts:
            _set_subreaper(False)
            self.adopts = False

    def reap(self) -> set[int]:
        left = set()
        for pid in (children() or set()) - self.own if self.adopts else ():
            with suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    left.add(pid)
        return left

    def kill_all(self, timeout_s: float = 5.0) -> None:
        end = time.monotonic() + timeout_s
        while (left := self.reap()) and time.monotonic() < end:
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)


def _set_subreaper(is_one: bool) -> int:
    return ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, is_one, 0, 0, 0)


# A fork blocks the launcher: 0.1 s for each GB of small objects.
_FORK_TIMEOUT_S, _FORK_TIMEOUT_S_PER_GB, _MAX_FORK_TIMEOUT_S = 1.0, 0.25, 3.0

# PF_EXITING in /proc/PID/stat.
_EXITING = 0x4


class HostResources:
    """Resources shared by this host's processes.

    Attributes:
      commit_file: descriptor of the commit memory, for later processes, too.
    """

    def __init__(self, options: Options) -> None:
        num_slots = options.nproc_per_node[1]
        self.gpus = gpus_of_slots(num_gpus(), num_slots)
        self.orphans = _Orphans()
        self._why_no_forks: str | None = None
        self._wants_forks = options.start_method != "spawn" and num_slots + options.num_standbys > 1
        self.guardian = Guardian(self.orphans.own.add, self.orphans.own.discard)
        self.logs = OutputMux(options)
        self.command = options.argv()
        own = self.guardian.environment | memory_of_shared(num_gpus(), num_slots)
        own |= {"JDP_RESUME": "1"} if options.resume else {}
        self.variables = spawn.environment(num_gpus=num_gpus(), **own)
        self.board = Board.create(num_slots + options.num_standbys)
        self.free_slots = [*range(self.board.num_slots)]
        self.commit_file = os.memfd_create("jdp-commit")

    @property
    def can_fork(self) -> bool:
        """Whether processes may be forked, as the launcher's children."""
        return self._wants_forks and self.orphans.adopts and self._why_no_forks is None

    def refuse_forks(self, why: str) -> None:
        """Record, and report once, why not."""
        if self._wants_forks and self._why_no_forks is None:
            self._why_no_forks = why
            self.say(f"each process imports its modules itself, because {why}.")

    def assignments(self, first: int, slots: Sequence[int], **common: Any) -> list[Assignment]:
        """Return the assignments of this host's processes."""
        return [
            Assignment(
                process_id=first + local_id,
                local_id=local_id,
                num_local=len(slots),
                gpus=self.gpus[slot],
                **common,
            )
            for local_id, slot in enumerate(slots)
        ]

    def say(self, text: str) -> None:
        """Print a line for people, without waiting."""
        self.logs.post(lambda: self.logs.say(text))

    def release(self) -> None:
        """Kill all remaining processes, and show their last output."""
        try:
            self.guardian.kill_all()
        finally:
            self.orphans.kill_all()
            self.orphans.stop_adopting()
            self.logs.finish()
            os.close(self.commit_file)


class Fork:
    """A fork, with an interface like `subprocess.Popen`."""

    def __init__(self, pid: int, stdout: int, stderr: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout, self.stderr = (open(fd, "rb", buffering=0) for fd in (stdout, stderr))

    def wait(self) -> int:
        """Wait, and return the code: -n after signal n."""
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Process:
    """A process that runs the script.

    Args:
      local_id: the expected one.
      assignment: None for a standby.
      told: called with the process, kind and facts of each message.
      died: called with the process once it was waited for.
      parent: a process that `can_fork`; None: start the script.

    Attributes:
      parked: whether it has reached `jdp.init()`.
      restored_step: step at which it began.
      died_first: whether it was dying when its generation was killed.
    """

    def __init__(
        self,
        resources: HostResources,
        local_id: int,
        assignment: Assignment | None,
        told: Callable[["Process", str, dict[str, Any]], None],
        died: Callable[["Process"], None],
        parent: "Process | None" = None,
    ) -> None:
        self.assignment: Assignment | None = None
        self.parked = self.can_fork = self.has_ended = self._may_go = False
        self.restored_step = 0
        self.traceback: str | None = None
        self.died_first = False
        self._resources, self._told, self._died = resources, told, died
        self._slot_index = resources.free_slots.pop()
        self.slot = resources.board.slot(self._slot_index)
        self.slot.clear()
        self.popen = self._start(assignment, parent)
        resources.guardian.add(self.popen.pid)
        self._output = resources.logs.add(
            self.popen, local_id, standby=assignment is None, waits=self.is_fork
        )
        self._pidfd = os.pidfd_open(self.popen.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._end)
        if assignment is not None:
            self.assign(assignment)

    @property
    def is_fork(self) -> bool:
        """Whether it was forked."""
        return isinstance(self.popen, Fork)

    def _start(self, assignment: Assignment | None, parent: "Process | None") -> spawn.Started:
        ours, theirs = socket.socketpair()
        self._requests, requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, requests:
            try:
                if parent is None:
                    started = self._spawn(theirs.fileno(), requests.fileno(), assignment)
                else:
                    started = parent.fork(self._slot_index, theirs, requests)
            except OSError:
                ours.close()  # a late fork then ends
                self._requests.close()
                if parent is None:
                    raise
                return self._start(assignment, None)
        self._channel = Channel(ours, self._receive)
        return started

    def _spawn(
        self, connection: int, requests: int, assignment: Assignment | None
    ) -> spawn.Started:
        resources = self._resources
        board, commit = resources.board.fd, resources.commit_file
        fds = {"socket": connection, "board": board, "commit": commit}
        where = {"slot": self._slot_index}
        if resources.can_fork:
            fds["requests"] = requests
            where["launcher"] = os.getpid()
        variables = {**resources.variables, **invitation(**fds, **where)}
        if assignment is not None:
            # For a script without jdp.init().
            variables |= environment(assignment)
        return spawn.spawn(resources.command, variables, pass_fds=fds.values())

    def fork(self, slot: int, connection: socket.socket, requests: socket.socket) -> Fork:
        """Fork this process, see `jdp.worker.fork_server`."""
        if not self.can_fork:
            raise OSError("an earlier request has no answer yet")
        limit_s = _FORK_TIMEOUT_S + _FORK_TIMEOUT_S_PER_GB * self._resident_gb()
        self._requests.settimeout(min(limit_s, _MAX_FORK_TIMEOUT_S))
        out, err = os.pipe(), os.pipe()
        descriptors = [connection.fileno(), requests.fileno(), out[1], err[1]]
        try:
            socket.send_fds(self._requests, [b"%d" % slot], descriptors)
            pid = int(self._requests.recv(32) or 0)
            if not pid:
                raise OSError("the process could not be forked")
        except OSError:
            self.can_fork = False  # a late answer would look like the next request's
            os.close(out[0])
            os.close(err[0])
            raise
        finally:
            os.close(out[1])
            os.close(err[1])
        return Fork(pid, out[0], err[0])

    @property
    def process_id(self) -> int:
        """Its id in the generation."""
        assert self.assignment is not None
        return self.assignment.process_id

    def is_dying(self) -> bool:
        """Whether it exits; connections close before it can be waited for."""
        return self._state()[1]

    def can_run(self) -> bool:
        """Whether it neither dies nor is stopped."""
        state, is_dying = self._state()
        return not is_dying and state not in "Tt"

    # (state letter, is exiting).
    def _state(self) -> tuple[str, bool]:
        try:
            with open(f"/proc/{self.popen.pid}/stat") as file:
                state, *facts = file.read().rpartition(")")[2].split()
        except OSError:
            return "X", True
        return state, bool(int(facts[5]) & _EXITING)

    def _resident_gb(self) -> float:
        with contextlib.suppress(OSError), open(f"/proc/{self.popen.pid}/statm") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE / 1e9
        return 0.0

    def step(self) -> int:
        """Return its last called step."""
        return self.restored_step + self.slot.read().steps

    def assign(self, assignment: Assignment) -> None:
        """Make it a generation's process."""
        self.assignment = assignment
        self.slot.expect(self.popen.pid, assignment.generation)
        self._output.assign(assignment.process_id, assignment.local_id, assignment.generation)

    def go(self) -> None:
        """Let it leave `jdp.init()`."""
        assert self.assignment is not None
        self._may_go, self.can_fork = True, False
        self._requests.close()
        self._channel.send("go", **self.assignment._asdict())

    def signal(self, number: int) -> None:
        """Send it a signal, not its children: data loaders continue while it saves."""
        # Popen.send_signal would reap it and leave its children running.
        signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Kill it and its children."""
        spawn.kill(self.popen)

    def reveal(self) -> None:
        """Show its output, against the filter."""
        self._output.reveal()

    def read(self) -> None:
        """Receive its messages."""
        self._channel.read()

    def last_lines(self) -> list[str]:
        """Return its last lines."""
        return self._output.last_lines()

    def _receive(self, kind: str, facts: dict[str, Any]) -> None:
        if kind == "parked":
            self.parked = True
            if self._resources.can_fork and facts["pid"] != self.popen.pid:
                facts["cannot_fork"] = "another program has started it"
            if facts["cannot_fork"] is not None:
                self._resources.refuse_forks(facts["cannot_fork"])
            self.can_fork = self._resources.can_fork and not self._may_go
            self._output.hold()
        elif kind == "restored":
            self.restored_step = facts["base"]
        elif kind == "ended":
            self.has_ended = True
        elif kind == "failed":
            self.traceback = facts["traceback"]
        self._told(self, kind, facts)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.read()
        self._channel.close_connection()
        self._requests.close()
        self.can_fork = False
        self.kill()  # its children
        where = self.slot.read()
        if self.popen.wait() < 0 and where.phase in (STARTING, COMPILING):
            spawn.drop_torn(Path(self._resources.variables[spawn.VARIABLE]))
        self._resources.guardian.remove(self.popen.pid)
        self._resources.free_slots.append(self._slot_index)
        self._died(self)
