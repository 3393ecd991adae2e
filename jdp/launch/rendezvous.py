"""Where the hosts of a run meet: the addresses that may lead, and the own one among them."""

import asyncio
import contextlib
import errno
import ipaddress
import socket
import sys

from jdp.error_codes import with_code
from jdp.launch.options.options import Options

Address = tuple[str, int]


class Rendezvous:
    """The addresses of `--rdzv-endpoint`, one of which this host may hold.

    Attributes:
      addresses: of the hosts that may lead, in the order of their claims.
      own: index of the address of this host; None if it may not lead.
    """

    def __init__(
        self, addresses: list[Address], own: int | None = None, held: socket.socket | None = None
    ) -> None:
        self.addresses, self.own = addresses, own
        self._socket = held
        if held is not None:
            name, port = held.getsockname()[:2]
            # An own address that the others know by another name.
            addresses[own or 0] = ("127.0.0.1" if name == "0.0.0.0" else name), port

    @property
    def is_elective(self) -> bool:
        """Whether several hosts may lead."""
        return len(self.addresses) > 1

    def listen(self) -> socket.socket:
        """Return a socket that listens at the own address, for a leader."""
        assert self._socket is not None
        self._stop_turning_away()
        return self._socket.dup()

    def turn_away(self) -> None:
        """Close each connection to the own address, so that hosts look for a leader elsewhere."""
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
    """Return where the hosts of this run meet, and hold the own address if there is one."""
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
            # The address is of another host, or another launcher of this host holds it.
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


# The scheduler says that the others know this host by `name`. That may lead to an address that it
# does not have: of a Service or a router, or of the pod that had this name before.
def _listening_as(name: str, port: int) -> socket.socket:
    address = _address_here(name, port)
    try:
        return _listening(address)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL or name == address[0]:
            raise
    print(
        f"jdp run: {name} is {address[0]}, which is not an address of this host, so it listens at "
        f"port {port} of all its addresses.",
        file=sys.stderr,
    )
    return _listening(("", port))


def _cannot_listen(rank: int, address: Address, error: OSError) -> ValueError:
    name, port = address
    text = (
        f"host {rank} leads, and cannot listen at {name}:{port}: {error.strerror}. Give "
        "--rdzv-endpoint an address of this host and a free port."
    )
    return ValueError(with_code("JDP310", text))


# Whether a name can mean this host: one that cannot be found may be that of another host, which is
# not registered yet.
def _may_be_here(name: str) -> bool:
    own = socket.gethostname()
    if name.partition(".")[0].lower() == own.partition(".")[0].lower():
        return True
    try:
        return bool(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except OSError:
        return False


# The address to listen at when the others know this host by `name`. Many hosts resolve their own
# name to a loopback address, which no other host can reach, or not at all: then all addresses, "".
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
