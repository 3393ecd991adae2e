"""A run's leader: it begins generations on hosts, and recovers after a failure.

The launcher at the rendezvous address leads. With several addresses, the hosts elect one
(`jdp/launch/election.py`), which needs a quorum per generation (`jdp/launch/quorum.py`). An `Agent`
manages the leader's own processes, as on any host.

States, and what ends them:

  gathering     no generation runs; until enough hosts joined (a generation), or the join timeout
                or a signal (over)
  a generation  see `generation.py`; until no host has processes of it (gathering, or over)
  over          the exit code is known; until the hosts have left

Fencing: a host kills its processes if no beat is answered for `heartbeat_timeout_s`, and at once if
its connection closes. The leader declares a host lost after 1.5 times that without a message. So
processes of two generations never run side by side, whatever the network does.
"""

import asyncio
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from jdp.launch.leader import failure, rank_assignment
from jdp.launch.leader.failure import Cause
from jdp.launch.leader.generation import Generation, State
from jdp.launch.leader.membership import Membership
from jdp.launch.leader.metrics_endpoint import RunMetrics
from jdp.launch.leader.rank_assignment import Gathering, Plan
from jdp.launch.leader.recovery import Recoveries
from jdp.launch.leader.remote_host import RemoteHost
from jdp.launch.leader.run_report import Events, RunReport
from jdp.launch.options import Options
from jdp.launch.quorum import Electors
from jdp.worker.exit_codes import SAVED
from jdp.worker.run_progress import LeaderLoss, RunHistory, RunSummary


class _RunEnd:
    """Ends a run, once all hosts have written their last commit."""

    def __init__(
        self, members: Membership, events: Events, report: RunReport, recoveries: Recoveries
    ) -> None:
        self._members, self._events, self._report = members, events, report
        self._recoveries = recoveries
        self.is_saving = False
        self._code, self._why = 0, ""
        self._restored: int | None = None
        self._last: int | None = None
        self._answers: dict[RemoteHost, dict[str, Any]] = {}

    def follows(self, generation: Generation, signal: int | None) -> bool:
        """Whether the run ends with this generation; if so begin the end."""
        why = generation.cause
        if generation.saved:
            saved = f"saved {generation.closed_step}".rstrip()
            text = f"it {saved} and ended; the same command with --resume continues there."
            self.finish(SAVED, text)
        elif signal is not None and not generation.is_finished:
            self.give_up(128 + signal, "")
        elif why is None or generation.is_done:
            before = self._recoveries.text
            self.finish(0, before and f"{before}. All steps were already done.")
        elif reason := self._recoveries.reason_to_end(why, generation):
            self.give_up(why.code, f"{why.full_text}\n{reason}")
        else:
            return False
        return True

    def give_up(self, code: int, why: str) -> None:
        """End the run once its last commit is on disk."""
        self._members.is_ending = self.is_saving = True
        self._code, self._why, self._answers = code, why, {}
        found, recoveries = self._report.summary(), self._recoveries
        self._restored = recoveries.checkpoint_step
        self._last = recoveries.last_step or (None if found is None else found.target)
        for remote in self._members.remotes:
            remote.channel.send("save commit")

    def record_saved(self, remote: RemoteHost, facts: dict[str, Any]) -> None:
        """Record a host's answer: its saved commit, or an error."""
        self._answers[remote] = facts

    def poll(self, *, at_once: bool = False) -> None:
        """End the run if all commits are saved, or `at_once`."""
        if self.is_saving and (at_once or all(x in self._answers for x in self._members.remotes)):
            lines = [self._why] if self._why else []
            self.finish(self._code, "\n".join(lines + self._how_to_resume()))

    def _how_to_resume(self) -> list[str]:
        saved = [facts for facts in self._answers.values() if "step" in facts]
        if saved:
            latest = max(saved, key=lambda facts: (facts["life"], facts["step"]))
            return [self._go_on(latest["step"], f", in {latest['directory']}")]
        lines = [
            f"The latest commit of {remote.name} could not be saved: {facts['error']}"
            for remote, facts in self._answers.items()
            if "error" in facts
        ]
        return [*lines, self._go_on(self._restored)] if self._restored else lines

    def _go_on(self, step: int, where: str = "") -> str:
        if step == self._last:
            return f"Step {step} was the last one{where}: --resume runs only the code after it."
        return f"The same command with --resume continues from step {step}{where}."

    def finish(self, code: int, why: str) -> None:
        self._report.end_run()
        self._events.write("over", code=code, why=why)
        self._members.end_run(code=code, why=why)


