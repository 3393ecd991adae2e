"""Lets hosts into the run that know its token."""

import asyncio
import functools
import resource
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

from jdp.error_codes import with_code
from jdp.launch.transport import token_auth
from jdp.launch.transport.connection import Channel, source_of
from jdp.worker import source_digest
from jdp.worker.messages import MAX_LINE_BYTES

# A connection that has not proved that it knows the token may send so much, and take so long.
VISITOR_BYTES = 1 << 16
VISITOR_S = 10.0
# Of more connections the oldest one is closed: a host proves itself at once. They may have a
# quarter of the descriptors that this process may open.
MAX_VISITORS = 256


class Refusal(NamedTuple):
    """The reason why a host may not join, and whether asking again is of no use."""

    why: str
    is_final: bool


class Admission:
    """Listens for hosts, and admits those that know the token.

    Args:
      listener: a listening socket, which is closed at the end.
      token: the secret.
      judge: returns the reason to refuse a host, given the facts of its `join`, or None.
      admit: is called with the channel of an admitted host, the facts of its `join` and the
        leader's proof, and sends `welcome` with that.
      code: digest of this build without comments; None if no other host can come.
      claim: returns the claim of this leader, see `jdp/launch/host/leader_search.py`.
      attach: is called with the channel of a lifeline, the facts of its message and the leader's
        proof.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        judge: Callable[[dict[str, Any]], Refusal | None],
        admit: Callable[[Channel, dict[str, Any], str], None],
        code: str | None = None,
        claim: Callable[[], list[int]] = lambda: [],
        attach: Callable[[Channel, dict[str, Any], str], None] = lambda *ignored: None,
    ) -> None:
        self._listener, self._token, self._judge, self._admit = listener, token, judge, admit
        self._code, self._claim, self._attach = code, claim, attach
        self._visitors: dict[Channel, None] = {}  # oldest first
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        is_unlimited = limit == resource.RLIM_INFINITY
        self._max_visitors = MAX_VISITORS if is_unlimited else min(MAX_VISITORS, limit // 4)
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def stop_listening(self) -> None:
        """Admit no more hosts."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for visitor in [*self._visitors]:
            self._dismiss(visitor)

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError:  # no descriptor is left, or the visitor is gone
            return self._dismiss_oldest()
        if len(self._visitors) >= self._max_visitors:
            self._dismiss_oldest()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = token_auth.make_nonce()
        addresses = connection.getsockname()[0], address[0]
        visitor = Channel(
            connection,
            max_line_bytes=VISITOR_BYTES,
            addresses=addresses,
            source=source_of(address),
        )
        visitor.received = functools.partial(self._visited, visitor, nonce)
        visitor.closed = lambda why: self._dismiss(visitor)
        self._visitors[visitor] = None
        self._loop.call_later(VISITOR_S, self._dismiss, visitor)
        protocol = source_digest.of_bytes(source_digest.PROTOCOL)
        claim = self._claim()
        visitor.send("challenge", nonce=nonce, protocol=protocol, code=self._code, claim=claim)

    def _dismiss(self, visitor: Channel) -> None:
        if visitor in self._visitors:
            del self._visitors[visitor]
            visitor.close_connection()

    def _dismiss_oldest(self) -> None:
        if self._visitors:
            self._dismiss(next(iter(self._visitors)))

    def _visited(self, visitor: Channel, nonce: str, kind: str, facts: dict[str, Any]) -> None:
        nonces = nonce, str(facts.pop("nonce", ""))
        given = facts.pop("proof", None)
        if kind not in ("join", "lifeline") or not token_auth.is_proof(
            given, self._token, "host", *nonces
        ):
            refusal: Refusal | None = Refusal(
                with_code("JDP309", "its token is not that of this run."), True
            )
        else:
            refusal = self._judge(facts) if kind == "join" else None
        if refusal is not None:
            visitor.send("refused", **refusal._asdict())
            return self._dismiss(visitor)
        del self._visitors[visitor]
        visitor.max_line_bytes = MAX_LINE_BYTES
        enter = self._admit if kind == "join" else self._attach
        enter(visitor, facts, token_auth.proof(self._token, "leader", *nonces))
