"""The end of a run: why it ends, its latest commit becomes a checkpoint, and its hosts leave."""

from typing import Any

from jdp.launch.leader.event_log import Events
from jdp.launch.leader.generation import Generation
from jdp.launch.leader.last_commits import LastCommits
from jdp.launch.leader.membership import Membership
from jdp.launch.leader.recovery import Recoveries
from jdp.launch.leader.remote_host import RemoteHost
from jdp.launch.leader.run_report import RunReport
from jdp.worker.exit_codes import SAVED


class RunEnd:
    """Ends a run.

    Args:
      members: the hosts.
      events, report: which hear of it.
      recoveries: those of the run.
    """

    def __init__(
        self, members: Membership, events: Events, report: RunReport, recoveries: Recoveries
    ) -> None:
        self._members, self._events, self._report = members, events, report
        self._recoveries = recoveries
        self._last_commits: LastCommits | None = None  # of a run that gives up

    @property
    def is_saving(self) -> bool:
        """Whether hosts are writing their latest commit, after which the run ends."""
        return self._last_commits is not None

    def follows(self, generation: Generation, signal: int | None) -> bool:
        """Whether the run ends with a generation, which this then begins."""
        why = generation.cause
        if generation.saved:
            saved = f"saved {generation.closed_step}".rstrip()
            text = f"it {saved} and ended; the same command with --resume continues there."
            self.finish(SAVED, text)
        elif signal is not None and not generation.is_finished:
            self.give_up(128 + signal, "")
        elif why is None or generation.is_done:
            before = self._recoveries.text
            self.finish(0, before and f"{before}. There was no step left to make after that.")
        elif reason := self._recoveries.reason_to_end(why, generation):
            self.give_up(why.code, f"{why.full_text}\n{reason}")
        else:
            return False
        return True

    def give_up(self, code: int, why: str) -> None:
        """End the run when its latest commit is on the disk."""
        self._members.is_ending = True
        self._last_commits = LastCommits(code, why, self._recoveries.checkpoint_step)
        self._last_commits.ask(self._members.remotes)

    def record_saved(self, remote: RemoteHost, facts: dict[str, Any]) -> None:
        """Record the commit that a host has saved."""
        if self._last_commits is not None:
            self._last_commits.record_answer(remote, facts)

    def poll(self, *, at_once: bool = False) -> None:
        """End the run if all hosts have saved their commit, or `at_once`."""
        commits = self._last_commits
        if commits is not None and (at_once or commits.are_saved(self._members.remotes)):
            self.finish(*commits.outcome())

    def finish(self, code: int, why: str) -> None:
        """End the run, and send its exit code to all hosts."""
        self._report.end_run()
        self._events.write("over", code=code, why=why)
        self._members.end_run(code=code, why=why)
