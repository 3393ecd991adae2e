"""Where a host looks for its leader, and when it leads itself."""

import math
import time
from collections.abc import Callable

from jdp.launch.claim import claim_of, read_claim
from jdp.launch.rendezvous import Address, Rendezvous

# After a leader was silent for the heartbeat timeout T and this host has left it, the leader hears
# nothing more, and kills its own processes after 1.5 T. So this host may follow another one after
# 2 T, whatever the network did.
WAIT = 2.0


class LeaderSearch:
    """Decides which addresses a host tries to join, in which order.

    Args:
      rendezvous: the addresses.
      heartbeat_timeout_s: of the run.
      generation: returns the last generation in which this host took part; -1 if none.
      lead: has this launcher lead.

    Attributes:
      leads: whether this launcher leads.
      own: place of this host; None if it may not lead.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        heartbeat_timeout_s: float,
        generation: Callable[[], int],
        lead: Callable[[], None],
    ) -> None:
        self.leads = False
        self.is_elective = rendezvous.is_elective
        self.addresses = rendezvous.addresses
        self.own = rendezvous.own
        self._wait_s = WAIT * heartbeat_timeout_s
        self._generation, self._lead = generation, lead
        self._joined: int | None = None  # the place of the leader that this host joined last
        self._wait_until = 0.0
        self._num_rounds = 0

    @classmethod
    def of_one(cls, address: Address) -> "LeaderSearch":
        """Return the search for a leader that is at one address, and not in this launcher."""
        return cls(Rendezvous([address]), 0.0, lambda: -1, lambda: None)

    @property
    def connect_timeout_s(self) -> float:
        """Seconds to wait for a connection: others are tried after that."""
        return 1.0 if self.is_elective else math.inf

    @property
    def leader(self) -> str:
        """The address of the leader that this host joined last, as text."""
        name, port = self.addresses[self._joined or 0]
        return f"{name}:{port}"

    def lead_if_alone(self) -> None:
        """Lead at once if no other host may."""
        if not self.is_elective and self.own is not None:
            self._begin_to_lead()

    def resign(self) -> None:
        """Stop leading, and follow a better leader at once."""
        self.leads, self._wait_until = False, 0.0

    def _begin_to_lead(self) -> None:
        self.leads = True
        self._lead()

    def record_joined(self, place: int) -> None:
        """Record that the leader at this place has let this host join."""
        self._joined = place

    def begin(self, is_leader_dead: bool) -> None:
        """Begin a search, perhaps after the leader was lost."""
        self._num_rounds = 0
        if self._joined is not None and self._joined != self.own and not is_leader_dead:
            self._wait_until = time.monotonic() + self._wait_s

    def end_wait(self) -> None:
        """Follow another leader at once: this one has resigned."""
        self._wait_until = 0.0

    def places(self) -> list[int]:
        """Return the places in `addresses` to try now, in this order."""
        if self.leads:
            return [self.own or 0]
        if self._joined is not None and time.monotonic() < self._wait_until:
            return [self._joined]
        others = [i for i in range(len(self.addresses)) if i != self.own or not self.is_elective]
        # The one that was lost is probably still dead.
        return sorted(others, key=lambda i: (i == self._joined, i))

    def is_better(self, claim: object) -> bool:
        """Whether a leader with this claim should lead this host."""
        if self.leads or not self.is_elective or self.own is None:
            return True
        given = read_claim(claim)
        return given is not None and given < claim_of(False, self._generation(), self.own)

    def begins_to_lead(self) -> bool:
        """Record that no place had a leader for this host, and return whether it leads now."""
        if self.leads or not self.is_elective or time.monotonic() < self._wait_until:
            return False
        self._num_rounds += 1
        # A launcher that knows nothing must not lead, unless the run begins.
        if self.own is None or not (self.own == 0 or self._generation() >= 0):
            return False
        # Those before it have a better claim, and as many rounds to make it.
        before = sum(i != self._joined for i in range(self.own))
        if self._num_rounds > before:
            self._begin_to_lead()
        return self.leads
