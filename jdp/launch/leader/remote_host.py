"""A host and its slots, as the leader sees them."""

import asyncio
import time
from typing import Any

from jdp.launch.connection import Channel, Lifeline

# A slot that fails twice within WINDOW_S rests for REST_S, doubled each time up to MAX_REST_S. If
# the run needs it, all processes wait for BACKOFF_S, doubled likewise up to MAX_BACKOFF_S.
WINDOW_S = 60.0
REST_S = 60.0
MAX_REST_S = 3600.0
BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0


class HostSlot:
    """Room for one process on a host."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self._failures: list[float] = []
        self._num_rests = 0

    def fail(self, now: float, can_rest: bool) -> None:
        """Record a failure; after several the slot rests."""
        self._failures = [at for at in self._failures if now - at < WINDOW_S] + [now]
        if len(self._failures) < 2:
            return
        if can_rest:
            self.free_at = now + min(REST_S * 2**self._num_rests, MAX_REST_S)
            self._num_rests += 1
        else:
            self.free_at = now + min(BACKOFF_S * 2 ** (len(self._failures) - 2), MAX_BACKOFF_S)


class RemoteHost:
    """A joined host.

    Attributes:
      address: of --local-addr.
      seen_address: of the host, as the leader sees it.
      leader_address: of the leader, as the host sees it.
      port: free on the host, for a coordinator.
      least: processes that the host needs to take part.
      listed: index in --rdzv-endpoint; None if it may not lead.
      generation: the last one in which it took part.
      took_part: since it joined.
      is_ready: whether its standbys wait, or it has none.
      heard: time.monotonic() of its last message.
    """

    def __init__(self, channel: Channel, facts: dict[str, Any]) -> None:
        self.channel = channel
        self.id, self.name = facts["id"], facts["name"]
        self.port = facts["port"]
        self.leader_address, self.seen_address = channel.addresses
        self.address: str | None = facts["address"]
        self.host_id: int | None = facts["host_id"]
        self.least, most = facts["num_processes"]
        self.slots = [HostSlot() for _ in range(most)]
        self.listed: int | None = facts.get("listed")
        self.lifeline: Lifeline | None = None
        self.generation = facts["generation"]
        self.took_part = False
        self.is_ready = False
        self.standbys = 0
        self.heard = time.monotonic()

    def end_connection(self, lifeline_after_s: float = 0.0) -> None:
        """Close the connection, and later the lifeline."""
        self.channel.close_connection()
        if self.lifeline is not None and not lifeline_after_s:
            self.lifeline.leave()
        elif self.lifeline is not None:
            asyncio.get_running_loop().call_later(lifeline_after_s, self.lifeline.leave)

    def take_part(self, generation: int) -> None:
        """Record its part in a generation, which uses up its standbys."""
        self.generation, self.took_part, self.is_ready = generation, True, False

    def becomes_ready(self, generation: int) -> bool:
        """Record that its standbys wait in `generation`; return whether that is new."""
        is_new = generation == self.generation and not self.is_ready
        self.is_ready = self.is_ready or is_new
        return is_new

    def free(self, now: float) -> list[int]:
        """Return the free slots."""
        return [i for i, slot in enumerate(self.slots) if slot.free_at <= now]
