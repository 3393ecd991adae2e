"""What this host knows of its run, as long as its launcher runs, and tells a leader."""

import secrets
import socket
import time
from typing import Any

from jdp.launch.host.known_electors import KnownElectors
from jdp.launch.host.leader_connection import LeaderConnection
from jdp.launch.options.options import Options
from jdp.worker.run_history import LeaderLoss, RunHistory


class KnownRun:
    """What a leader has told this host of the run.

    Attributes:
      id: of this launcher alone.
      generation: number of the last one, -1 before the first.
      step: the last that all processes of this host called in it; None if it is not known.
    """

    def __init__(self, options: Options) -> None:
        self.id = secrets.token_hex(8)
        self.generation = -1
        self.step: int | None = None
        self._options, self._run_id = options, options.rdzv_id
        self._has_stepped = False  # whether a generation has made a step
        self._electors = KnownElectors()
        self._history = RunHistory()
        self._loss: LeaderLoss | None = None  # of the leader of the last generation

    def record_generation(
        self, number: int, run_id: str, known: dict[str, Any], leader: str
    ) -> None:
        """Record a generation in which this host takes part."""
        self.generation, self._run_id = number, run_id
        self.step, self._loss = None, None
        self._record_history(known["history"])
        self._electors.record_generation(known["electorate"], leader)

    def record_past(self, known: dict[str, Any]) -> None:
        """Record what the leader knows; `known` as above."""
        self._record_history(known["history"])
        self._electors.record(known["electorate"])

    def record_step(self, known: dict[str, Any]) -> None:
        """Record that all processes of a generation have made a step; `known` as above."""
        self._has_stepped = True
        self.record_past(known)

    def record_loss(self, leader: str, why: str, silent_s: float) -> None:
        """Record that the leader at an address is lost, with the seconds of silence before that."""
        text = f"the leader at {leader} was lost: {why}"
        self._loss = self._loss or LeaderLoss(text, time.monotonic(), silent_s)

    def _record_history(self, facts: dict[str, Any]) -> None:
        self._history = RunHistory(**facts).moved(time.monotonic())

    def introduce(self, link: LeaderConnection, port: int, listed: int | None) -> dict[str, Any]:
        """Return the facts of `join`, apart from the proof."""
        now, loss = time.monotonic(), self._loss
        return {
            "history": self._history.moved(-now).facts(),
            "loss": loss and loss._replace(step=self.step).moved(-now)._asdict(),
            "heartbeat_timeout_s": self._options.heartbeat_timeout_s,
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
