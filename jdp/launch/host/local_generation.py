"""A generation's processes on this host, from `go` until none is left.

States, and what ends them:

  RUNNING   until a process fails or `end` (ENDING), or one has saved or `stop` (STOPPING)
  STOPPING  the processes were asked to end; until `end`, or `shutdown_timeout_s` after the last
            save in progress (ENDING)
  ENDING    the processes were killed; until the last one was waited for
"""

import asyncio
import contextlib
import enum
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jdp.launch.connection import connect, start_task
from jdp.launch.host.worker_process import Process
from jdp.launch.options import Options
from jdp.worker.exit_codes import SAVED, catches_signal
from jdp.worker.hang_detector import HangDetector, in_seconds
from jdp.worker.process_status import SAVING, ProcessStatus
from jdp.worker.progress_board import window_of


def num_oom_kills(root: Path = Path("/")) -> int | None:
    """Return the OOM kills in this process's cgroup."""
    for file in _of_cgroup(root):
        with contextlib.suppress(OSError):
            for line in file.read_text().splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
    return None


def _of_cgroup(root: Path) -> list[Path]:
    """Return the files with the count, of cgroup v2 and v1."""
    files, mounted = [], root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own = path.lstrip("/")
            if controllers == "":
                files += [mounted / own / "memory.events", mounted / "memory.events"]
            elif controllers == "memory":
                # A container mounts its own cgroup as the root.
                at = mounted / "memory"
                files += [at / own / "memory.oom_control", at / "memory.oom_control"]
    return files


# NCCL's RAS service (since 2.24) tells which ranks of a GPU job hang. One process answers for the
# whole job, in lines as `ncclras` reads them.
_DEFAULT = "localhost:28028"
# NCCL waits this long for other processes, twice.
_LEG_S = 5
_REPORT_S = 2 * _LEG_S + 2.0
# A stopped process accepts and does not answer; the next try may reach another.
_GREETING_S = 1.0
_NUM_TRIES = 5

_MAX_BYTES = 1 << 16


async def ask() -> str:
    """Return NCCL's report, or why there is none."""
    address = os.environ.get("NCCL_RAS_ADDR") or _DEFAULT
    try:
        report = await _asked(address)
    except (OSError, ValueError) as error:  # TimeoutError is an OSError
        why = getattr(error, "strerror", None) or str(error)
        return (
            f"NCCL's RAS service at {address} has no report: {why}. It needs NCCL 2.24 or "
            "newer, NCCL_RAS_ENABLE other than 0, and the NCCL_RAS_ADDR of the processes."
        )
    return f"the report of NCCL's RAS service at {address}:\n{report}"


async def _asked(address: str) -> str:
    reader, writer = await _connected(address)
    try:
        async with asyncio.timeout(_REPORT_S):
            return await _report(reader, writer)
    except TimeoutError:
        raise TimeoutError(f"no report within {_REPORT_S:g} s") from None
    finally:
        writer.close()


