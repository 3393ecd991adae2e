"""The quorum rule: at most one leader at a time may form generations, whatever the network does.

It applies if `--rdzv-endpoint` lists several hosts. The *electors* are the launchers of the listed
hosts in the last generation. The next generation needs more than half of the living electors, or
half of them with the last leader. An elector lives until its death is seen
(`jdp/launch/connection.py`); silence proves no death.

A generation with other hosts changes the electors. Until all its processes have joined, and so all
new electors know of the change, a next generation needs a quorum of both groups. Then the old group
is superseded, and a host that learns this forgets it. Two leaders, unknown to each other, both need
a quorum of the last electors that both know. Two quorums share a host, and a host is connected to
one leader at a time. A leader that goes on without a host sends it a farewell: that host may know
less later, so it must not count the leader as dead.

A restarted launcher knows no electors and is none. If all listed hosts are present, no quorum is
needed: no other leader can exist.

Groups are numbered, and a settled group supersedes all lower ones. A lower group unknown to its
leader was never settled, or the two would share a host. So the state kept and sent does not grow
with the number of changes.
"""

import secrets
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from jdp.launch.host.leader_connection import LeaderConnection
from jdp.launch.leader.remote_host import RemoteHost


class Electorate(NamedTuple):
    """The electors and deaths known to a host.

    Attributes:
      groups: launcher ids, leader first, by group name "number-random"; each needs a quorum.
      superseded: highest superseded group number; -1 for none.
    """

    groups: dict[str, list[str]] = {}  # noqa: RUF012
    superseded: int = -1
    dead: list[str] = []  # noqa: RUF012

    def has_quorum(self, present: Collection[str]) -> bool:
        """Whether hosts with these ids may form a generation; False without electors."""
        groups = self.groups.values()
        return bool(groups) and all(self._has_quorum_of(it, present) for it in groups)

    def _has_quorum_of(self, group: list[str], present: Collection[str]) -> bool:
        living = [each for each in group if each not in self.dead]
        surplus = 2 * sum(each in present for each in living) - len(living)
        return surplus > 0 or (surplus == 0 and group[0] in present)

    def missing(self, present: Collection[str]) -> set[str]:
        """Return the electors neither dead nor in `present`."""
        return {each for group in self.groups.values() for each in group} - {*present, *self.dead}

    def with_dead(self, launcher: str) -> "Electorate":
        """Return it with one more death."""
        return self.merged(Electorate(dead=[launcher]))

    def merged(self, other: "Electorate") -> "Electorate":
        """Return all that both know."""
        superseded = max(self.superseded, other.superseded)
        groups = {**self.groups, **other.groups}
        groups = {name: group for name, group in groups.items() if _number(name) > superseded}
        electors = {each for group in groups.values() for each in group}
        dead = [each for each in dict.fromkeys([*self.dead, *other.dead]) if each in electors]
        return Electorate(groups, superseded, dead)

    def changed(self, group: list[str]) -> "Electorate":
        """Return it with a new group of the highest number."""
        number = 1 + max([self.superseded, *map(_number, self.groups)])
        return self._replace(groups={**self.groups, f"{number}-{secrets.token_hex(4)}": group})

    def settled(self, group: list[str]) -> "Electorate":
        """Return it once all electors of `group` know it: it supersedes the others."""
        latest = max(self.groups, key=_number, default="")
        # Groups known since then have higher numbers.
        if not latest or self.groups[latest] != group:
            return self.changed(group).settled(group)
        return self.merged(Electorate(superseded=_number(latest) - 1))


def _number(name: str) -> int:
    return int(name.partition("-")[0])


class Electors:
    """The leader's part; a single listed host may always form a generation."""

    def __init__(self, num_listed: int) -> None:
        self._num_listed = num_listed
        self._electorate = Electorate()
        self._group: list[str] = []  # of the last generation formed here

    def record_join(self, known: dict[str, Any] | None) -> None:
        """Record a joined host's electors."""
        if known is not None:
            self._electorate = self._electorate.merged(Electorate(**known))

    def record_death(self, remote: RemoteHost) -> None:
        """Record a launcher's death."""
        self._electorate = self._electorate.with_dead(remote.id)

    def may_form(self, remotes: Iterable[RemoteHost]) -> bool:
        """Whether these hosts may form a generation."""
        if self._num_listed == 1:
            return True
        remotes = [*remotes]
        if not all(remote.lifeline for remote in remotes):
            return False  # they could not see this leader die
        are_all_listed = len(_listed(remotes)) == self._num_listed
        return are_all_listed or self._electorate.has_quorum({remote.id for remote in remotes})

    def may_still_come(self, remotes: Iterable[RemoteHost]) -> bool:
        """Whether another elector may soon join."""
        known = self._electorate
        return not known.groups or bool(known.missing({remote.id for remote in remotes}))

    def form(self, remotes: Iterable[RemoteHost], home: str) -> dict[str, Any] | None:
        """Record a generation of these hosts, led by `home`; return its facts."""
        if self._num_listed == 1:
            return None
        group = sorted(_listed(remotes).values(), key=lambda launcher: launcher != home)
        self._group = group
        if [*self._electorate.groups.values()] != [group]:
            self._electorate = self._electorate.changed(group)
        return self._electorate._asdict()

    def settle(self) -> dict[str, Any] | None:
        """Record that all hosts know the electors; return the facts."""
        if self._num_listed == 1:
            return None
        self._electorate = self._electorate.settled(self._group)
        return self._electorate._asdict()


# Launcher ids, in the order of --rdzv-endpoint.
def _listed(remotes: Iterable[RemoteHost]) -> dict[int, str]:
    listed = {remote.listed: remote.id for remote in remotes if remote.listed is not None}
    return dict(sorted(listed.items()))


class KnownElectors:
    """The host's part: the `Electorate` from leaders and lifelines."""

    def __init__(self) -> None:
        self._electorate = Electorate()
        self._leader = ""  # of the last generation of this host

    def record(self, known: dict[str, Any] | None) -> None:
        """Record what a leader knows, if several hosts may lead."""
        if known is not None:
            self._electorate = self._electorate.merged(Electorate(**known))

    def record_generation(self, known: dict[str, Any] | None, leader: str) -> None:
        """Record what a leader knows, as this host joins it."""
        self.record(known)
        self._leader = leader

    def facts(self, link: LeaderConnection) -> dict[str, Any]:
        """Return all known facts, with the last leader's death if it was seen."""
        # Another leader may have changed the electors, without this host, before it died.
        if link.has_leader_died and link.leader == self._leader:
            self._electorate = self._electorate.with_dead(link.leader)
        return self._electorate._asdict()
