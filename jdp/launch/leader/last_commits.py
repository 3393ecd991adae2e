"""The end of a run that gives up: the latest commit of all hosts becomes a checkpoint."""

from typing import Any

from jdp.launch.leader.remote_host import RemoteHost


class LastCommits:
    """Waits until all hosts have written their latest commit to the checkpoint directory.

    Args:
      code: exit code of the run.
      why: for people.
      restored: step of the checkpoint from which the last generation continued, if any.
    """

    def __init__(self, code: int, why: str, restored: int | None) -> None:
        self._code, self._why, self._restored = code, why, restored
        self._answers: dict[RemoteHost, dict[str, Any]] = {}

    def ask(self, remotes: list[RemoteHost]) -> None:
        """Ask all hosts to write."""
        for remote in remotes:
            remote.channel.send("save commit")

    def record_answer(self, remote: RemoteHost, facts: dict[str, Any]) -> None:
        """Record the commit that a host has saved."""
        self._answers[remote] = facts

    def are_saved(self, remotes: list[RemoteHost]) -> bool:
        """Whether all hosts that are left have answered."""
        return all(remote in self._answers for remote in remotes)

    def outcome(self) -> tuple[int, str]:
        """Return the exit code, and a text for people: the reason, and how to continue."""
        saved = [facts for facts in self._answers.values() if "step" in facts]
        go_on = "The same command with --resume continues from step"
        if saved:
            latest = max(saved, key=lambda facts: (facts["life"], facts["step"]))
            return self._code, self._with(f"{go_on} {latest['step']}, in {latest['directory']}.")
        lines = [
            f"The latest commit of {remote.name} could not be saved: {facts['error']}"
            for remote, facts in self._answers.items()
            if "error" in facts
        ]
        if self._restored:
            lines.append(f"{go_on} {self._restored}.")
        return self._code, self._with(*lines)

    def _with(self, *lines: str) -> str:
        return "\n".join([*([self._why] if self._why else []), *lines])
