"""The running generation, as the leader sees it.

States, and what ends them:

  RUNNING   until a process fails, a host is lost, the watch gives up or the run can grow (ENDING),
            or until a signal or a process that saved and ended (STOPPING)
  STOPPING  its processes were asked to end; until a second signal (ENDING)
  ENDING    its processes are being killed

In any state it is over once no host has processes left.
"""

import enum
import time
from collections.abc import Callable, Mapping
from typing import Any

from jdp.launch.leader import failure
from jdp.launch.leader.failure import Cause
from jdp.launch.leader.metrics_endpoint import ProcessMetrics
from jdp.launch.leader.progress_watch import ProgressWatch
from jdp.launch.leader.rank_assignment import Part, Plan, size
from jdp.launch.leader.remote_host import RemoteHost
from jdp.launch.leader.run_report import Events, RunReport
from jdp.launch.options import Options
from jdp.worker.exit_codes import SAVED
from jdp.worker.hang_detector import Stall
from jdp.worker.process_status import BETWEEN, WAITING, ProcessStatus, waits


def find(
    now: float,
    grace_s: float,
    statuses: Mapping[int, ProcessStatus],
    steps_of_ended: Mapping[int, int],
) -> Cause | None:
    """Return the cause if a process waits in a step that ended processes did not call."""
    for i, status in statuses.items():
        if i in steps_of_ended or not waits(status) or now - status.progress_s < grace_s:
            continue
        called = status.steps + (status.phase != BETWEEN)
        if missing := [other for other, steps in steps_of_ended.items() if steps < called]:
            return failure.early_end(min(missing), i, grace_s, in_step=status.phase != WAITING)
    return None


State = enum.Enum("State", "RUNNING STOPPING ENDING")


