"""The processes of this host: started, watched and ended as the leader says.

States, and what ends them:

  JOINING   it looks for the leader; no process of a generation lives. Until it is let in (WAITING),
            or the join timeout (OVER)
  WAITING   it has joined. Until `go` (RUNNING)
  RUNNING   its part of a generation lives. Until a process fails or `end` (ENDING), one has saved
            or `stop` (STOPPING), all have ended with code 0 (WAITING)
  STOPPING  its processes were asked to end. Until all have (WAITING), or `end`, or
            `shutdown_timeout_s` if none of them is still saving then (ENDING)
  ENDING    its processes were killed. Until all were waited for (WAITING)
  OVER      the run is over for this host

If the leader is lost, the others go on without this host. So its processes are killed, and when
they have ended the host is JOINING again; standbys and commit memory stay. Only what is STOPPING
has its time, since what it saves counts; the run is OVER then. `over` ends any state.

Standbys are started when every process of a generation has finished its first step, or when the
host joins a run that is going on, and killed by `stop` and at the end.
"""

import asyncio
import contextlib
import enum
import secrets
import signal
import socket
import time
from typing import Any, NamedTuple

from jdp.launch.board import BEFORE
from jdp.launch.exits import SAVED
from jdp.launch.link import Link, start_task
from jdp.launch.member import Assignment
from jdp.launch.options import Options
from jdp.launch.process import Kit, Process
from jdp.launch.standbys import Standbys
from jdp.launch.watch import SAVING, Watch

