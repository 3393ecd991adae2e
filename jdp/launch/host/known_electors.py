"""What this host knows of electors, as long as its launcher runs."""

from typing import Any

from jdp.launch.electorate import Electorate
from jdp.launch.host.leader_connection import LeaderConnection


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
