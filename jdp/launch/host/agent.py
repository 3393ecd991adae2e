"""This host's part in a run: it starts, watches and ends processes for the leader.

States, and what ends them:

  joining       the host searches for the leader; until it joins (waiting) or times out (over)
  waiting       the host has joined; until `go` (a generation)
  a generation  its processes run here, see `local_generation.py`; until all have ended (waiting)
  over          the run is over for this host; the message `over` leads here from any state

If the leader is lost, others continue without this host. So it kills its processes, keeps its
standbys and commit memory, and joins again. Processes that were asked to end may first use their
shutdown timeout, since their checkpoint counts; then it is over.
"""

import asyncio
import contextlib
import functools
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jdp.error_codes import with_code
from jdp.launch.connection import start_task
from jdp.launch.election import LeaderSearch, Rendezvous
from jdp.launch.host import spawn
from jdp.launch.host.leader_connection import LeaderConnection
from jdp.launch.host.local_generation import NO_NEWS, LocalGeneration
from jdp.launch.host.standby_pool import Standbys
from jdp.launch.host.worker_process import HostResources, Process
from jdp.launch.options import Options
from jdp.launch.quorum import KnownElectors
from jdp.worker.exit_codes import SAVED
from jdp.worker.launcher_client import Assignment
from jdp.worker.run_progress import LeaderLoss, RunHistory


class _KnownRun:
    """What a leader has told this host of the run.

    Attributes:
      id: unique to this launcher.
      generation: the last one, -1 before the first.
      step: the last that all processes of this host called in it.
    """

    def __init__(self, options: Options) -> None:
        self.id = secrets.token_hex(8)
        self.generation = -1
        self.step: int | None = None
        self._options, self._run_id = options, options.rdzv_id
        self._has_stepped = False
        self._electors = KnownElectors()
        self._history = RunHistory()
        self._loss: LeaderLoss | None = None  # of the last generation

    def record_generation(
        self, number: int, run_id: str, known: dict[str, Any], leader: str
    ) -> None:
        self.generation, self._run_id = number, run_id
        self.step, self._loss = None, None
        self._record_history(known["history"])
        self._electors.record_generation(known["electorate"], leader)

    def record_past(self, known: dict[str, Any]) -> None:
        self._record_history(known["history"])
        self._electors.record(known["electorate"])

    def record_step(self, known: dict[str, Any]) -> None:
        self._has_stepped = True
        self.record_past(known)

    def record_loss(self, leader: str, why: str, silent_s: float) -> None:
        text = f"the leader at {leader} was lost: {why}"
        self._loss = self._loss or LeaderLoss(text, time.monotonic(), silent_s)

    def _record_history(self, facts: dict[str, Any]) -> None:
        self._history = RunHistory(**facts).moved(time.monotonic())

    def introduce(self, link: LeaderConnection, port: int, listed: int | None) -> dict[str, Any]:
        now, loss = time.monotonic(), self._loss
        return {
            "history": self._history.moved(-now).facts(),
            "loss": loss and loss._replace(step=self.step).moved(-now)._asdict(),
            "heartbeat_timeout_s": self._options.heartbeat_timeout_s,
            "listed": listed,
            "endpoints": self._options.rdzv_endpoint,
            "electorate": self._electors.facts(link),
            "id": self.id,
            "name": socket.gethostname(),
            "address": self._options.local_addr,
            "port": port,
            "num_processes": self._options.nproc_per_node,
            "host_id": self._options.node_rank,
            "run_id": self._run_id,
            "generation": self.generation,
            "stepped": self._has_stepped,
        }


async def save_commit(resources: HostResources) -> dict[str, Any]:
    """Return the answer of `jdp/checkpoint/last_commit.py`; {} without a commit."""
    if not os.fstat(resources.commit_file).st_size:
        return {}
    resources.say(
        "the latest commit is being saved to the checkpoint directory. Ctrl-C skips that."
    )
    command = [sys.executable, "-m", "jdp.checkpoint.last_commit", str(resources.commit_file)]
    variables = {**resources.variables, "JAX_PLATFORMS": "cpu"}
    process = spawn.spawn(command, variables, pass_fds=[resources.commit_file])
    resources.guardian.add(process.pid)
    try:
        output, errors = await asyncio.to_thread(process.communicate)
        lines = output.decode().splitlines()
        if lines and process.returncode == 0:
            return json.loads(lines[-1])
        return {"error": errors.decode(errors="replace")[-1000:].strip()}
    finally:
        spawn.kill(process)
        resources.guardian.remove(process.pid)


class _CoordinatorPort:
    def __init__(self) -> None:
        self._socket = _bound()

    @property
    def number(self) -> int:
        return self._socket.getsockname()[1]

    def release(self) -> None:
        self._socket.close()

    def renew(self) -> int:
        self._socket.close()
        self._socket = _bound()
        return self.number


