"""Generations over hosts: who takes part, who is which process, and what happens after a failure.

One launcher leads: the one that listens where the hosts meet. Its own processes are looked after by
a `Host` as everyone's are, so a run on one host is the case of a single `RemoteHost`.
`jdp/worker/messages.py` lists the messages between hosts and the leader.

States, and what ends them:

  gathering     no generation lives. Until enough hosts are there (a generation), or the join
                timeout or a signal (over)
  a generation  see `generation.py`. Until no host has processes of it (gathering, or over if
                nothing is to be tried again)
  over          the exit code is known and told. Until the hosts have left

Fencing: a host none of whose beats was answered for `heartbeat_timeout_s` kills its processes, and
the leader takes it for dead when it has heard nothing for 1.5 times that. So no process of an old
generation runs beside a new one, whatever the network does. A host whose connection is closed has
ended, or does so now.
"""

import asyncio
import functools
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from jdp.launch.leader import failure, rank_assignment
from jdp.launch.leader.admission import Admission, Refusal
from jdp.launch.leader.event_log import Events
from jdp.launch.leader.generation import Generation, State
from jdp.launch.leader.rank_assignment import Gathering, Plan
from jdp.launch.leader.recovery import Recoveries
from jdp.launch.leader.remote_host import RemoteHost
from jdp.launch.options.options import Options
from jdp.launch.transport.connection import Channel
from jdp.worker.exit_codes import SAVED
from jdp.worker.progress_board import ProcessStatus

# How often time itself is looked at: for stalls and for hosts that are silent.
LOOK_S = 0.2


