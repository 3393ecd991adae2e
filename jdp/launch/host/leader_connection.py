"""A host's connection to the leader."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from jdp.error_codes import with_code
from jdp.launch import connection
from jdp.launch.connection import LIFELINE_S, Channel, Lifeline, connect, source_of, start_task
from jdp.launch.election import LeaderSearch
from jdp.launch.options import Options
from jdp.worker import build_info

# Seconds; a busy leader may be slow.
_OPEN_S = 10.0
_RETRY_S = 0.5


class LeaderLifeline:
    """A `Lifeline` to the leader, opened in the background."""

    def __init__(self, token: str, address: tuple[str, int], launcher: str) -> None:
        self._token, self._address, self._launcher = token, address, launcher
        self._lifeline: Lifeline | None = None
        self._opening = start_task(self._open())

    async def shows_death(self) -> bool:
        """Whether the leader has died, after the other connection's end."""
        # Its kernel may close this connection later.
        for _ in range(20):
            if self._lifeline is None or self._lifeline.has_died:
                break
            await asyncio.sleep(LIFELINE_S / 20)
        return self._lifeline is not None and self._lifeline.has_died

    def leave(self) -> None:
        """Close it with a farewell."""
        self._opening.cancel()
        if self._lifeline is not None:
            self._lifeline.leave()

    async def _open(self) -> None:
        while self._lifeline is None:
            with contextlib.suppress(OSError):  # also a timeout
                await self._try()
            if self._lifeline is None:
                await asyncio.sleep(_RETRY_S)

    async def _try(self) -> None:
        nonces, ended = ["", connection.make_nonce()], asyncio.Event()

        def receive(kind: str, facts: dict[str, Any]) -> None:
            if kind == "challenge":
                nonces[0] = str(facts.get("nonce"))
                own = {
                    "nonce": nonces[1],
                    "proof": connection.token_proof(self._token, "host", *nonces),
                }
                channel.send("lifeline", id=self._launcher, source=source, **own)
            elif connection.is_token_proof(facts.get("proof"), self._token, "leader", *nonces):
                # At once: the connection's end may be read next.
                is_direct = bool(facts.get("is_direct"))
                self._lifeline = Lifeline(channel, lambda: None, is_direct)
                ended.set()

        async with asyncio.timeout(_OPEN_S):
            stream = await connect(self._address, _OPEN_S)
            source = source_of(stream.getsockname())
            channel = Channel(stream, receive, lambda _: ended.set())
            try:
                await ended.wait()
            finally:
                if self._lifeline is None:
                    # The leader may already use it, and would take its end for a death.
                    channel.send("farewell")
                    channel.close_connection()


RETRY_S = 0.5


