"""Where a run's hosts meet, and which one leads."""

import asyncio
import contextlib
import errno
import ipaddress
import math
import socket
import sys
import time
from collections.abc import Callable

from jdp.error_codes import with_code
from jdp.launch.options import Options

Address = tuple[str, int]


class Rendezvous:
    """The addresses of `--rdzv-endpoint`, best claim first; `own` is this host's index."""

    def __init__(
        self, addresses: list[Address], own: int | None = None, held: socket.socket | None = None
    ) -> None:
        self.addresses, self.own = addresses, own
        self._socket = held
        if held is not None:
            name, port = held.getsockname()[:2]
            addresses[own or 0] = ("127.0.0.1" if name == "0.0.0.0" else name), port

    @property
    def is_elective(self) -> bool:
        """Whether several hosts may lead."""
        return len(self.addresses) > 1

    def listen(self) -> socket.socket:
        """Return a socket that listens at the own address."""
        assert self._socket is not None
        self._stop_turning_away()
        return self._socket.dup()

    def turn_away(self) -> None:
        """Close connections to the own address: hosts then try another leader."""
        if self._socket is not None:
            asyncio.get_running_loop().add_reader(self._socket, self._turn_away)

    def _turn_away(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(OSError):
            self._socket.accept()[0].close()

    def _stop_turning_away(self) -> None:
        assert self._socket is not None
        asyncio.get_running_loop().remove_reader(self._socket)

    def release(self) -> None:
        """Release the own address."""
        if self._socket is not None:
            self._stop_turning_away()
            self._socket.close()


def find(options: Options) -> Rendezvous:
    """Return this run's rendezvous; hold the own address, if any."""
    if not options.endpoints:
        return Rendezvous([("127.0.0.1", 0)], 0, _listening(("127.0.0.1", 0)))
    addresses = options.endpoints
    if options.node_rank is not None:
        if options.node_rank >= len(addresses):
            return Rendezvous(addresses)
        return Rendezvous(addresses, options.node_rank, _hold_own(options))
    for i, address in enumerate(addresses):
        if not _may_be_here(address[0]):
            continue
        try:
            return Rendezvous(addresses, i, _listening(_address_here(*address)))
        except OSError as error:
            # Another host's address, or held by another launcher.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                raise _cannot_listen(i, address, error) from error
    return Rendezvous(addresses)


def _hold_own(options: Options) -> socket.socket:
    rank = options.node_rank or 0
    name, port = options.endpoints[rank]
    try:
        return _listening_as(name, port)
    except OSError as error:
        raise _cannot_listen(rank, (name, port), error) from error


# The scheduler's name of this host may resolve to a Service, a router, or an earlier pod.
def _listening_as(name: str, port: int) -> socket.socket:
    address = _address_here(name, port)
    try:
        return _listening(address)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL or name == address[0]:
            raise
    print(
        f"jdp run: {name} is {address[0]}, which is not an address of this host, so it listens "
        f"on port {port} of all its addresses.",
        file=sys.stderr,
    )
    return _listening(("", port))


def _cannot_listen(rank: int, address: Address, error: OSError) -> ValueError:
    name, port = address
    text = (
        f"host {rank} leads, but cannot listen on {name}:{port}: {error.strerror}. Pass an "
        "address of this host and a free port as --rdzv-endpoint."
    )
    return ValueError(with_code("JDP310", text))


# It may be another host's, not yet registered.
def _may_be_here(name: str) -> bool:
    own = socket.gethostname()
    if name.partition(".")[0].lower() == own.partition(".")[0].lower():
        return True
    try:
        return bool(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except OSError:
        return False


# A loopback address, or an unresolved own name, means all addresses, "".
def _address_here(name: str, port: int) -> Address:
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0][4][0]
    except socket.gaierror:
        return "", port
    is_alias = ipaddress.ip_address(found).is_loopback and name not in (found, "localhost")
    return ("" if is_alias else str(found)), port


def _listening(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    listener = socket.create_server(address, family=family, backlog=128)
    listener.setblocking(False)
    return listener


def claim_of(has_generation: bool, generation: int, listed: int) -> list[int]:
    """Return a launcher's claim; the smallest leads.

    All launchers must agree on the order: a running generation's leader, then the latest known
    generation (a restarted launcher knows none), then the order of `--rdzv-endpoint`.
    """
    return [0 if has_generation else 1, -generation, listed]


def read_claim(given: object) -> list[int] | None:
    """Return a claim from an untrusted sender."""
    if isinstance(given, list) and len(given) == 3 and all(type(each) is int for each in given):
        return given
    return None


# A leader without contact for the heartbeat timeout T kills its processes after 1.5 T, so after 2 T
# this host may follow another.
WAIT = 2.0


class LeaderSearch:
    """Orders the addresses that a host tries; `generation` returns its last one, or -1."""

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
        self._joined: int | None = None  # index of the last joined leader
        self._wait_until = 0.0
        self._num_rounds = 0

    @classmethod
    def of_one(cls, address: Address) -> "LeaderSearch":
        """Return the search for a leader at one address."""
        return cls(Rendezvous([address]), 0.0, lambda: -1, lambda: None)

    @property
    def connect_timeout_s(self) -> float:
        """Seconds until the next try."""
        return 1.0 if self.is_elective else math.inf

    @property
    def leader(self) -> str:
        """The last joined leader's address."""
        name, port = self.addresses[self._joined or 0]
        return f"{name}:{port}"

    def lead_if_alone(self) -> None:
        """Lead at once if no other host may."""
        if not self.is_elective and self.own is not None:
            self._begin_to_lead()

    def resign(self) -> None:
        """Follow a better leader at once."""
        self.leads, self._wait_until = False, 0.0

    def _begin_to_lead(self) -> None:
        self.leads = True
        self._lead()

    def record_joined(self, place: int) -> None:
        """Record the joined leader's index."""
        self._joined = place

    def begin(self, is_leader_dead: bool) -> None:
        """Begin a search."""
        self._num_rounds = 0
        if self._joined is not None and self._joined != self.own and not is_leader_dead:
            self._wait_until = time.monotonic() + self._wait_s

    def end_wait(self) -> None:
        """Follow another leader at once."""
        self._wait_until = 0.0

    def places(self) -> list[int]:
        """Return the indices in `addresses` to try now, in order."""
        if self.leads:
            return [self.own or 0]
        if self._joined is not None and time.monotonic() < self._wait_until:
            return [self._joined]
        others = [i for i in range(len(self.addresses)) if i != self.own or not self.is_elective]
        return sorted(others, key=lambda i: (i == self._joined, i))

    def is_better(self, claim: object) -> bool:
        """Whether a leader with this claim should lead this host."""
        if self.leads or not self.is_elective or self.own is None:
            return True
        given = read_claim(claim)
        return given is not None and given < claim_of(False, self._generation(), self.own)

    def begins_to_lead(self) -> bool:
        """Record a round without a leader; return whether this one leads."""
        if self.leads or not self.is_elective or time.monotonic() < self._wait_until:
            return False
        self._num_rounds += 1
        # Without a generation a launcher must not lead, except at the run's start.
        if self.own is None or not (self.own == 0 or self._generation() >= 0):
            return False
        # Each better claim gets one round first.
        before = sum(i != self._joined for i in range(self.own))
        if self._num_rounds > before:
            self._begin_to_lead()
        return self.leads