class _Succession:
    """Inherits a run's past from the host of the latest generation with most recoveries."""

    def __init__(self, run_id: str | None, electors: Electors, recoveries: Recoveries) -> None:
        self.number, self.run_id = -1, run_id
        self._electors, self._recoveries = electors, recoveries
        self._history = RunHistory()
        self._loss: LeaderLoss | None = None  # of the previous leader
        self._leads = False

    def record_join(self, remote: RemoteHost, facts: dict[str, Any]) -> None:
        self._electors.record_join(facts.get("electorate"))
        self._recoveries.stepped = self._recoveries.stepped or facts["stepped"]
        self.run_id = self.run_id or facts["run_id"]
        now = time.monotonic()
        history = RunHistory(**facts["history"]).moved(now)
        if remote.generation > self.number:
            self.number, self._history, self._loss = remote.generation, history, None
        elif remote.generation == self.number:
            self._history = max(
                self._history, history, key=lambda each: sum(each.recoveries.values())
            )
        if remote.generation == self.number and facts["loss"]:
            loss = LeaderLoss(**facts["loss"]).moved(now)
            self._loss = min(self._loss or loss, loss, key=lambda each: each.at)

    def take_over(self) -> str:
        is_first, self._leads = not self._leads, True
        if not is_first or self.number < 0:
            return ""
        loss = self._loss or LeaderLoss("the leader has resigned", time.monotonic(), 0.0)
        return self._recoveries.take_over(self._history, failure.loss_of_leader(loss))

    def begin_generation(self, plan: Plan, home: str) -> dict[str, Any]:
        """Record the next generation; return the facts for its hosts."""
        self.number += 1
        self.run_id = self.run_id or secrets.token_hex(4)
        electorate = self._electors.form((part.remote for part in plan), home)
        return {"run_id": self.run_id, "known": self._known(electorate)}

    def settle(self) -> dict[str, Any]:
        """Record that all hosts know the electors; return the facts."""
        return self._known(self._electors.settle())

    def _known(self, electorate: dict[str, Any] | None) -> dict[str, Any]:
        history = self._recoveries.history().moved(-time.monotonic())
        return {"electorate": electorate, "history": history.facts()}


LOOK_S = 0.2


class Leader:
    """Decides for all hosts; `show` gets summaries."""

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
        self._generation: Generation | None = None
        self._has_restored = False  # whether a process may have states of this run
        self._signal: int | None = None
        self._report = RunReport(show, self._events)
        self._recoveries = Recoveries(options, say, self._events, self._report)
        self._succession = _Succession(options.rdzv_id, self._electors, self._recoveries)
        self._timer: asyncio.TimerHandle | None = None
        self.members = Membership(
            *(options, token, listener, say, self._events),
            *(self._joined, self._receive, self._lost, self._died, claim),
        )
        self._end = _RunEnd(self.members, self._events, self._report, self._recoveries)
        self._consider()

    @property
    def number(self) -> int:
        """The last generation's number."""
        return self._succession.number

    @property
    def has_generation(self) -> bool:
        """Whether a generation is running."""
        return self._generation is not None

    def metrics(self) -> RunMetrics:
        """Return the run's current metrics."""
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
        """Stop leading; no generation may run."""
        self.members.resign()
        self._stop()

    async def finish_run(self, code: int, why: str, timeout_s: float = 5.0) -> None:
        """End the run, and wait until all hosts have left."""
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
        self._has_restored |= remote.generation >= 0  # another leader led it
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
            case "beat":  # frequent and never urgent
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
        self._recoveries.record_told_by_all(what, generation)
        if what in ("joined", "first_step"):
            known = self._succession.settle()
            for each in self.members.remotes:  # also those without processes
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

    # This runs after each message and on a timer.
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
            # An earlier run's directory is refused until this run has begun there.
            resumes=self._has_restored or self._options.resume,
            coordinator=rank_assignment.coordinator(chosen, self.members.home),
            **facts,
        )
