"""This host's part in a run: it joins, and starts, watches and ends processes as the leader says.

What it is in, and what ends that:

  joining       it looks for the leader. Until it is let in (waiting), or the join timeout (over)
  waiting       it has joined. Until `go` (a generation)
  a generation  some of its processes are there, see `local_generation.py`. Until all of them were
                waited for (waiting)
  over          the run is over for this host

If the leader is lost, the others go on without this host. So its processes are killed, and when
they have ended the host is joining again; standbys and commit memory stay. Only those that were
asked to end have their time, since what they save counts; the run is over then. `over` ends
whatever it is in.

Standbys are started when every process of a generation has finished its first step, or when the
host joins a run that is going on, and killed by `stop` and at the end.
"""

import asyncio
import contextlib
import secrets
import signal
import socket
from typing import Any, NamedTuple

from jdp.launch.host.leader_connection import Link, start_task
from jdp.launch.host.local_generation import LocalGeneration
from jdp.launch.host.standby_pool import Standbys
from jdp.launch.host.worker_process import HostResources, Process
from jdp.launch.options.options import Options
from jdp.worker.exit_codes import SAVED
from jdp.worker.launcher_client import Assignment

# Between two beats; there are at least five of them in `heartbeat_timeout_s`.
BEAT_S = 0.2


class Outcome(NamedTuple):
    """How a run ended: its exit code and why, for people."""

    code: int
    why: str


