"""The leader's part in the rule of `jdp/launch/electorate.py`: which generations it may form."""

from collections.abc import Iterable
from typing import Any

from jdp.launch.electorate import Electorate
from jdp.launch.leader.remote_host import RemoteHost


class Electors:
    """Decides whether some hosts may form a generation.

    Args:
      num_listed: number of hosts that may lead. A single one always may.
    """

    def __init__(self, num_listed: int) -> None:
        self._num_listed = num_listed
        self._electorate = Electorate()
        self._group: list[str] = []  # the electors of the last generation that this leader formed

    def record_join(self, known: dict[str, Any] | None) -> None:
        """Record what a host that has joined knows of electors."""
        if known is not None:
            self._electorate = self._electorate.merged(Electorate(**known))

    def record_death(self, remote: RemoteHost) -> None:
        """Record that the launcher of a host has died."""
        self._electorate = self._electorate.with_dead(remote.id)

    def may_form(self, remotes: Iterable[RemoteHost]) -> bool:
        """Whether these hosts may form a generation."""
        if self._num_listed == 1:
            return True
        remotes = [*remotes]
        if not all(remote.lifeline for remote in remotes):
            return False  # they could not see whether this leader dies
        are_all_listed = len(_listed(remotes)) == self._num_listed
        return are_all_listed or self._electorate.has_quorum({remote.id for remote in remotes})

    def may_still_come(self, remotes: Iterable[RemoteHost]) -> bool:
        """Whether a host that is not among these may soon join."""
        known = self._electorate
        return not known.groups or bool(known.missing({remote.id for remote in remotes}))

    def form(self, remotes: Iterable[RemoteHost], home: str) -> dict[str, Any] | None:
        """Record that these hosts form a generation, and return the facts for them.

        `home`: the id of the leader's own host.
        """
        if self._num_listed == 1:
            return None
        group = sorted(_listed(remotes).values(), key=lambda launcher: launcher != home)
        self._group = group
        if [*self._electorate.groups.values()] != [group]:
            self._electorate = self._electorate.changed(group)
        return self._electorate._asdict()

    def settle(self) -> dict[str, Any] | None:
        """Record that all hosts of the generation know its electors, and return the facts."""
        if self._num_listed == 1:
            return None
        self._electorate = self._electorate.settled(self._group)
        return self._electorate._asdict()


# The ids of the hosts that may lead, in the order of --rdzv-endpoint.
def _listed(remotes: Iterable[RemoteHost]) -> dict[int, str]:
    listed = {remote.listed: remote.id for remote in remotes if remote.listed is not None}
    return dict(sorted(listed.items()))