class Leader:
    """Decides for all hosts.

    Args:
      options: of the command line.
      token: of the run.
      listener: a listening socket where hosts join, which the leader closes.
      say: prints a line for people who watch the run.

    Attributes:
      home: id of the host that is in this very process, once there is one.
    """

    def __init__(
        self,
        options: Options,
        token: str,
        listener: socket.socket,
        say: Callable[[str], None],
    ) -> None:
        self.home = ""
        self._options, self._say = options, say
        self._events = Events(options.log_dir and options.log_dir / "events.jsonl", say)
        self._is_over = False
        self._gathering = Gathering(options, is_start=True)
        self._remotes: list[RemoteHost] = []
        self._generation: Generation | None = None  # the one that lives
        self._number = -1  # of the last generation
        self._run_id = options.rdzv_id
        self._signal: int | None = None
        self._recoveries = Recoveries(options.max_restarts, say, self._events)
        self._all_left = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._admission = Admission(listener, token, self._refusal, self._admit)
        self._consider()

    async def close(self, code: int, why: str, timeout_s: float = 5.0) -> None:
        """Report to all hosts how the run ended, wait until they know, and stop.

        Args:
          code: exit code, if the run is not over yet.
          why: for people, in that case.
          timeout_s: how long to wait.
        """
        if not self._is_over:
            self._over(code, why)
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_left.wait()
        except TimeoutError:
            pass  # Hosts that hear nothing of the end find out that we are gone.
        self._admission.close()
        if self._timer is not None:
            self._timer.cancel()
        for remote in self._remotes:
            remote.channel.close()
        self._events.close()

    # --- who takes part ---

    def _refusal(self, facts: dict[str, Any]) -> Refusal | None:
        generation = self._generation
        if self._is_over or (generation is not None and generation.state is State.STOPPING):
            return Refusal("the run is over.", True)
        run_ids = {facts["run_id"], self._options.rdzv_id} - {None}
        if len(run_ids) > 1:
            return Refusal(
                f"its --rdzv-id is {facts['run_id']!r}, and that of this run "
                f"{self._options.rdzv_id!r}.",
                True,
            )
        for remote in [*self._remotes]:
            if remote.id == facts["id"]:
                self._remove(remote, "it came back")
            elif remote.host_id == facts["host_id"] is not None:
                return Refusal(f"host {remote.host_id} is there already ({remote.name})", False)
        if len(self._remotes) == self._options.nnodes[1]:
            return Refusal(f"all {len(self._remotes)} hosts are there", False)
        return None

    def _admit(self, channel: Channel, facts: dict[str, Any], proof: str) -> None:
        remote = RemoteHost(channel, facts)
        channel.received = functools.partial(self._receive, remote)
        channel.closed = functools.partial(self._left, remote)
        # A leader that was started again goes on where the hosts are.
        self._number = max(self._number, remote.generation)
        self._recoveries.stepped = self._recoveries.stepped or facts["stepped"]
        self._run_id = self._run_id or facts["run_id"]
        self._remotes.append(remote)
        channel.send("welcome", proof=proof, is_running=self._generation is not None)
        most = self._options.nnodes[1]
        if most > 1:
            self._say(f"host {remote.name} joined: {len(self._remotes)} of {most}.")
        self._events.write("host joined", host=remote.name, num_hosts=len(self._remotes))
        self._consider()

    def _left(self, remote: RemoteHost, why: str) -> None:
        self._remove(remote, why)
        self._consider()

    def _remove(self, remote: RemoteHost, why: str) -> None:
        if remote not in self._remotes:
            return
        remote.channel.close()
        self._remotes.remove(remote)
        self._all_left_if_so()
        if self._is_over:
            return
        self._events.write("host lost", host=remote.name, why=why)
        lost = failure.loss_of_host(remote.name, why, time.monotonic() - remote.heard)
        if self._generation is not None and remote in self._generation.parts:
            self._generation.record_left(remote, None)
            self._generation.fail(lost)
        elif self._options.nnodes[1] > 1:
            self._say(f"{lost.text}.")

    def _all_left_if_so(self) -> None:
        if {remote.id for remote in self._remotes} <= {self.home}:
            self._all_left.set()

    def _receive(self, remote: RemoteHost, kind: str, facts: dict[str, Any]) -> None:
        remote.heard = time.monotonic()
        match kind:
            case "beat":
                # Nothing to decide at once; with many hosts there are many of these.
                return self._heard(remote, **facts)
            case "ready":
                self._ready(remote, **facts)
            case "told" if self._generation is not None:
                self._told(self._generation, remote, **facts)
            case "exited" if self._generation is not None:
                self._generation.record_exit(remote, **facts)
            case "ended":
                self._ended(remote, **facts)
            case "stop":
                self._asked_to_stop(facts["signal"], facts["at_once"])
        self._consider()

    def _heard(self, remote: RemoteHost, at: float, statuses: dict[str, list]) -> None:
        remote.channel.send("beat", at=at)
        if self._generation is not None:
            ahead_s = remote.heard - at
            moved = {int(i): ProcessStatus(*each).moved(ahead_s) for i, each in statuses.items()}
            self._generation.record_statuses(remote, moved)

    def _ready(self, remote: RemoteHost, generation: int) -> None:
        if generation == remote.generation and not remote.is_ready:
            remote.is_ready = True
            self._events.write("ready", generation=generation, host=remote.name)

    # --- what happens in a generation ---

    def _told(self, generation: Generation, remote: RemoteHost, what: str, **facts: Any) -> None:
        if not generation.note(remote, what=what, **facts):
            return
        # Now all processes have told it.
        self._recoveries.mark(what, generation)
        if what == "first_step":
            for each in self._remotes:  # also those that came while no generation was there
                each.channel.send("stepped")

    def _ended(self, remote: RemoteHost, generation: int, port: int, step: int | None) -> None:
        remote.port = port
        if self._generation is not None and generation == self._generation.number:
            self._generation.record_left(remote, step)

    def _asked_to_stop(self, number: int, at_once: bool) -> None:
        self._signal = self._signal or number
        generation = self._generation
        if at_once and generation is not None and generation.state is State.STOPPING:
            generation.end()

    # --- decisions ---

    # Look at everything and do what is to be done: after each message, and when time has passed.
    def _consider(self) -> None:
        if self._is_over:
            return
        now = time.monotonic()
        silence_s = 1.5 * self._options.heartbeat_timeout_s
        for remote in [*self._remotes]:
            if remote.id != self.home and now - remote.heard > silence_s:
                self._remove(remote, f"silent for {now - remote.heard:.1f} s")
        generation = self._generation
        if generation is not None and not generation.parts:
            self._generation = None
            self._decide(generation)
        elif generation is not None and generation.state is State.RUNNING:
            self._look(now, generation)
        if self._generation is None and not self._is_over:
            self._gather(now)
        self._wake(now)

    # Call _consider when there may be something to do.
    def _wake(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        free_at = [slot.free_at for remote in self._remotes for slot in remote.slots]
        soonest = min([now + LOOK_S, *(at for at in free_at if at > now)])
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(soonest - now, self._consider)

    def _look(self, now: float, generation: Generation) -> None:
        generation.look(now)
        if self._signal is not None or generation.saved:
            generation.stop(self._signal)
        elif generation.cause is not None:
            generation.end()
        elif generation.may_grow and self._can_grow(now, generation):
            generation.fail(failure.growth())
            generation.end()

    # Nothing of the generation is left.
    def _decide(self, generation: Generation) -> None:
        why = generation.cause
        text = why.text if why is not None else ""
        self._events.write("generation ended", generation=generation.number, cause=text)
        if generation.saved:
            self._over(SAVED, "it saved and ended; the same command with --resume goes on there.")
        elif self._signal is not None:
            self._over(128 + self._signal, "")
        elif why is None or generation.is_done:
            before = self._recoveries.text
            self._over(0, before and f"{before}. There was no step left to make after that.")
        elif why_not := self._recoveries.why_not(why):
            self._over(why.code, f"{why.full_text}\n{why_not}")
        else:
            generation.blame(time.monotonic())
            self._recoveries.begin(why, generation)
            self._gathering = Gathering(self._options, is_start=False)

    def _over(self, code: int, why: str) -> None:
        self._is_over = True
        self._events.write("over", code=code, why=why)
        for remote in self._remotes:
            remote.channel.send("over", code=code, why=why)
        self._all_left_if_so()

    # --- forming a generation ---

    def _gather(self, now: float) -> None:
        if self._signal is not None:
            return self._over(128 + self._signal, "")
        if chosen := self._gathering.plan(self._remotes, now):
            self._form(chosen)
        elif why := self._gathering.why_in_vain(self._remotes, now):
            self._over(1, why)

    def _can_grow(self, now: float, generation: Generation) -> bool:
        next_one = rank_assignment.make(self._remotes, self._options.nnodes[0], now) or []
        is_quick = all(part.remote.is_ready for part in next_one)
        return is_quick and rank_assignment.size(next_one) > generation.size

    def _form(self, chosen: Plan) -> None:
        self._number += 1
        self._run_id = self._run_id or secrets.token_hex(4)
        self._generation = Generation(self._number, chosen, self._options, self._say, self._events)
        self._generation.start(
            resumes=self._number > 0 or self._options.resume,
            run_id=self._run_id,
            coordinator=rank_assignment.coordinator(chosen, self.home),
        )
