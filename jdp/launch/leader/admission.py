"""Where hosts come in: those that know the token."""

import asyncio
import functools
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

from jdp.error_codes import with_code
from jdp.launch.transport import token_auth
from jdp.launch.transport.connection import Channel
from jdp.worker.messages import MAX_LINE_BYTES, protocol

# What a visitor may send and how long it may take until it has shown that it knows the token, and
# how many there may be at a time.
VISITOR_BYTES = 4096
VISITOR_S = 10.0
MAX_VISITORS = 256


class Refusal(NamedTuple):
    """Why a host may not join, and whether it is of no use to ask again."""

    why: str
    is_final: bool


class Admission:
    """Listens for hosts, and lets in those that know the token.

    Args:
      listener: a listening socket, which the door closes.
      token: the secret.
      judge: is called with the facts of `join`; gives a reason to refuse, or None.
      admit: is called with the channel of one that is let in, and the facts of its `join`; sends
        it `welcome` with the proof that is given, too.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        judge: Callable[[dict[str, Any]], Refusal | None],
        admit: Callable[[Channel, dict[str, Any], str], None],
    ) -> None:
        self._listener, self._token, self._judge, self._admit = listener, token, judge, admit
        self._visitors: set[Channel] = set()
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Let in no more."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for visitor in [*self._visitors]:
            self._dismiss(visitor)

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError:
            return
        if len(self._visitors) == MAX_VISITORS:
            connection.close()
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = token_auth.make_nonce()
        addresses = connection.getsockname()[0], address[0]
        visitor = Channel(connection, max_line_bytes=VISITOR_BYTES, addresses=addresses)
        visitor.received = functools.partial(self._visited, visitor, nonce)
        visitor.closed = lambda why: self._dismiss(visitor)
        self._visitors.add(visitor)
        self._loop.call_later(VISITOR_S, self._dismiss, visitor)
        visitor.send("challenge", nonce=nonce, protocol=protocol())

    def _dismiss(self, visitor: Channel) -> None:
        if visitor in self._visitors:
            self._visitors.discard(visitor)
            visitor.close()

    def _visited(self, visitor: Channel, nonce: str, kind: str, facts: dict[str, Any]) -> None:
        nonces = nonce, str(facts.pop("nonce", ""))
        given = facts.pop("proof", None)
        if kind != "join" or not token_auth.is_proof(given, self._token, "host", *nonces):
            refusal: Refusal | None = Refusal(
                with_code("JDP309", "it has another token than this run."), True
            )
        else:
            refusal = self._judge(facts)
        if refusal is not None:
            visitor.send("refused", **refusal._asdict())
            return self._dismiss(visitor)
        self._visitors.discard(visitor)
        visitor.max_line_bytes = MAX_LINE_BYTES
        self._admit(visitor, facts, token_auth.proof(self._token, "leader", *nonces))
