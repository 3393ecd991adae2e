"""Connections between launchers, and between a launcher and its processes.

Both ends prove that they know the run's token without sending it: each sends a nonce, then an HMAC
of both nonces under the token (challenge and response as in RFC 2195), against replays.
"""

import asyncio
import hmac
import os
import secrets
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from jdp.worker.messages import MAX_LINE_BYTES, decode, encode


def make_nonce() -> str:
    """Return a fresh nonce."""
    return secrets.token_hex(16)


def token_proof(token: str, part: str, leader_nonce: str, host_nonce: str) -> str:
    """Return a proof; its part, "leader" or "host", keeps either from echoing the other's."""
    text = f"jdp {part} {leader_nonce} {host_nonce}"
    return hmac.new(token.encode(), text.encode(errors="replace"), "sha256").hexdigest()


def is_token_proof(given: object, *expected: str) -> bool:
    """Whether `given` is `token_proof(*expected)`, in constant time."""
    # JSON can hold surrogates, impossible in UTF-8.
    given = given.encode(errors="replace") if isinstance(given, str) else b""
    return hmac.compare_digest(given, token_proof(*expected).encode())


# An end with this much unread data has stopped.
_MAX_UNSENT_BYTES = 4 * MAX_LINE_BYTES

CLOSED = "connection closed"


class Channel:
    """One end of a connection on the event loop; owns the socket.

    Args:
      received: called with kind and facts of each message.
      closed: called once with the reason when the other end is gone, not after `close_connection`.
      addresses: of this and the other end; a socket forgets them when the other end is gone.
      source: `source_of` the connecting end, as this end sees it.
    """

    def __init__(
        self,
        connection: socket.socket,
        received: Callable[[str, dict[str, Any]], None] = lambda kind, facts: None,
        closed: Callable[[str], None] = lambda why: None,
        max_line_bytes: int = MAX_LINE_BYTES,
        addresses: tuple[str, str] = ("", ""),
        source: str = "",
    ) -> None:
        connection.setblocking(False)
        self.is_open = True
        self.received = received
        self.max_line_bytes, self.addresses, self.source = max_line_bytes, addresses, source
        self.closed = closed
        self._socket = connection
        self._rest, self._unsent = b"", b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self.read)

    def send(self, kind: str, **facts: Any) -> None:
        """Send a message, unless the other end is gone."""
        if self.is_open:
            self._unsent += encode(kind, facts)
            self._write()

    def read(self) -> None:
        """Receive all arrived messages."""
        while self.is_open:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError as error:
                return self._lose(error.strerror or "connection lost")
            if not data:
                return self._lose(CLOSED)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._receive(line)
            if len(self._rest) > self.max_line_bytes:
                return self._lose(f"a message of more than {self.max_line_bytes} bytes")

    def close_connection(self) -> None:
        """Close this end."""
        if self.is_open:
            self.is_open = False
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()

    # The kernel may take only a part of a long message.
    def _write(self) -> None:
        try:
            count = self._socket.send(self._unsent)
        except BlockingIOError:
            count = 0
        except OSError as error:
            return self._lose(error.strerror or "connection lost")
        self._unsent = self._unsent[count:]
        if len(self._unsent) > _MAX_UNSENT_BYTES:
            self._lose("it stopped reading")
        elif self._unsent:
            self._loop.add_writer(self._socket, self._write)
        else:
            self._loop.remove_writer(self._socket)

    def _receive(self, line: bytes) -> None:
        if not self.is_open:
            return
        try:
            kind, facts = decode(line)
        except ValueError as error:
            return self._lose(str(error))
        self.received(kind, facts)

    # `closed` is called later, so no state changes during `send`.
    def _lose(self, why: str) -> None:
        if self.is_open:
            self.close_connection()
            self._loop.call_soon(self.closed, why)


def source_of(address: tuple[Any, ...]) -> str:
    """Return a socket's address and port as text, equal on both hosts.

    >>> source_of(("fe80::1%eth0", 7, 0, 2))
    'fe80::1 7'
    """
    name, port = address[:2]
    return f"{name.partition('%')[0]} {port}"


def start_task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task whose error reaches the event loop."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: None if done.cancelled() else done.result())
    return task


async def connect(address: tuple[str, int], timeout_s: float) -> socket.socket:
    """Connect to the first address of a name that answers."""
    found = await asyncio.get_running_loop().getaddrinfo(*address, type=socket.SOCK_STREAM)
    whys = []
    for family, kind, number, _, where in found:
        try:
            async with asyncio.timeout(timeout_s / len(found)):
                return await _connect_to(socket.socket(family, kind, number), where)
        except OSError as error:
            # asyncio replaces an error number's text.
            number = error.errno
            whys.append(os.strerror(number) if number else f"no answer from {where[0]}")
    raise OSError("; ".join(dict.fromkeys(whys)))


async def _connect_to(connection: socket.socket, where: Any) -> socket.socket:
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, where)
    except BaseException:
        connection.close()
        raise
    # Messages answer each other: TCP must not wait for more data.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


# The longest delay between both connections' ends.
LIFELINE_S = 1.0


class Lifeline:
    """One end of a connection that carries only a living launcher's farewell.

    A dead launcher's kernel closes the connection in order; a cut network shows nothing, and a
    firewall's reset is no orderly end. So an orderly end without a farewell means that the other
    launcher and its processes are dead. A proxy (service mesh, `ssh -L`) closes in order when the
    network behind it is cut: it shows no death.

    Args:
      channel: of an authenticated peer.
      died: called once if the other launcher has died.
    """

    def __init__(self, channel: Channel, died: Callable[[], None], is_direct: bool) -> None:
        self.has_died = False
        self._channel, self._died, self._said_farewell = channel, died, False
        self._is_direct = is_direct
        channel.received, channel.closed = self._receive, self._closed

    def leave(self) -> None:
        """Close it with a farewell."""
        self._channel.send("farewell")
        self._channel.close_connection()

    def _receive(self, kind: str, facts: dict[str, Any]) -> None:
        self._said_farewell = self._said_farewell or kind == "farewell"

    def _closed(self, why: str) -> None:
        if why == CLOSED and self._is_direct and not self._said_farewell:
            self.has_died = True
            self._died()
