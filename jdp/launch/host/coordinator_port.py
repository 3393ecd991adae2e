"""A port for process 0 of the next generation, in case that process is on this host."""

import socket


class CoordinatorPort:
    """A port that is reserved, so that no other program gets it meanwhile."""

    def __init__(self) -> None:
        self._socket = _bound()

    @property
    def number(self) -> int:
        """The number of the port."""
        return self._socket.getsockname()[1]

    def release(self) -> None:
        """Let process 0 listen there."""
        self._socket.close()

    def renew(self) -> int:
        """Reserve another one, and return its number."""
        self._socket.close()
        self._socket = _bound()
        return self.number


def _bound() -> socket.socket:
    if not socket.has_dualstack_ipv6():
        reserved = socket.socket()
        reserved.bind(("", 0))
        return reserved
    reserved = socket.socket(socket.AF_INET6)
    reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    reserved.bind(("::", 0))
    return reserved
