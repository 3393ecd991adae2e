"""The rule by which at most one leader at a time may form generations, whatever the network does.

It counts only where `--rdzv-endpoint` lists several hosts that may lead. The *electors* are the
launchers of the listed hosts in the last generation. The next one needs more than half of those
that live, or half of them with the one that led. An elector counts as living until its death was
seen (`jdp/launch/connection.py`); silence proves nothing.

Each generation with other hosts changes the electors. All of the new ones know of the change once
their processes have found each other. Until then a quorum of the old and of the new ones is needed.
After that the old ones are superseded, and a host that hears of it forgets them. Two leaders that
do not know of each other would both need a quorum of the last electors that both know. Those
quorums have a host in common, and a host is connected to one leader at a time. A leader that goes
on without a host says farewell to it, so that the host does not count the leader as dead later: it
may know less by then.

A launcher that starts again knows nothing, so it is a new one and not an elector. When all listed
hosts are there, nobody else can lead, and no quorum is needed.

Groups of electors are numbered, and a settled one supersedes all with a lower number. One of these
that its leader did not know was never settled, or it would have had a host in common with it. So
what hosts keep and send does not grow with the number of changes.
"""

import secrets
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from jdp.launch.host.leader_connection import LeaderConnection
from jdp.launch.leader.remote_host import RemoteHost


class Electorate(NamedTuple):
    """The electors that a host knows of, and the deaths.

    Attributes:
      groups: ids of launchers by name of the group, the one that led first. A quorum of each is
        needed. A name is the number of the group and some random text.
      superseded: number of the last group that is superseded, with all before it; -1 for none.
      dead: ids of electors that have died.

    >>> electorate = Electorate().changed(["a", "b", "c"])
    >>> electorate.has_quorum({"b", "c"}), electorate.has_quorum({"c"})
    (True, False)
    >>> electorate = electorate.changed(["b", "c"]).settled(["b", "c"])
    >>> electorate.has_quorum({"b"}), electorate.has_quorum({"c"})
    (True, False)
    >>> electorate.with_dead("b").has_quorum({"c"})
    True
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
        """Return the electors that are not known to have died, and are not in `present`."""
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
        """Return it with a new group, numbered higher than the others."""
        number = 1 + max([self.superseded, *map(_number, self.groups)])
        return self._replace(groups={**self.groups, f"{number}-{secrets.token_hex(4)}": group})

    def settled(self, group: list[str]) -> "Electorate":
        """Return it when all electors of this group know of it: it supersedes the others."""
        latest = max(self.groups, key=_number, default="")
        # Others may have come to be known since it began, which are numbered higher.
        if not latest or self.groups[latest] != group:
            return self.changed(group).settled(group)
        return self.merged(Electorate(superseded=_number(latest) - 1))


def _number(name: str) -> int:
    return int(name.partition("-")[0])


# The leader's part in this rule.


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


# The host's part in it.


class KnownElectors:
    """The `Electorate` that this host knows, from leaders and by its lifelines to them."""

    def __init__(self) -> None:
        self._electorate = Electorate()
        self._leader = ""  # of the last generation in which this host took part

    def record(self, known: dict[str, Any] | None) -> None:
        """Record what a leader knows; None if only one host may lead."""
        if known is not None:
            self._electorate = self._electorate.merged(Electorate(**known))

    def record_generation(self, known: dict[str, Any] | None, leader: str) -> None:
        """Record what a leader knows, and that this host takes part in its generation."""
        self.record(known)
        self._leader = leader

    def facts(self, link: LeaderConnection) -> dict[str, Any]:
        """Return all that is known, with the death of the last leader if it was seen."""
        # Without this host, a leader may have changed the electors before it died. With it, this
        # host knows of the change.
        if link.has_leader_died and link.leader == self._leader:
            self._electorate = self._electorate.with_dead(link.leader)
        return self._electorate._asdict()