State = enum.Enum("State", "JOINING WAITING RUNNING STOPPING ENDING OVER")

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
      kit: what processes are started with.
      leads: the leader is in this very process, and can't be lost alone.

    Attributes:
      id: tells this launcher from all others.
      over: done when the run is over for this host.
    """

    def __init__(
        self, options: Options, token: str, address: tuple[str, int], kit: Kit, leads: bool
    ) -> None:
        self.id = secrets.token_hex(8)
        self.over: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._options, self._kit = options, kit
        self._state = State.JOINING
        self._port = _reserve_port()
        self._generation, self._stepped, self._run_id = -1, False, options.rdzv_id
        self._processes: list[Process] = []  # of the generation
        self._standbys = Standbys(
            options.num_standbys,
            start=lambda local_id: self._start(local_id, None),
            ready=lambda: self._link.send("ready", generation=self._generation),
            say=kit.say,
        )
        self._step: int | None = None  # the last one that all processes of the generation made here
        self._signal: int | None = None
        self._was_signalled = False  # this very launcher
        self._saved = False  # one of its processes did, and ended
        self._watch = Watch(options.timeout_s)  # knows how long a process may save
        self._has_asked = False  # one of its processes, which it is
        self._changed = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None
        self._link = Link(
            options,
            token,
            address,
            leads,
            introduce=self._introduce,
            joined=self._joined,
            received=self._receive,
            lost=self._lost_leader,
            gave_up=lambda why: self._finish(1, why),
        )
        self._beats = start_task(self._beat())

    def stop(self, number: int) -> None:
        """End the run because this launcher got a signal; an interrupt after that kills at once.

        Args:
          number: of the signal.
        """
        # That others were signalled, too, is no second signal: a scheduler signals all hosts.
        at_once = number == signal.SIGINT and self._was_signalled
        self._was_signalled = True
        if self._state is State.JOINING:
            return self._finish(128 + number, f"{signal.Signals(number).name} while joining.")
        self._signal = number
        self._link.send("stop", signal=number, at_once=at_once)
        if at_once:
            self._end()

    async def close(self, timeout_s: float = 5.0) -> None:
        """Stop looking after anything, when all processes have been waited for.

        Args:
          timeout_s: for how long; what is left then, the guardian will complain about.
        """
        self._finish(1, "")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._processes or self._standbys:
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
            "generation": self._generation,
            "stepped": self._stepped,
        }

    def _joined(self, is_running: bool) -> None:
        self._state = State.WAITING
        if is_running:
            self._standbys.fill()

    def _lost_leader(self, why: str) -> None:
        if self._state is State.OVER:
            return
        if self._state is State.STOPPING:
            return  # The run ends anyway, and what its processes save is worth the wait.
        if self._signal is not None:
            return self._finish(128 + self._signal, f"the leader is lost: {why}")
        self._kit.say(
            f"the leader is lost ({why}). This host ends its processes and looks for it again."
        )
        if self._processes:
            self._kill_processes()
        else:
            self._join_again()

    def _join_again(self) -> None:
        self._state = State.JOINING
        self._link.join_again()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(min(BEAT_S, self._options.heartbeat_timeout_s / 5))
            self._link.beat(where={p.process_id: p.slot.read() for p in self._processes})

    def _receive(self, kind: str, facts: dict[str, Any]) -> None:
        if self._state is State.OVER:
            return
        match kind:
            case "go":
                self._go(**facts)
            case "stepped":
                self._stepped = True
                self._standbys.fill()
            case "end":
                self._end()
            case "stop":
                self._stop(**facts)
            case "dump":
                self._dump(**facts)
            case "over":
                self._finish(**facts)

    # --- a generation ---

    def _go(self, first: int, slots: list[int], **common: Any) -> None:
        if first == 0:
            self._port.close()  # from now on process 0's
        self._state = State.RUNNING
        self._generation, self._run_id, self._step = common["generation"], common["run_id"], None
        for local_id, slot in enumerate(slots):
            assignment = Assignment(
                process_id=first + local_id,
                local_id=local_id,
                num_local=len(slots),
                gpus=self._kit.gpus[slot],
                **common,
            )
            process = self._standbys.take()
            if process is None:
                process = self._start(local_id, assignment)
            else:
                process.go(assignment)
            self._processes.append(process)

    def _start(self, local_id: int, assignment: Assignment | None) -> Process:
        return Process(self._kit, local_id, assignment, self._told, self._died)

    def _told(self, process: Process, kind: str, facts: dict[str, Any]) -> None:
        self._has_asked = self._has_asked or kind == "parked"
        if process.assignment is None:
            if kind == "parked":
                self._standbys.note_parked()
        elif kind == "failed":
            # It is about to exit, and nothing is gained by waiting for that, unless it is alone and
            # has things of its own to do. But if another one dies, what this one raised is that it
            # lost it.
            is_alone = process.assignment.num_processes == 1
            if not is_alone and not any(other.is_dying() for other in self._processes):
                self._fail(process, facts["code"])
        elif kind == "ended" and process.traceback is not None:
            pass  # by failing
        elif kind != "parked":
            who = {"process_id": process.process_id, "pid": process.popen.pid}
            self._link.send("told", **who, what=kind, facts=facts)

    def _died(self, process: Process) -> None:
        self._changed.set()
        if process in self._standbys:
            self._standbys.note_death(process)
        elif process in self._processes:
            self._lost_process(process)

    def _lost_process(self, process: Process) -> None:
        # What others have told before is to be known before this, which may end them.
        for other in [*self._processes]:
            other.read()
        self._note_step(process)
        self._processes.remove(process)
        code = process.popen.returncode
        self._saved = self._saved or code == SAVED
        if self._state is State.STOPPING or code == 0 or process.died_first:
            self._tell_exit(process, code)
        elif code == SAVED:
            # The others are about to: whatever they end with now, nothing has failed.
            self._stop(None)
            self._tell_exit(process, code)
        else:
            self._fail(process, code)
        if not self._processes:
            self._all_ended()

    def _fail(self, process: Process, code: int) -> None:
        if self._state is State.RUNNING:
            self._kill_processes()
            process.died_first = False  # or it would be told twice
            self._tell_exit(process, code)

    def _tell_exit(self, process: Process, code: int) -> None:
        if self._state is State.OVER:
            return
        self._link.send(
            "exited",
            process_id=process.process_id,
            pid=process.popen.pid,
            returncode=code,
            traceback=process.traceback,
            last_lines=process.last_lines() if code not in (0, SAVED) else [],
        )

    def _note_step(self, process: Process) -> None:
        step = process.restored_step + process.slot.read().steps
        self._step = step if self._step is None else min(self._step, step)

    def _kill_processes(self) -> None:
        self._state = State.ENDING
        for process in self._processes:
            process.died_first = process.is_dying()
        for process in self._processes:
            self._note_step(process)
            process.kill()
        self._set_deadline(self._still_alive)

    def _still_alive(self) -> None:
        pids = [process.popen.pid for process in self._processes]
        self._finish(
            1,
            f"the processes {pids} did not end within {self._options.shutdown_timeout_s:g} s of "
            "SIGKILL. They wait for a disk or a driver, and others can't have their devices.",
        )

    def _all_ended(self) -> None:
        self._set_deadline(None)
        if self._state is State.OVER:
            return
        if not self._link.is_joined and (self._saved or self._signal is not None):
            code = SAVED if self._saved else 128 + (self._signal or signal.SIGTERM)
            return self._finish(code, "the leader was lost while the run ended.")
        self._port.close()
        self._port = _reserve_port()
        if not self._link.is_joined:
            return self._join_again()
        self._state = State.WAITING
        port = self._port.getsockname()[1]
        self._link.send("ended", generation=self._generation, port=port, step=self._step)

    def _end(self) -> None:
        if self._state in (State.RUNNING, State.STOPPING):
            self._kill_processes()

    def _stop(self, signal: int | None) -> None:
        self._signal = self._signal or signal
        self._standbys.kill()
        if self._state is State.RUNNING:
            self._state = State.STOPPING
            self._set_deadline(self._end_unless_saving)
        if self._state is State.STOPPING and signal is not None:
            for process in self._processes:
                process.signal(signal)

    # What is being saved is worth more than the time.
    def _end_unless_saving(self) -> None:
        now = time.monotonic()
        places = [process.slot.read() for process in self._processes]
        if any(it.phase == SAVING and self._watch.left_s(now, it) > 0 for it in places):
            self._set_deadline(self._end_unless_saving, BEAT_S)
        else:
            self._end()

    def dump(self) -> None:
        """Have all processes of this host show their stacks."""
        self._dump([process.process_id for process in self._processes])

    # Each shows its Python stacks on standard error, also one that never lets go of the GIL. One
    # that has not come to jdp.init() has no handler yet, and would die.
    def _dump(self, process_ids: list[int]) -> None:
        for process in self._processes:
            if process.process_id in process_ids:  # those that the others wait for
                process.reveal()
            if process.slot.read().phase not in ("", BEFORE):
                process.signal(signal.SIGQUIT)

    def _finish(self, code: int, why: str) -> None:
        if self._state is State.OVER:
            return
        self._state = State.OVER
        if code == 0 and not self._has_asked and len(self._kit.gpus) > 1:
            self._kit.say("the script never called jdp.init(): each process ran by itself.")
        self._set_deadline(None)
        self._standbys.kill()
        for process in self._processes:
            process.kill()
        self.over.set_result(Outcome(code, why))

    def _set_deadline(self, call: Any, after_s: float | None = None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if call is not None:
            loop = asyncio.get_running_loop()
            after_s = self._options.shutdown_timeout_s if after_s is None else after_s
            self._deadline = loop.call_later(after_s, call)


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