def _bound() -> socket.socket:
    if not socket.has_dualstack_ipv6():
        reserved = socket.socket()
        reserved.bind(("", 0))
        return reserved
    reserved = socket.socket(socket.AF_INET6)
    reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    reserved.bind(("::", 0))
    return reserved


# Between beats, at most.
BEAT_S = 0.2


# A script without `jdp.init()` may wait for others.
_FIRST_S = 10.0


class Outcome(NamedTuple):
    """How a run ended."""

    code: int
    why: str


class _First(NamedTuple):
    """A generation's first process here, and the assignments of its forks."""

    process: Process
    rest: tuple[Assignment, ...]
    later: asyncio.TimerHandle


class Agent:
    """This host's part in a run; `lead` gets this launcher's id when it is to lead."""

    def __init__(
        self,
        options: Options,
        token: str,
        rendezvous: Rendezvous,
        resources: HostResources,
        lead: Callable[[str], None],
    ) -> None:
        self.over: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._options, self._resources = options, resources
        self._port = _CoordinatorPort()
        self._run = _KnownRun(options)
        self._generation: LocalGeneration | None = None  # with processes here
        self._standbys = Standbys(
            options.num_standbys,
            start=lambda local_id, parent: self._start(local_id, None, parent),
            can_fork=lambda: resources.can_fork,
            ready=self._tell_ready,
            say=resources.say,
        )
        self._first: _First | None = None  # while the rest waits for it
        self._has_stepped = False  # whether each process finished a step
        self._signal: int | None = None
        self._was_signalled = False  # `_signal` may come from another host
        self._uses_jdp = False
        self._changed = asyncio.Event()
        self.search = LeaderSearch(
            *(rendezvous, options.heartbeat_timeout_s),
            generation=lambda: self._run.generation,
            lead=lambda: lead(self._run.id),
        )
        self._link = LeaderConnection(
            options,
            token,
            self.search,
            introduce=self._introduce,
            joined=self._joined,
            received=self._receive,
            lost=self._lost_leader,
            gave_up=functools.partial(self._finish, 1),
        )
        self._beats = start_task(self._beat())
        self._saver: asyncio.Task[None] | None = None

    def stop(self, number: int) -> None:
        """End the run at a signal; a second interrupt kills at once."""
        # A scheduler signals all hosts: that is one signal.
        at_once = number == signal.SIGINT and self._was_signalled
        self._was_signalled = True
        if not self._link.is_joined and self._generation is None:
            return self._finish(128 + number, f"{signal.Signals(number).name} while joining.")
        self._signal = number
        self._link.send("stop", signal=number, at_once=at_once)
        if at_once and self._generation is not None:
            self._generation.kill_processes()

    def show_stacks(self) -> None:
        """Print the stacks of this host's processes."""
        if self._generation is not None:
            self._generation.show_stacks([*self._generation.statuses()])

    async def leave(self, timeout_s: float = 5.0) -> None:
        """Leave the run once all processes have ended."""
        self._finish(1, "")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while (self._generation and self._generation.processes) or self._standbys:
                    self._changed.clear()
                    await self._changed.wait()
        self._beats.cancel()
        self._link.leave()
        self._port.release()

    def _introduce(self) -> dict[str, Any]:
        return self._run.introduce(self._link, self._port.number, self.search.own)

    def _joined(self, is_running: bool) -> None:
        self._has_stepped = is_running
        if is_running:
            self._standbys.fill()

    # A change would interrupt the first step, which may compile long.
    def _tell_ready(self) -> None:
        if self._has_stepped:
            self._link.send("ready", generation=self._run.generation)

    def _lost_leader(self, why: str) -> None:
        if self.over.done():
            return
        if self._generation is not None and self._generation.is_stopping:
            return  # the run ends anyway, and its processes may be saving
        lost = f"the leader is lost: {why}."
        self._run.record_loss(self.search.leader, why, self._link.silent_s)
        if self._signal is not None:
            return self._finish(128 + self._signal, with_code("JDP311", lost))
        wanted = "a leader" if self.search.is_elective else "it"
        lost += f" This host kills its processes and searches for {wanted} again."
        self._resources.say(with_code("JDP311", lost))
        if self._generation is not None:
            self._generation.kill_processes()
        else:
            self._link.join_again()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(min(BEAT_S, self._options.heartbeat_timeout_s / 5))
            self._resources.orphans.reap()
            news = self._generation.news() if self._generation else NO_NEWS
            self._link.beat(standbys=self._standbys.num_parked, **news)

    def _receive(self, kind: str, facts: dict[str, Any]) -> None:
        if self.over.done():
            return
        match kind:
            case "go":
                self._go(**facts)
            case "settled":
                self._run.record_past(facts["known"])
            case "stepped":
                self._run.record_step(facts["known"])
                self._has_stepped = True
                self._standbys.fill()
            case "stop":
                self._stop(facts["signal"])
            case "end" if self._generation is not None:
                self._generation.kill_processes()
            case "dump" if self._generation is not None:
                self._generation.show_stacks(**facts)
            case "resigned" if self._generation is None:
                self._link.follow_another()
            case "save commit":
                self._saver = start_task(self._save_commit())
            case "over":
                self._finish(**facts)

    async def _save_commit(self) -> None:
        self._link.send("commit saved", **await save_commit(self._resources))

    def _go(self, first: int, slots: list[int], known: dict[str, Any], **common: Any) -> None:
        number, run_id = common["generation"], common["run_id"]
        self._has_stepped = False
        self._run.record_generation(number, run_id, known, self._link.leader)
        if first == 0:
            self._port.release()  # process 0 listens there now
        self._generation = LocalGeneration(
            self._options,
            self._link.send,
            ended=self._ended,
            stuck=functools.partial(self._finish, 1),
            say=self._resources.say,
        )
        assignments = self._resources.assignments(first, slots, **common)
        while assignments and (process := self._standbys.take_standby()) is not None:
            process.assign(assignments.pop(0))
            process.go()
            self._generation.processes.append(process)
        if assignments and self._resources.can_fork:
            self._start_first(*assignments)
        else:
            self._start_rest(assignments, None)

    def _start_first(self, assignment: Assignment, *rest: Assignment) -> None:
        assert self._generation is not None
        process = self._start(assignment.local_id, assignment)
        self._generation.processes.append(process)
        later = asyncio.get_running_loop().call_later(_FIRST_S, self._end_first)
        self._first = _First(process, rest, later)

    def _end_first(self) -> None:
        """Start the rest and the standbys, and release the first process."""
        assert self._first is not None
        (process, rest, later), self._first = self._first, None
        later.cancel()
        if self._generation is not None and self._generation.is_running:
            if rest and not process.parked and process.popen.returncode is None:
                self._resources.say(
                    f"process {process.process_id} did not call jdp.init() within {_FIRST_S:g} "
                    "s, so the others start now, and run all of the script themselves."
                )
            parent = process if process.can_fork else None
            if process.popen.returncode in (None, 0):
                self._start_rest(rest, parent)
            if parent is not None:
                self._standbys.fill(parent)
        process.go()

    def _start_rest(self, assignments: Iterable[Assignment], parent: Process | None) -> None:
        assert self._generation is not None
        for assignment in assignments:
            process = self._start(assignment.local_id, assignment, parent)
            process.go()
            self._generation.processes.append(process)

    def _start(
        self, local_id: int, assignment: Assignment | None, parent: Process | None = None
    ) -> Process:
        return Process(self._resources, local_id, assignment, self._told, self._died, parent)

    def _told(self, process: Process, kind: str, facts: dict[str, Any]) -> None:
        self._uses_jdp = self._uses_jdp or kind == "parked"
        if process in self._standbys:
            if kind == "parked":
                self._standbys.record_parked()
        elif self._generation is not None:
            self._generation.record_told(process, kind, facts)
            if kind == "parked" and self._first is not None and self._first.process is process:
                self._end_first()

    def _died(self, process: Process) -> None:
        self._changed.set()
        if self._first is not None and self._first.process is process:
            self._end_first()
        if process in self._standbys:
            self._standbys.record_exit(process)
        elif self._generation is not None:
            self._generation.record_exit(process)

    def _ended(self) -> None:
        generation, self._generation = self._generation, None
        assert generation is not None
        self._run.step = generation.step
        if self.over.done():
            return
        if not self._link.is_joined and (generation.saved or self._signal is not None):
            code = SAVED if generation.saved else 128 + (self._signal or signal.SIGTERM)
            return self._finish(code, "the leader was lost while the run ended.")
        port = self._port.renew()
        if not self._link.is_joined:
            return self._link.join_again()
        self._link.send("ended", generation=self._run.generation, port=port, step=generation.step)

    def _stop(self, number: int | None) -> None:
        self._signal = self._signal or number
        self._standbys.kill_all()
        if self._generation is not None:
            self._generation.stop(number)

    def _finish(self, code: int, why: str) -> None:
        if self.over.done():
            return
        if code == 0 and not self._uses_jdp and len(self._resources.gpus) > 1:
            self._resources.say("the script never called jdp.init(): each process ran alone.")
        self._standbys.kill_all()
        if self._saver is not None:
            self._saver.cancel()
        if self._generation is not None:
            self._generation.kill_now()
        self.over.set_result(Outcome(code, why))
