"""The generation that lives, as the leader sees it: what its hosts tell, and why it ends.

States, and what ends them:

  RUNNING   until a process fails, a host is lost, the watch gives up or the run can grow (ENDING),
            or until a signal, or a process that saved and ended (STOPPING)
  STOPPING  its processes were asked to end. Until a second signal (ENDING)
  ENDING    its processes are being killed

In each of them its processes may end, and the last host that has none of them left ends it.
"""

import enum
import time
from collections.abc import Callable
from typing import Any

from jdp.launch.leader import failure
from jdp.launch.leader.event_log import Events
from jdp.launch.leader.failure import Cause
from jdp.launch.leader.rank_assignment import Part, Plan, size
from jdp.launch.leader.remote_host import RemoteHost
from jdp.launch.options.options import Options
from jdp.worker.exit_codes import SAVED
from jdp.worker.hang_detector import BETWEEN, Stall, Watch, waits
from jdp.worker.progress_board import ProcessStatus

State = enum.Enum("State", "RUNNING STOPPING ENDING")


class Generation:
    """One life of the run: processes that start together and end together.

    Args:
      number: 0 for the first.
      plan: of its parts.
      options: of the command line.
      say: prints a line for people who watch the run.
      events: where it is written what happens.

    Attributes:
      size: number of processes.
      state: see above.
      parts: by host, without those of which no process is left.
      told: facts by what was told, and by process.
      cause: why it ends; the first one.
      step: the last step that all processes made, as far as hosts know.
    """

    def __init__(
        self,
        number: int,
        plan: Plan,
        options: Options,
        say: Callable[[str], None],
        events: Events,
    ) -> None:
        self.number = number
        self.size = size(plan)
        self.state = State.RUNNING
        self.parts = {part.remote: part for part in plan}
        self.told: dict[str, dict[int, dict[str, Any]]] = {}
        self.cause: Cause | None = None
        self.step: int | None = None
        self._returncodes: dict[int, int] = {}  # of processes that ended by themselves
        self._blamed: tuple[RemoteHost, int] | None = None  # with the slot
        self._early: float | None = None  # since when one has ended and others have not
        self._grace_s = options.shutdown_timeout_s
        self._watch = Watch(options.timeout_s)
        self._say, self._events = say, events

    @property
    def stepped(self) -> bool:
        """Each process has finished its first step."""
        return self._all_told("first_step")

    @property
    def saved(self) -> bool:
        """A process saved, and ended."""
        return SAVED in self._returncodes.values()

    @property
    def is_done(self) -> bool:
        """All processes have ended with code 0."""
        return [*self._returncodes.values()] == [0] * self.size

    @property
    def may_grow(self) -> bool:
        """It is worth the while: each process has made a step, and none has ended.

        And nothing is lost: each has asked where to go on, or all would begin at step 0.
        """
        return self.stepped and self._all_told("restored") and self._early is None

    def note(self, remote: RemoteHost, process_id: int, pid: int, what: str, facts: dict) -> bool:
        """Record what a process told, and return whether it was the last one to tell that."""
        self._write(what, process_id=process_id, host=remote.name, pid=pid, **facts)
        told = self.told.setdefault(what, {})
        is_news = process_id not in told
        told[process_id] = facts
        if what == "ended":
            self._note_end()
        return is_news and self._all_told(what)

    def record_exit(
        self,
        remote: RemoteHost,
        process_id: int,
        pid: int,
        returncode: int,
        traceback: str | None,
        last_lines: list[str],
    ) -> None:
        """Record how a process ended; what came of itself is a failure unless all is well."""
        self._returncodes[process_id] = returncode
        if returncode == 0:
            self._note_end()
        who = {"process_id": process_id, "host": remote.name, "pid": pid, "returncode": returncode}
        self._write("exited", **who)
        if returncode not in (0, SAVED) and self.state is not State.STOPPING:
            why = failure.exit_of_process(**who, traceback=traceback, last_lines=last_lines)
            if ended := self._came_to_end():
                why = failure.after_end(why, min(ended))
            self.fail(why, process_id)

    def record_statuses(self, remote: RemoteHost, statuses: dict[int, ProcessStatus]) -> None:
        """Record the statuses of the processes of a host."""
        if remote in self.parts:
            self.parts[remote].statuses = statuses

    def record_left(self, remote: RemoteHost, step: int | None) -> None:
        """Record that a host has no more processes of it, and their last common step."""
        self.step = min((each for each in (self.step, step) if each is not None), default=None)
        self.parts.pop(remote, None)

    def look(self, now: float) -> None:
        """Look whether it gets on, and fail if it does not."""
        statuses = {i: each for part in self.parts.values() for i, each in part.statuses.items()}
        stall = self._watch.look(now, statuses)
        if stall is not None:
            self._note_stall(stall)
        self._look_for_early_ends(now, statuses)

    def fail(self, why: Cause, process_id: int | None = None) -> None:
        """Record why it ends, and which process is to blame, if any.

        The first cause counts, unless a later one is sure.
        """
        if self.cause is None or (why.is_sure and not self.cause.is_sure):
            self.cause, self._blamed = why, None
            if process_id is not None:
                part = self._part_of(process_id)
                self._blamed = part.remote, part.slots[process_id - part.first]

    def blame(self, now: float) -> None:
        """Have the slot of the process that failed rest, should it fail often."""
        if self._blamed is not None:
            remote, slot = self._blamed
            remote.slots[slot].fail(now, can_rest=len(remote.free(now)) > remote.least)

    # --- what hosts are told ---

    def start(self, **facts: Any) -> None:
        """Have its processes started, with these facts for the `Assignment` of each."""
        for host_id, (remote, part) in enumerate(self.parts.items()):
            remote.take_part(self.number)
            remote.channel.send(
                "go",
                first=part.first,
                slots=part.slots,
                generation=self.number,
                num_processes=self.size,
                host_id=host_id,
                **facts,
            )
        hosts = [remote.name for remote in self.parts]
        self._write("formed", num_processes=self.size, hosts=hosts)

    def stop(self, number: int | None) -> None:
        """Ask its processes to end, with a signal or without."""
        self.state = State.STOPPING
        self._send("stop", signal=number)

    def end(self) -> None:
        """Have its processes killed."""
        self.state = State.ENDING
        self._send("end")

    def _send(self, kind: str, **facts: Any) -> None:
        for remote in self.parts:
            remote.channel.send(kind, **facts)

    # --- what it makes of it ---

    def _write(self, event: str, **facts: Any) -> None:
        self._events.write(event, generation=self.number, **facts)

    def _all_told(self, what: str) -> bool:
        return len(self.told.get(what, {})) == self.size

    def _part_of(self, process_id: int) -> Part:
        return next(part for part in self.parts.values() if process_id in part.process_ids)

    def _note_end(self) -> None:
        if self._early is None:
            self._early = time.monotonic()

    # The processes that came to the end of the script.
    def _came_to_end(self) -> set[int]:
        exited = {i for i, code in self._returncodes.items() if code == 0}
        return exited | self.told.get("ended", {}).keys()

    def _note_stall(self, stall: Stall) -> None:
        self._say(stall.report)
        self._send("dump", process_ids=stall.processes)
        self._write(
            "stalled",
            process_ids=stall.processes,
            stalled_s=stall.stalled_s,
            is_over=stall.is_over,
        )
        if stall.is_over:
            first = stall.processes[0]
            part = self._part_of(first)
            who = first, part.remote.name, part.statuses[first].pid
            self.fail(failure.stall_of_process(*who, stall.stalled_s, stall.report), first)

    # Fail if a process waits in a step that others, which came to their end, do not make. What it
    # does alone at the end may take as long as the watch says, and a step as long as it takes.
    def _look_for_early_ends(self, now: float, statuses: dict[int, ProcessStatus]) -> None:
        if self._early is None or now - self._early < self._grace_s:
            return
        ended = self._came_to_end()
        for i, status in statuses.items():
            if i in ended or not waits(status) or now - status.progress_s < self._grace_s:
                continue
            called = status.steps + (status.phase != BETWEEN)
            if missing := [other for other in ended if self._steps_of(other) < called]:
                return self.fail(failure.early_end(min(missing), i, self._grace_s))

    # That a process which came to its end has called; -1 if it told nothing.
    def _steps_of(self, process_id: int) -> int:
        return self.told.get("ended", {}).get(process_id, {}).get("steps", -1)