async def _connected(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError("NCCL_RAS_ADDR must be host:port, such as localhost:28028")
    for _ in range(_NUM_TRIES):
        try:
            async with asyncio.timeout(_GREETING_S):
                return await _greeted(host.strip("[]"), int(port))
        except TimeoutError:
            continue
    raise TimeoutError(f"no answer in {_NUM_TRIES} tries of {_GREETING_S:g} s")


async def _greeted(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connection = await connect((host, port), _GREETING_S)
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        answer = await _answer(reader, writer, "CLIENT PROTOCOL 2")
        if not answer.startswith("SERVER PROTOCOL "):
            raise ValueError(f"{answer[:80]!r} is not NCCL's greeting")
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def _report(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    answer = await _answer(reader, writer, f"TIMEOUT {_LEG_S}")
    if answer != "OK":
        raise ValueError(f"it answered {answer[:80]!r} to a timeout")
    writer.write(b"VERBOSE STATUS\n")
    parts, num_bytes = [], 0
    while (part := await reader.read(_MAX_BYTES)) and num_bytes <= _MAX_BYTES:
        parts.append(part)
        num_bytes += len(part)
    text = b"".join(parts).decode(errors="replace")
    return text[:_MAX_BYTES].strip() or "(empty)"


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> str:
    writer.write(f"{line}\n".encode())
    answer = await reader.readline()
    if not answer:
        raise ValueError("it closed the connection")
    return answer.decode(errors="replace").strip()


State = enum.Enum("State", "RUNNING STOPPING ENDING")

_LOOK_S = 0.2

NO_NEWS: dict[str, dict[int, Any]] = {"statuses": {}, "windows": {}}


class LocalGeneration:
    """A generation's processes on this host.

    Args:
      ended: called when no process is left.
      stuck: called with the reason when killed processes do not end.

    Attributes:
      processes: not yet waited for.
      step: the last called by all.
      saved: whether a process has saved and ended.
    """

    def __init__(
        self,
        options: Options,
        send: Callable[..., None],
        ended: Callable[[], None],
        stuck: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self.processes: list[Process] = []
        self.step: int | None = None
        self.saved = False
        self._shutdown_timeout_s = options.shutdown_timeout_s
        self._send, self._ended, self._stuck = send, ended, stuck
        self._say = say
        self._num_oom_kills = num_oom_kills()
        self._state = State.RUNNING
        self._watch = HangDetector(options.timeout_s)
        self._num_sent: dict[int, int] = {}  # step records by process
        self._asking: asyncio.Task[None] | None = None  # held against garbage collection
        self._deadline: asyncio.TimerHandle | None = None
        self._saving_s = -math.inf  # when one was last saving

    @property
    def is_running(self) -> bool:
        """Whether its processes may run on."""
        return self._state is State.RUNNING

    @property
    def is_stopping(self) -> bool:
        """Whether its processes were asked to end."""
        return self._state is State.STOPPING

    def statuses(self) -> dict[int, ProcessStatus]:
        """Return the statuses by process id."""
        return {process.process_id: process.slot.read() for process in self.processes}

    def news(self) -> dict[str, dict[int, Any]]:
        """Return statuses, and windows of processes with new steps."""
        windows = {}
        for process in self.processes:
            times, i = process.slot.times, process.process_id
            if times.num_written != self._num_sent.get(i, 0) and (records := times.latest()):
                windows[i] = window_of(times.num_written, records)
                self._num_sent[i] = windows[i].num_written
        return {"statuses": self.statuses(), "windows": windows}

    def record_told(self, process: Process, kind: str, facts: dict[str, Any]) -> None:
        """Record a process's message."""
        if kind == "failed":
            # Others need not wait for its exit; a lone process may clean up first. If another is
            # dying, this error may be a consequence.
            assert process.assignment is not None
            is_alone = process.assignment.num_processes == 1
            if not is_alone and not any(other.is_dying() for other in self.processes):
                self._fail(process, facts["code"])
        elif kind == "ended" and process.traceback is not None:
            pass  # "failed" was sent
        elif kind != "parked":
            who = {"process_id": process.process_id, "pid": process.popen.pid}
            self._send("told", **who, what=kind, facts=facts)

    def record_exit(self, process: Process) -> None:
        """Record a process that was waited for."""
        # Pending messages first: this exit may end the others.
        for other in [*self.processes]:
            other.read()
        self._record_step(process)
        self.processes.remove(process)
        code = process.popen.returncode
        if code == SAVED:
            self.saved = True
            # Later exit codes are no failures: others will save and end.
            self.stop(None)
        if self.is_stopping or code in (0, SAVED) or process.died_first:
            self._tell_exit(process, code)
        else:
            self._fail(process, code)
        if not self.processes:
            self._set_deadline(None)
            self._ended()

    def _fail(self, process: Process, code: int) -> None:
        if self._state is State.RUNNING:
            self.kill_processes()
            process.died_first = False  # or its exit would be sent twice
            self._tell_exit(process, code)

    def _tell_exit(self, process: Process, code: int) -> None:
        explains_itself = code in (0, SAVED) or process.traceback is not None
        self._send(
            "exited",
            process_id=process.process_id,
            pid=process.popen.pid,
            returncode=code,
            traceback=process.traceback,
            status=process.slot.read(),
            step=process.step(),
            last_lines=[] if explains_itself else process.last_lines(),
            out_of_memory=code == -signal.SIGKILL and num_oom_kills() != self._num_oom_kills,
        )

    def _record_step(self, process: Process) -> None:
        step = process.step()
        self.step = step if self.step is None else min(self.step, step)

    def stop(self, number: int | None) -> None:
        """Ask its processes to end; kill them after the timeout."""
        if self._state is State.RUNNING:
            self._state = State.STOPPING
            self._set_deadline(self._end_unless_saving)
        if self.is_stopping and number is not None:
            for process in self.processes:
                if not process.has_ended:  # it may have no handler
                    process.signal(number if number == signal.SIGINT else signal.SIGTERM)

    def kill_processes(self) -> None:
        """Kill its processes; a dying one counts as ended by itself."""
        if self._state is State.ENDING:
            return
        for process in self.processes:
            process.died_first = process.is_dying()
        self.kill_now()
        self._set_deadline(self._still_alive)

    def kill_now(self) -> None:
        """Kill its processes, without a deadline."""
        self._state = State.ENDING
        self._set_deadline(None)
        for process in self.processes:
            self._record_step(process)
            process.kill()

    def show_stacks(self, process_ids: list[int], *, asks_nccl: bool = False) -> None:
        """Print the stacks of these processes; `asks_nccl` sends NCCL's report."""
        if asks_nccl and any(it.assignment and it.assignment.gpus for it in self.processes):
            self._asking = start_task(self._ask_nccl())
        for process in self.processes:
            if process.process_id in process_ids:
                process.reveal()
            # A process without the C handler, before `jdp.init()` or at its end, would be killed.
            if catches_signal(process.popen.pid, signal.SIGQUIT):
                process.signal(signal.SIGQUIT)

    async def _ask_nccl(self) -> None:
        self._send("nccl", report=await ask())

    # A saving process may overrun the timeout.
    def _end_unless_saving(self) -> None:
        now, statuses = time.monotonic(), self.statuses()
        if any(it.phase == SAVING and self._watch.left_s(now, it) > 0 for it in statuses.values()):
            self._saving_s = now
        if now < self._saving_s + self._shutdown_timeout_s:
            self._set_deadline(self._end_unless_saving, _LOOK_S)
        else:
            self._report_late(now, statuses)
            self.kill_processes()

    def _report_late(self, now: float, statuses: dict[int, ProcessStatus]) -> None:
        doing = [
            f"process {i} is {it.phase} for {in_seconds(now - it.since_s)}"
            for i, it in statuses.items()
            if it.phase
        ]
        self._say(
            f"no end within {self._shutdown_timeout_s:g} s of the signal: {', '.join(doing)}. "
            "The processes are killed without a save. jdp saves after a step: if that needs "
            "longer, write a larger --shutdown-timeout-s."
        )

    def _still_alive(self) -> None:
        pids = [process.popen.pid for process in self.processes]
        self._stuck(
            f"the processes {pids} did not end within {self._shutdown_timeout_s:g} s of SIGKILL. "
            "They wait for a disk or a driver, and their devices stay in use."
        )

    def _set_deadline(self, call: Callable[[], None] | None, after_s: float | None = None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if call is not None:
            after_s = self._shutdown_timeout_s if after_s is None else after_s
            self._deadline = asyncio.get_running_loop().call_later(after_s, call)
