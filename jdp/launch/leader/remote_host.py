"""What the leader knows of a host, and of the room for processes there."""

import time
from typing import Any

from jdp.launch.transport.connection import Channel

# A slot that fails twice within WINDOW_S is left out for REST_S, the next time for twice that, and
# so on up to MAX_REST_S. If there would be too few processes without it, all have to wait for it:
# then for BACKOFF_S, twice that for each further failure, and MAX_BACKOFF_S at the most.
WINDOW_S = 60.0
REST_S = 60.0
MAX_REST_S = 3600.0
BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0


class HostSlot:
    """Room for one process on a host, with the GPUs that belong to it.

    >>> slot = HostSlot()
    >>> slot.fail(now=0.0, can_rest=True)
    >>> slot.fail(now=10.0, can_rest=True)
    >>> slot.free_at
    70.0
    """

    def __init__(self) -> None:
        self.free_at = 0.0
        self._failures: list[float] = []
        self._num_rests = 0

    def fail(self, now: float, can_rest: bool) -> None:
        """Record that the process there failed, and keep the slot empty for a while if it must be.

        Args:
          now: seconds.
          can_rest: the run can do without it.
        """
        self._failures = [at for at in self._failures if now - at < WINDOW_S] + [now]
        if len(self._failures) < 2:
            return
        if can_rest:
            self.free_at = now + min(REST_S * 2**self._num_rests, MAX_REST_S)
            self._num_rests += 1
        else:
            self.free_at = now + min(BACKOFF_S * 2 ** (len(self._failures) - 2), MAX_BACKOFF_S)


class RemoteHost:
    """A host that has joined.

    Args:
      channel: to it.
      facts: of its `join`.

    Attributes:
      address: where it says that other hosts reach it, if it does.
      seen_address: where the leader sees it.
      leader_address: where it sees the leader.
      port: free there, for a coordinator.
      least: processes that it must have to take part.
      generation: the last one that it took part in.
      took_part: it did so since it joined.
      is_ready: a change would be quick, since its standbys wait, or it has none.
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
        self.generation = facts["generation"]
        self.took_part = False
        self.is_ready = False
        self.heard = time.monotonic()

    def take_part(self, generation: int) -> None:
        """Record that it takes part in a generation, for which it uses up its standbys."""
        self.generation, self.took_part, self.is_ready = generation, True, False

    def free(self, now: float) -> list[int]:
        """Return the slots that a process may be started in."""
        return [i for i, slot in enumerate(self.slots) if slot.free_at <= now]