class Generation:
    """Processes that start and end together.

    Attributes:
      parts: by host, until its last process has ended.
      told: facts by message kind and process.
      step: the last that all processes called, as far as hosts know.
    """

    def __init__(
        self,
        number: int,
        plan: Plan,
        options: Options,
        say: Callable[[str], None],
        events: Events,
        report: RunReport,
    ) -> None:
        self.number = number
        self.size = size(plan)
        self.state = State.RUNNING
        self.parts = {part.remote: part for part in plan}
        self.told: dict[str, dict[int, dict[str, Any]]] = {}
        self.cause: Cause | None = None
        self.step: int | None = None
        self._returncodes: dict[int, int] = {}  # of processes that ended by themselves
        self._blamed: tuple[RemoteHost, int] | None = None
        self._ended_before_stop: set[int] = set()
        self._first_end: float | None = None
        self._grace_s = options.shutdown_timeout_s
        self._events, self._report = events, report
        self._progress = ProgressWatch(self.size, options.timeout_s, say, self._write)

    @property
    def stepped(self) -> bool:
        """Whether each process has finished a step."""
        return self._told_by_all("first_step")

    @property
    def saved(self) -> bool:
        """Whether a process has saved and ended."""
        return SAVED in self._returncodes.values()

    @property
    def closed_step(self) -> str:
        """The last saved step in words, or ""."""
        steps = [facts["step"] for facts in self.told.get("closed", {}).values()]
        return f"step {max(steps)}" if steps else ""

    @property
    def is_done(self) -> bool:
        """Whether all processes ended with code 0."""
        return [*self._returncodes.values()] == [0] * self.size

    @property
    def is_finished(self) -> bool:
        """Whether all processes ended with code 0, unasked."""
        finished = self._ended_before_stop | self.told.get("closed", {}).keys()
        return self.is_done and len(finished) == self.size

    @property
    def may_grow(self) -> bool:
        """Whether each process made a step and called `restore`, or all would restart at step 0."""
        return self.stepped and self._told_by_all("restored") and self._first_end is None

    def record_told(
        self, remote: RemoteHost, process_id: int, pid: int, what: str, facts: dict
    ) -> bool:
        """Record a message; return whether all processes have sent its kind now."""
        self._write(what, process_id=process_id, host=remote.name, pid=pid, **facts)
        self._progress.record_told(process_id, what, facts)
        told = self.told.setdefault(what, {})
        is_news = process_id not in told
        told[process_id] = facts
        if what == "ended":
            self._record_end()
        return is_news and self._told_by_all(what)

    def record_exit(
        self,
        remote: RemoteHost,
        process_id: int,
        pid: int,
        returncode: int,
        traceback: str | None,
        last_lines: list[str],
        status: list[Any],
        step: int | None = None,
        out_of_memory: bool = False,
    ) -> None:
        """Record how a process ended by itself, and its last status."""
        self._returncodes[process_id] = returncode
        self._report.record_end(process_id, ProcessStatus.of_json(status))
        if returncode == 0:
            self._record_end()
        who = {"process_id": process_id, "host": remote.name, "pid": pid, "returncode": returncode}
        self._write("exited", **who)
        if returncode not in (0, SAVED) and self.state is not State.STOPPING:
            why = failure.exit_of_process(
                **who,
                traceback=traceback,
                last_lines=last_lines,
                step=step,
                out_of_memory=out_of_memory,
            )
            if ended := self._came_to_end():
                why = failure.after_end(why, min(ended))
            self.fail(why, process_id)

    def record_statuses(
        self, remote: RemoteHost, ahead_s: float, statuses: dict[str, list], windows: dict
    ) -> None:
        """Record a host's statuses and windows, `ahead_s` behind."""
        if remote in self.parts:
            self.parts[remote].record_statuses(statuses, ahead_s)
            self._progress.record_windows(windows)

    def record_left(self, remote: RemoteHost, step: int | None) -> None:
        """Record a host without processes, and their last common step."""
        self.step = min((each for each in (self.step, step) if each is not None), default=None)
        self.parts.pop(remote, None)

    def process_metrics(self) -> tuple[ProcessMetrics, ...]:
        """Return its processes' metrics."""
        slow = self._progress.slow()
        return tuple(
            ProcessMetrics(i, part.remote.name, status.counts.data_s, slow.get(i))
            for part in self.parts.values()
            for i, status in part.statuses.items()
        )

    def poll(self, now: float) -> None:
        """Fail if the processes make no progress."""
        statuses = {i: each for part in self.parts.values() for i, each in part.statuses.items()}
        self._report.record(statuses)
        stall = self._progress.poll(now, statuses)
        if stall is not None:
            self._record_stall(stall)
        is_due = self._first_end is not None and now - self._first_end >= self._grace_s
        if is_due and (why := find(now, self._grace_s, statuses, self._steps_of_ended())):
            self.fail(why)

    def fail(self, why: Cause, process_id: int | None = None) -> None:
        """Record why it ends, and whom to blame; a sure cause replaces an unsure one."""
        if self.cause is None or (why.is_sure and not self.cause.is_sure):
            self.cause, self._blamed = why, None
            if process_id is not None:
                part = self._part_of(process_id)
                self._blamed = part.remote, part.slots[process_id - part.first]

    def blame(self, now: float) -> None:
        """Record the failure for the blamed slot."""
        if self._blamed is not None:
            remote, slot = self._blamed
            remote.slots[slot].fail(now, can_rest=len(remote.free(now)) > remote.least)

    def start(self, **facts: Any) -> None:
        """Start its processes."""
        for host_id, part in enumerate(self.parts.values()):
            part.begin(self.number, num_processes=self.size, host_id=host_id, **facts)
        hosts = [remote.name for remote in self.parts]
        self._write("formed", num_processes=self.size, hosts=hosts)

    def stop(self, number: int | None) -> None:
        """Ask its processes to end, with a signal if given."""
        self.state = State.STOPPING
        self._ended_before_stop = self._came_to_end()
        self._send("stop", signal=number)

    def kill_processes(self) -> None:
        """Kill its processes."""
        self.state = State.ENDING
        self._send("end")

    def _send(self, kind: str, **facts: Any) -> None:
        for remote in self.parts:
            remote.channel.send(kind, **facts)

    def _write(self, event: str, **facts: Any) -> None:
        self._events.write(event, generation=self.number, **facts)

    def _told_by_all(self, what: str) -> bool:
        return len(self.told.get(what, {})) == self.size

    def _part_of(self, process_id: int) -> Part:
        return next(part for part in self.parts.values() if process_id in part.process_ids)

    def _record_end(self) -> None:
        if self._first_end is None:
            self._first_end = time.monotonic()

    def _came_to_end(self) -> set[int]:
        exited = {i for i, code in self._returncodes.items() if code == 0}
        return exited | self.told.get("ended", {}).keys()

    # -1 if unknown.
    def _steps_of_ended(self) -> dict[int, int]:
        told = self.told.get("ended", {})
        return {i: told.get(i, {}).get("steps", -1) for i in self._came_to_end()}

    def _record_stall(self, stall: Stall) -> None:
        for remote in self.parts:
            asks_nccl = remote is next(iter(self.parts))
            remote.channel.send("dump", process_ids=stall.processes, asks_nccl=asks_nccl)
        if stall.is_over:
            first = stall.processes[0]
            part = self._part_of(first)
            who = first, part.remote.name, part.statuses[first].pid
            self.fail(failure.stall_of_process(*who, stall.stalled_s, stall.report), first)
