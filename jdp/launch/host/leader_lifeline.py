"""This host's lifeline to its leader, which shows whether the leader has died."""

import asyncio
import contextlib
from typing import Any

from jdp.launch.transport import token_auth
from jdp.launch.transport.connection import Channel, connect, source_of, start_task
from jdp.launch.transport.lifeline import LIFELINE_S, Lifeline

# To open it; a leader that is busy may take long.
_OPEN_S = 10.0
_RETRY_S = 0.5


class LeaderLifeline:
    """A `Lifeline` to the leader at an address, which is opened in the background.

    Args:
      token, address: of the run; where the leader listens.
      launcher: id of this launcher, which has joined.
    """

    def __init__(self, token: str, address: tuple[str, int], launcher: str) -> None:
        self._token, self._address, self._launcher = token, address, launcher
        self._lifeline: Lifeline | None = None
        self._opening = start_task(self._open())

    async def shows_death(self) -> bool:
        """Whether the leader has died; its other connection has ended."""
        # The kernel of its host may end this one later.
        for _ in range(20):
            if self._lifeline is None or self._lifeline.has_died:
                break
            await asyncio.sleep(LIFELINE_S / 20)
        return self._lifeline is not None and self._lifeline.has_died

    def leave(self) -> None:
        """Close it, and let the leader know that this launcher lives."""
        self._opening.cancel()
        if self._lifeline is not None:
            self._lifeline.leave()

    async def _open(self) -> None:
        while self._lifeline is None:
            with contextlib.suppress(OSError):  # a timeout, too
                await self._try()
            if self._lifeline is None:
                await asyncio.sleep(_RETRY_S)

    async def _try(self) -> None:
        nonces, ended = ["", token_auth.make_nonce()], asyncio.Event()

        def receive(kind: str, facts: dict[str, Any]) -> None:
            if kind == "challenge":
                nonces[0] = str(facts.get("nonce"))
                own = {"nonce": nonces[1], "proof": token_auth.proof(self._token, "host", *nonces)}
                channel.send("lifeline", id=self._launcher, source=source, **own)
            elif token_auth.is_proof(facts.get("proof"), self._token, "leader", *nonces):
                # At once: the end of the connection may be the next to be read.
                is_direct = bool(facts.get("is_direct"))
                self._lifeline = Lifeline(channel, lambda: None, is_direct)
                ended.set()

        async with asyncio.timeout(_OPEN_S):
            connection = await connect(self._address, _OPEN_S)
            source = source_of(connection.getsockname())
            channel = Channel(connection, receive, lambda _: ended.set())
            try:
                await ended.wait()
            finally:
                if self._lifeline is None:
                    # The leader may have taken it for a lifeline already, and the end for a death.
                    channel.send("farewell")
                    channel.close_connection()
