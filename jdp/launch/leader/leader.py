"""The leader of a run: it begins generations on hosts, and recovers after a failure.

The launcher that listens at the rendezvous address leads. If there are several addresses, the hosts
choose one (`jdp/launch/host/leader_search.py`), which may form the generations for which it has a
quorum (`jdp/launch/electorate.py`). A `Agent` manages its own processes, as on any other host, so a
run on one host has a single `RemoteHost`.
`jdp/worker/messages.py` lists the messages between hosts and the leader.

States, and what ends them:

  gathering     no generation is running. Until enough hosts have joined (a generation), or the join
                timeout or a signal (over)
  a generation  see `generation.py`. Until no host has processes of it (gathering, or over if
                the run does not continue)
  over          the exit code is known. Until the hosts have left

Fencing: a host kills its processes if no beat is answered for `heartbeat_timeout_s`, and the leader
declares a host lost after 1.5 times that without a message. So processes of an old generation never
run alongside a new one, whatever the network does. A host whose connection is closed has exited or
kills its processes immediately.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

from jdp.launch.leader import failure, rank_assignment
from jdp.launch.leader.electors import Electors
from jdp.launch.leader.event_log import Events
from jdp.launch.leader.failure import Cause
from jdp.launch.leader.generation import Generation, State
from jdp.launch.leader.membership import Membership
from jdp.launch.leader.metrics_endpoint import RunMetrics
from jdp.launch.leader.rank_assignment import Gathering, Plan
from jdp.launch.leader.recovery import Recoveries
from jdp.launch.leader.remote_host import RemoteHost
from jdp.launch.leader.run_end import RunEnd
from jdp.launch.leader.run_report import RunReport
from jdp.launch.leader.succession import Succession
from jdp.launch.options.options import Options
from jdp.worker.run_summary import RunSummary

# Interval in seconds between checks for stalls and silent hosts.
LOOK_S = 0.2


class Leader:
    """Decides for all hosts.

    `show` gets how far the run is, the others are of `Membership`.
    """

    def __init__(
        self,
        options: Options,
        token: str,
        listener: socket.socket,
        say: Callable[[str], None],
        show: Callable[[RunSummary], None],
        claim: Callable[[], list[int]] = lambda: [],
    ) -> None:
        self._options, self._say = options, say
        self._events = Events(options.log_dir and options.log_dir / "events.jsonl", say)
        self._electors = Electors(len(options.endpoints) or 1)
        self._gathering = Gathering(options, True, self._electors)
        self._generation: Generation | None = None  # the running one
        self._has_restored = False  # whether a process may have begun to keep states of this run
        self._signal: int | None = None
        self._report = RunReport(show, self._events)
        self._recoveries = Recoveries(options, say, self._events, self._report)
        self._succession = Succession(options.rdzv_id, self._electors, self._recoveries)
        self._timer: asyncio.TimerHandle | None = None
        self.members = Membership(
            *(options, token, listener, say, self._events),
            *(self._joined, self._receive, self._lost, self._died, claim),
        )
        self._end = RunEnd(self.members, self._events, self._report, self._recoveries)
        self._consider()

    @property
    def number(self) -> int:
        """The number of the last generation."""
        return self._succession.number

    @property
    def has_generation(self) -> bool:
        """Whether a generation is running."""
        return self._generation is not None

    def metrics(self) -> RunMetrics:
        """Return the numbers of the run now."""
        return RunMetrics(
            self.number,
            sum(remote.standbys for remote in self.members.remotes),
            () if self._generation is None else self._generation.process_metrics(),
            self._report.history(),
            self._report.summary(),
        )

    def give_up(self, why: str) -> None:
        """End the run with an error."""
        self._end.give_up(1, why)

    def resign(self) -> None:
        """Stop leading, since another one leads; no generation may be running."""
        self.members.resign()
        self._stop()

    async def finish_run(self, code: int, why: str, timeout_s: float = 5.0) -> None:
        """End the run, unless it is over, wait until all hosts have left, and stop."""
        if not self.members.is_over:
            self._end.finish(code, why)
        await self.members.end_connections(timeout_s)
        self._stop()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._events.close_file()

    def _joined(self, remote: RemoteHost, facts: dict[str, Any]) -> bool:
        self._succession.record_join(remote, facts)
        self._has_restored |= remote.generation >= 0  # which another leader has led
        asyncio.get_running_loop().call_soon(self._consider)
        return self._generation is not None

    def _lost(self, remote: RemoteHost, why: Cause) -> None:
        if self._generation is not None and remote in self._generation.parts:
            self._generation.record_left(remote, None)
            self._generation.fail(why)
        elif self._options.nnodes[1] > 1:
            self._say(f"{why.text}.")
        asyncio.get_running_loop().call_soon(self._consider)

    def _died(self, remote: RemoteHost) -> None:
        self._electors.record_death(remote)
        self._consider()

    def _receive(self, remote: RemoteHost, kind: str, facts: dict[str, Any]) -> None:
        remote.heard = time.monotonic()
        match kind:
            case "beat":  # frequent with many hosts, and never urgent
                return self._heard(remote, **facts)
            case "ready" if remote.becomes_ready(**facts):
                self._events.write("ready", generation=remote.generation, host=remote.name)
            case "told" if self._generation is not None:
                self._told(self._generation, remote, **facts)
            case "exited" if self._generation is not None:
                self._generation.record_exit(remote, **facts)
            case "ended":
                self._ended(remote, **facts)
            case "commit saved":
                self._end.record_saved(remote, facts)
            case "nccl":
                self._say(facts["report"])
            case "stop":
                self._asked_to_stop(facts["signal"], facts["at_once"])
        self._consider()

    def _heard(self, remote: RemoteHost, at: float, standbys: int, **news: dict[str, Any]) -> None:
        remote.channel.send("beat", at=at)
        remote.standbys = standbys
        if self._generation is not None:
            self._generation.record_statuses(remote, remote.heard - at, **news)

    def _told(self, generation: Generation, remote: RemoteHost, what: str, **facts: Any) -> None:
        if not generation.record_told(remote, what=what, **facts):
            return
        # All processes have sent this message now.
        self._recoveries.record_told_by_all(what, generation)
        if what in ("joined", "first_step"):
            known = self._succession.settle()
            for each in self.members.remotes:  # also those without processes of this generation
                each.channel.send("settled" if what == "joined" else "stepped", known=known)

    def _ended(self, remote: RemoteHost, generation: int, port: int, step: int | None) -> None:
        remote.port = port
        if self._generation is not None and generation == self._generation.number:
            self._generation.record_left(remote, step)

    def _asked_to_stop(self, number: int, at_once: bool) -> None:
        self._signal = self._signal or number
        generation = self._generation
        if at_once:
            self._end.poll(at_once=True)
        if at_once and generation is not None and generation.state is State.STOPPING:
            generation.kill_processes()

    # After each message and on a timer.
    def _consider(self) -> None:
        if self.members.is_over:
            return
        now = time.monotonic()
        self.members.remove_silent_hosts(now)
        if self._end.is_saving:
            self._end.poll()
            return None if self.members.is_over else self._wake(now)
        generation = self._generation
        if generation is not None and not generation.parts:
            self._generation = None
            self._decide(generation)
        elif generation is not None and generation.state is State.RUNNING:
            self._look(now, generation)
        if self._generation is None and not self.members.is_ending:
            self._gather(now)
        self._wake(now)

    # Calls _consider when the next slot is free, or after LOOK_S.
    def _wake(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        soonest = min([now + LOOK_S, *self.members.free_after(now)])
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(soonest - now, self._consider)

    def _look(self, now: float, generation: Generation) -> None:
        generation.poll(now)
        if self._signal is not None or generation.saved:
            self.members.is_ending = True
            generation.stop(self._signal)
        elif generation.cause is not None:
            generation.kill_processes()
        elif generation.may_grow and self.members.could_form_more(now, generation.size):
            generation.fail(failure.growth())
            generation.kill_processes()

    # No process of the generation is left.
    def _decide(self, generation: Generation) -> None:
        why = generation.cause
        text, code = ("", "") if why is None else (why.text, why.error_code)
        facts = {"generation": generation.number, "cause": text, "error_code": code}
        self._events.write("generation ended", **facts)
        if self._end.follows(generation, self._signal):
            return
        assert why is not None
        self._has_restored |= "restored" in generation.told
        generation.blame(time.monotonic())
        self._recoveries.record_failure(why, generation)
        self._gathering = Gathering(self._options, False, self._electors)

    def _gather(self, now: float) -> None:
        if self._signal is not None:
            return self._end.give_up(128 + self._signal, "")
        if chosen := self._gathering.plan(self.members.remotes, now):
            self._form(chosen)
        elif error := self._gathering.timeout_error(self.members.remotes, now):
            self._end.give_up(1, error)

    def _form(self, chosen: Plan) -> None:
        if reason := self._succession.take_over():
            return self._end.give_up(1, reason)
        self.members.go_on_without_lost_hosts()
        facts = self._succession.begin_generation(chosen, self.members.home)
        self._generation = Generation(
            self.number, chosen, self._options, self._say, self._events, self._report
        )
        self._generation.start(
            # A directory of an earlier run is refused until this run has begun there.
            resumes=self._has_restored or self._options.resume,
            coordinator=rank_assignment.coordinator(chosen, self.members.home),
            **facts,
        )
