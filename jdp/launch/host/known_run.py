"""What this host knows of its run, as long as its launcher runs, and tells a leader."""

import secrets
import socket
from typing import Any

from jdp.launch.host.known_electors import KnownElectors
from jdp.launch.host.leader_connection import Link
from jdp.launch.options.options import Options


class KnownRun:
    """What a leader has told this host of the run.

    Attributes:
      id: of this launcher alone.
      generation: number of the last one, -1 before the first.
    """

    def __init__(self, options: Options) -> None:
        self.id = secrets.token_hex(8)
        self.generation = -1
        self._options, self._run_id = options, options.rdzv_id
        self._has_stepped = False  # whether a generation has made a step
        self._electors = KnownElectors()

    def record_generation(
        self, number: int, run_id: str, electorate: dict[str, Any] | None, leader: str
    ) -> None:
        """Record a generation in which this host takes part.

        Args:
          number: of it.
          run_id: of the run.
          electorate: facts of `Electorate`; None if only one host may lead.
          leader: id of the launcher that leads it.
        """
        self.generation, self._run_id = number, run_id
        self._electors.record_generation(electorate, leader)

    def record_step(self, electorate: dict[str, Any] | None) -> None:
        """Record that all processes of a generation have made a step."""
        self._has_stepped = True
        self._electors.record(electorate)

    def introduce(self, link: Link, port: int, listed: int | None) -> dict[str, Any]:
        """Return the facts of `join`, apart from the proof.

        Args:
          link: to the leader.
          port: on which process 0 would listen on this host.
          listed: place of this host among the hosts that may lead, None if it may not.
        """
        return {
            "listed": listed,
            "endpoints": self._options.rdzv_endpoint,
            "electorate": self._electors.facts(link),
            "id": self.id,
            "name": socket.gethostname(),
            "address": self._options.local_addr,
            "port": port,
            "num_processes": self._options.nproc_per_node,
            "host_id": self._options.node_rank,
            "run_id": self._run_id,
            "generation": self.generation,
            "stepped": self._has_stepped,
        }
