"""The leader in this launcher, as long as it leads."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from jdp.launch.claim import claim_of, read_claim
from jdp.launch.host.leader_connection import RETRY_S
from jdp.launch.leader import metrics_endpoint
from jdp.launch.leader.leader import Leader
from jdp.launch.leader.metrics_endpoint import MetricsEndpoint
from jdp.launch.options.options import Options
from jdp.launch.rendezvous import Address, Rendezvous
from jdp.launch.transport.connection import Channel, connect, start_task
from jdp.worker.run_summary import RunSummary

_PEEK_S = 1.0


class Candidacy:
    """Leads when this host says so, and resigns when another launcher has a better claim.

    Args:
      options, token, rendezvous: of the run.
      say, show: of `Leader`.
      resigned: is called when this launcher no longer leads.
    """

    def __init__(
        self,
        options: Options,
        token: str,
        rendezvous: Rendezvous,
        say: Callable[[str], None],
        show: Callable[[RunSummary], None],
        resigned: Callable[[], None],
    ) -> None:
        self._options, self._token, self._rendezvous = options, token, rendezvous
        self._say, self._show, self._resigned = say, show, resigned
        self._leader: Leader | None = None
        self._endpoint: MetricsEndpoint | None = None
        self._looking: asyncio.Task[None] | None = None
        rendezvous.turn_away()

    def lead(self, home: str) -> None:
        """Lead; `home` is the id of this launcher's host."""
        listener = self._rendezvous.listen()
        self._leader = Leader(
            *(self._options, self._token, listener, self._say, self._show, self._claim)
        )
        self._leader.members.home = home
        self._endpoint = metrics_endpoint.serve(
            self._options.metrics_port, self._leader.metrics, self._say
        )
        if self._rendezvous.is_elective:
            self._looking = start_task(self._look_for_better())

    async def end(self, code: int, why: str) -> None:
        """Report how the run ended to the hosts, if this launcher leads."""
        if self._looking is not None:
            self._looking.cancel()
        if self._leader is not None:
            await self._leader.finish_run(code, why)
        self._close_endpoint()

    def _claim(self) -> list[int]:
        assert self._leader is not None
        own = self._rendezvous.own or 0
        return claim_of(self._leader.has_generation, self._leader.number, own)

    # A leader without a generation may be one that the others have left.
    async def _look_for_better(self) -> None:
        assert self._leader is not None
        addresses, own = self._rendezvous.addresses, self._rendezvous.own
        while True:
            await asyncio.sleep(RETRY_S)
            for place, address in enumerate(addresses):
                if self._leader.has_generation or self._leader.members.is_ending:
                    break
                if place == own:
                    continue
                claim = await _peek(address)
                if claim and claim[2] != place:
                    await asyncio.sleep(2 * RETRY_S)  # until the launcher there finds this one
                    return self._leader.give_up(self._other_list(place, claim[2]))
                if claim and claim < self._claim():
                    return self._resign()

    def _other_list(self, place: int, its_place: int) -> str:
        name, port = self._rendezvous.addresses[place]
        return (
            f"{name}:{port} has place {place} in --rdzv-endpoint {self._options.rdzv_endpoint}, "
            f"but the launcher there takes itself for the host of place {its_place}: two hosts "
            "could lead at the same time. Give all hosts the same list, with each host once."
        )

    def _resign(self) -> None:
        leader, self._leader = self._leader, None
        assert leader is not None
        leader.resign()
        self._close_endpoint()
        self._rendezvous.turn_away()
        self._resigned()

    def _close_endpoint(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None


# The claim of the launcher that leads at that address, or None.
async def _peek(address: Address) -> list[int] | None:
    heard: asyncio.Future[list[int] | None] = asyncio.get_running_loop().create_future()

    def hear(kind: str, facts: dict[str, Any]) -> None:
        if not heard.done():
            heard.set_result(read_claim(facts.get("claim")) if kind == "challenge" else None)

    with contextlib.suppress(OSError):  # a timeout, too
        async with asyncio.timeout(_PEEK_S):
            channel = Channel(await connect(address, _PEEK_S), hear, lambda why: hear("", {}))
            try:
                return await heard
            finally:
                channel.close_connection()
    return None