class LeaderConnection:
    """Joins the run, and detects the leader's loss.

    Args:
      introduce: returns the facts of `join`, without the proof.
      joined: called after the join, with whether a generation runs.
      received: called with kind and facts of each later message.
      lost, gave_up: called with the reason why the leader is lost, or this host cannot join.

    Attributes:
      leader: id of the last leader's launcher.
      has_leader_died: whether that death was seen.
    """

    def __init__(
        self,
        options: Options,
        token: str,
        search: LeaderSearch,
        introduce: Callable[[], dict[str, Any]],
        joined: Callable[[bool], None],
        received: Callable[[str, dict[str, Any]], None],
        lost: Callable[[str], None],
        gave_up: Callable[[str], None],
    ) -> None:
        self.is_joined = False
        self.leader, self.has_leader_died = "", False
        self._options, self._token, self._search = options, token, search
        self._introduce, self._joined = introduce, joined
        self._received, self._lost, self._gave_up = received, lost, gave_up
        self._channel: Channel | None = None
        self._nonces = "", ""  # leader's, host's
        self._answer: asyncio.Future[str] | None = None  # "" or why not
        self._lease_s = 0.0  # monotonic end of the leader's lease
        self._lifeline: LeaderLifeline | None = None
        self._task = start_task(self._join())

    @property
    def silent_s(self) -> float:
        """Seconds since the leader answered."""
        return max(0.0, time.monotonic() - self._lease_s + self._options.heartbeat_timeout_s)

    def send(self, kind: str, **facts: Any) -> None:
        """Send a message to the leader, if joined."""
        if self.is_joined and self._channel is not None:
            self._channel.send(kind, **facts)

    def beat(self, **facts: Any) -> None:
        """Send a beat; drop a silent leader."""
        self.send("beat", at=time.monotonic(), **facts)
        if self.is_joined and not self._search.leads and time.monotonic() > self._lease_s:
            self._end_lifeline()
            self._disconnected(f"silent for {self._options.heartbeat_timeout_s:g} s")

    def join_again(self) -> None:
        """Search for a leader again."""
        self._task.cancel()
        self._task = start_task(self._join_again())

    def follow_another(self) -> None:
        """Search for another leader."""
        self.leave()
        self._search.end_wait()
        self._task = start_task(self._join())

    def leave(self) -> None:
        """Leave the run."""
        self.is_joined = False
        self._task.cancel()
        self._close_channel()
        self._end_lifeline()

    async def _join_again(self) -> None:
        self.has_leader_died = self._lifeline is not None and await self._lifeline.shows_death()
        self._end_lifeline()
        self._search.begin(self.has_leader_died)
        await self._join()

    def _end_lifeline(self) -> None:
        if self._lifeline is not None:
            self._lifeline.leave()
            self._lifeline = None

    async def _join(self) -> None:
        give_up, why = time.monotonic() + self._options.join_timeout_s, ""
        while time.monotonic() < give_up:
            for place in self._search.places():
                why = await self._try(place)
                if not why:
                    return
            if not self._search.begins_to_lead():
                await asyncio.sleep(RETRY_S)
        where = " or ".join("{}:{}".format(*address) for address in self._search.addresses)
        text = (
            f"no leader at {where} accepted this host within {self._options.join_timeout_s:g} s: "
            f"{why}. Check that `jdp run` runs there and that this host may connect to that port."
        )
        self._gave_up(with_code("JDP307", text))

    # Return the reason for a failure, "" on success.
    async def _try(self, place: int) -> str:
        address = self._search.addresses[place]
        self._answer = asyncio.get_running_loop().create_future()
        timeout_s = self._options.heartbeat_timeout_s
        give_up, why = time.monotonic() + timeout_s, f"no answer within {timeout_s:g} s"
        try:
            async with asyncio.timeout(timeout_s):
                connect_s = min(timeout_s, self._search.connect_timeout_s)
                connection = await connect(address, connect_s)
        except OSError as error:
            return error.strerror or (why if isinstance(error, TimeoutError) else str(error))
        self._channel = Channel(connection, self._receive, self._disconnected)
        try:
            # An answer at the deadline counts.
            done, _ = await asyncio.wait([self._answer], timeout=give_up - time.monotonic())
        finally:  # also on cancellation, or a late answer would reach the next attempt
            if not self.is_joined:
                self._close_channel()
        if done and not (why := self._answer.result()):
            self._record_joined(place)
        return why

    def _record_joined(self, place: int) -> None:
        self._search.record_joined(place)
        if self._search.is_elective:
            own = self._introduce()["id"]
            self._lifeline = LeaderLifeline(self._token, self._search.addresses[place], own)

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close_connection()

    def _receive(self, kind: str, facts: dict[str, Any]) -> None:
        match kind:
            # An unauthenticated peer may send only the first three.
            case "challenge":
                given = (facts.get(name) for name in ("protocol", "code", "claim"))
                self._prove(str(facts.get("nonce")), *given)
            case "welcome":
                self._enter(facts.get("proof"), bool(facts.get("is_running")))
                self.leader = str(facts.get("leader"))
            case "refused":
                self._refused(str(facts.get("why")), bool(facts.get("is_final")))
            case "beat" if self.is_joined:
                self._lease_s = max(self._lease_s, facts["at"] + self._options.heartbeat_timeout_s)
            case _ if self.is_joined:
                self._received(kind, facts)

    def _prove(self, nonce: str, its_bytes: object, its_code: object, claim: object) -> None:
        assert self._channel is not None
        if not self._search.is_better(claim):
            return self._answer_with("this host has a better claim to lead")
        rooms = build_info.PROTOCOL
        if its_bytes != build_info.source_digest(rooms) and its_code != build_info.code_digest(
            rooms
        ):
            return self._end(
                with_code(
                    "JDP308",
                    "the launcher at that address runs a different jdp build. Install the same "
                    "version on all hosts.",
                )
            )
        self._nonces = nonce, connection.make_nonce()
        proof = connection.token_proof(self._token, "host", *self._nonces)
        self._channel.send("join", nonce=self._nonces[1], proof=proof, **self._introduce())

    def _enter(self, proof: object, is_running: bool) -> None:
        if not connection.is_token_proof(proof, self._token, "leader", *self._nonces):
            text = "the launcher at that address does not know the token of this run."
            return self._end(with_code("JDP309", text))
        self.is_joined, self.has_leader_died = True, False
        self._lease_s = time.monotonic() + self._options.heartbeat_timeout_s
        self._answer_with("")
        self._joined(is_running)

    def _refused(self, why: str, is_final: bool) -> None:
        if is_final:
            self._end(f"the leader refuses this host: {why}")
        else:
            self._answer_with(why)

    def _end(self, why: str) -> None:
        self.leave()
        self._gave_up(why)

    def _answer_with(self, why: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(why)

    def _disconnected(self, why: str) -> None:
        self._close_channel()
        if self.is_joined:
            self.is_joined = False
            self._lost(why)
        else:
            self._answer_with(why)