class Host:
    """This host's part in a run.

    Args:
      options: of the command line.
      token: of the run.
      address: where the leader listens.
      resources: what processes are started with.
      leads: the leader is in this very process, and can't be lost alone.

    Attributes:
      id: tells this launcher from all others.
      over: done when the run is over for this host.
    """

    def __init__(
        self,
        options: Options,
        token: str,
        address: tuple[str, int],
        resources: HostResources,
        leads: bool,
    ) -> None:
        self.id = secrets.token_hex(8)
        self.over: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._options, self._resources = options, resources
        self._port = _reserve_port()
        self._number, self._stepped, self._run_id = -1, False, options.rdzv_id
        self._generation: LocalGeneration | None = None  # the one that has processes here
        self._standbys = Standbys(
            options.num_standbys,
            start=lambda local_id: self._start(local_id, None),
            ready=lambda: self._link.send("ready", generation=self._number),
            say=resources.say,
        )
        self._signal: int | None = None
        self._was_signalled = False  # this very launcher
        self._has_asked = False  # one of its processes, which it is
        self._changed = asyncio.Event()
        self._link = Link(
            options,
            token,
            address,
            leads,
            introduce=self._introduce,
            joined=self._joined,
            received=self._receive,
            lost=self._lost_leader,
            gave_up=self._give_up,
        )
        self._beats = start_task(self._beat())

    def stop(self, number: int) -> None:
        """End the run because this launcher got a signal; an interrupt after that kills at once.

        Args:
          number: of the signal.
        """
        # That others were signalled, too, is not a second signal: a scheduler signals all hosts.
        at_once = number == signal.SIGINT and self._was_signalled
        self._was_signalled = True
        if not self._link.is_joined and self._generation is None:
            return self._finish(128 + number, f"{signal.Signals(number).name} while joining.")
        self._signal = number
        self._link.send("stop", signal=number, at_once=at_once)
        if at_once and self._generation is not None:
            self._generation.end()

    def dump(self) -> None:
        """Have all processes of this host show their stacks."""
        if self._generation is not None:
            self._generation.dump([*self._generation.statuses()])

    async def close(self, timeout_s: float = 5.0) -> None:
        """Stop looking after anything, when all processes have been waited for.

        Args:
          timeout_s: for how long; what is left then, the guardian will complain about.
        """
        self._finish(1, "")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while (self._generation and self._generation.processes) or self._standbys:
                    self._changed.clear()
                    await self._changed.wait()
        self._beats.cancel()
        self._link.close()
        self._port.close()

    # --- the leader ---

    def _introduce(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": socket.gethostname(),
            "address": self._options.local_addr,
            "port": self._port.getsockname()[1],
            "num_processes": self._options.nproc_per_node,
            "host_id": self._options.node_rank,
            "run_id": self._run_id,
            "generation": self._number,
            "stepped": self._stepped,
        }

    def _joined(self, is_running: bool) -> None:
        if is_running:
            self._standbys.fill()

    def _lost_leader(self, why: str) -> None:
        if self.over.done():
            return
        if self._generation is not None and self._generation.is_stopping:
            return  # The run ends anyway, and what its processes save is worth the wait.
        if self._signal is not None:
            return self._finish(128 + self._signal, f"the leader is lost: {why}")
        self._resources.say(
            f"the leader is lost ({why}). This host ends its processes and looks for it again."
        )
        if self._generation is not None:
            self._generation.end()
        else:
            self._link.join_again()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(min(BEAT_S, self._options.heartbeat_timeout_s / 5))
            self._link.beat(statuses=self._generation.statuses() if self._generation else {})

    def _receive(self, kind: str, facts: dict[str, Any]) -> None:
        if self.over.done():
            return
        match kind:
            case "go":
                self._go(**facts)
            case "stepped":
                self._stepped = True
                self._standbys.fill()
            case "stop":
                self._stop(facts["signal"])
            case "end" if self._generation is not None:
                self._generation.end()
            case "dump" if self._generation is not None:
                self._generation.dump(**facts)
            case "over":
                self._finish(**facts)

    # --- processes ---

    def _go(self, first: int, slots: list[int], **common: Any) -> None:
        if first == 0:
            self._port.close()  # from now on process 0's
        self._number, self._run_id = common["generation"], common["run_id"]
        self._generation = LocalGeneration(
            self._options, self._link.send, ended=self._ended, stuck=self._give_up
        )
        for local_id, slot in enumerate(slots):
            assignment = Assignment(
                process_id=first + local_id,
                local_id=local_id,
                num_local=len(slots),
                gpus=self._resources.gpus[slot],
                **common,
            )
            process = self._standbys.take()
            if process is None:
                process = self._start(local_id, assignment)
            else:
                process.go(assignment)
            self._generation.processes.append(process)

    def _start(self, local_id: int, assignment: Assignment | None) -> Process:
        return Process(self._resources, local_id, assignment, self._told, self._died)

    def _told(self, process: Process, kind: str, facts: dict[str, Any]) -> None:
        self._has_asked = self._has_asked or kind == "parked"
        if process in self._standbys:
            if kind == "parked":
                self._standbys.note_parked()
        elif self._generation is not None:
            self._generation.note(process, kind, facts)

    def _died(self, process: Process) -> None:
        self._changed.set()
        if process in self._standbys:
            self._standbys.note_death(process)
        elif self._generation is not None:
            self._generation.note_death(process)

    # None of its processes is left.
    def _ended(self) -> None:
        generation, self._generation = self._generation, None
        assert generation is not None
        if self.over.done():
            return
        if not self._link.is_joined and (generation.saved or self._signal is not None):
            code = SAVED if generation.saved else 128 + (self._signal or signal.SIGTERM)
            return self._finish(code, "the leader was lost while the run ended.")
        self._port.close()
        self._port = _reserve_port()
        if not self._link.is_joined:
            return self._link.join_again()
        port = self._port.getsockname()[1]
        self._link.send("ended", generation=self._number, port=port, step=generation.step)

    def _stop(self, number: int | None) -> None:
        self._signal = self._signal or number
        self._standbys.kill()
        if self._generation is not None:
            self._generation.stop(number)

    def _give_up(self, why: str) -> None:
        self._finish(1, why)

    def _finish(self, code: int, why: str) -> None:
        if self.over.done():
            return
        if code == 0 and not self._has_asked and len(self._resources.gpus) > 1:
            self._resources.say("the script never called jdp.init(): each process ran by itself.")
        self._standbys.kill()
        if self._generation is not None:
            self._generation.kill()
        self.over.set_result(Outcome(code, why))


# A port for process 0 of the next generation, should that be here; nobody else gets it meanwhile.
def _reserve_port() -> socket.socket:
    if not socket.has_dualstack_ipv6():
        reserved = socket.socket()
        reserved.bind(("", 0))
        return reserved
    reserved = socket.socket(socket.AF_INET6)
    reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    reserved.bind(("::", 0))
    return reserved
