"""A connection that shows the death of the launcher at its other end, and not only silence."""

from collections.abc import Callable
from typing import Any

from jdp.launch.transport.connection import CLOSED, Channel

# The end of a lifeline is seen at most so many seconds after that of the other connection.
LIFELINE_S = 1.0


class Lifeline:
    """One end of a connection on which nothing is sent, except a farewell by one that lives.

    If a launcher dies, its kernel closes the connection in order, since no data waits there. If the
    network is cut, nothing is seen, and a reset by a firewall is not an orderly end. So an orderly
    end without a farewell means that the other launcher is dead, and its processes with it.

    A proxy between them (a service mesh, `ssh -L`) has connections of its own, and closes them in
    order when the network behind it is cut. So a connection through one shows no death.

    Args:
      channel: of an authenticated peer.
      died: is called once if the other launcher has died.
      is_direct: whether no proxy is between both ends.
    """

    def __init__(self, channel: Channel, died: Callable[[], None], is_direct: bool) -> None:
        self.has_died = False
        self._channel, self._died, self._said_farewell = channel, died, False
        self._is_direct = is_direct
        channel.received, channel.closed = self._receive, self._closed

    def leave(self) -> None:
        """Close it, and let the other end know that this launcher lives."""
        self._channel.send("farewell")
        self._channel.close_connection()

    def _receive(self, kind: str, facts: dict[str, Any]) -> None:
        self._said_farewell = self._said_farewell or kind == "farewell"

    def _closed(self, why: str) -> None:
        if why == CLOSED and self._is_direct and not self._said_farewell:
            self.has_died = True
            self._died()
