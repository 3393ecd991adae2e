"""`jdp run`: one launcher, and its leader while it leads."""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Callable
from typing import Any

from jdp.launch import election
from jdp.launch.connection import Channel, connect, start_task
from jdp.launch.election import Address, Rendezvous, claim_of, read_claim
from jdp.launch.host.agent import Agent, Outcome
from jdp.launch.host.console import write_all
from jdp.launch.host.leader_connection import RETRY_S
from jdp.launch.host.worker_process import HostResources
from jdp.launch.leader import metrics_endpoint
from jdp.launch.leader.leader import Leader
from jdp.launch.leader.metrics_endpoint import MetricsEndpoint, require_endpoint
from jdp.launch.options import Options
from jdp.worker.run_progress import RunSummary

_PEEK_S = 1.0


class Candidacy:
    """Leads when this host says so, and resigns for a better claim."""

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
        """Lead; `home` is this host's id."""
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
        """End the run on all hosts, if this launcher leads."""
        if self._looking is not None:
            self._looking.cancel()
        if self._leader is not None:
            await self._leader.finish_run(code, why)
        self._close_endpoint()

    def _claim(self) -> list[int]:
        assert self._leader is not None
        own = self._rendezvous.own or 0
        return claim_of(self._leader.has_generation, self._leader.number, own)

    # The others may have left a leader without a generation.
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
                    await asyncio.sleep(2 * RETRY_S)  # the launcher there finds this one
                    return self._leader.give_up(self._other_list(place, claim[2]))
                if claim and claim < self._claim():
                    return self._resign()

    def _other_list(self, place: int, its_place: int) -> str:
        name, port = self._rendezvous.addresses[place]
        return (
            f"{name}:{port} has place {place} in --rdzv-endpoint {self._options.rdzv_endpoint}, "
            f"but its launcher reports place {its_place}, so two hosts could lead at the same "
            "time. Pass the same list on all hosts, with each host once."
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


# The claim of the launcher that leads at an address, or None.
async def _peek(address: Address) -> list[int] | None:
    heard: asyncio.Future[list[int] | None] = asyncio.get_running_loop().create_future()

    def hear(kind: str, facts: dict[str, Any]) -> None:
        if not heard.done():
            heard.set_result(read_claim(facts.get("claim")) if kind == "challenge" else None)

    with contextlib.suppress(OSError):  # also a timeout
        async with asyncio.timeout(_PEEK_S):
            channel = Channel(await connect(address, _PEEK_S), hear, lambda why: hear("", {}))
            try:
                return await heard
            finally:
                channel.close_connection()
    return None


# Processes get SIGTERM for the last three, for which scripts have no handler.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run(options: Options) -> int:
    """Run a program on this host, perhaps with other hosts."""
    _open_standard_streams()
    try:
        meeting = election.find(options)
        require_endpoint(options.metrics_port, may_lead=meeting.own is not None)
        resources = HostResources(options)
        resources.orphans.start_adopting()
        if not resources.orphans.adopts:
            resources.refuse_forks("the launcher has other children, or cannot adopt any")
    except (OSError, ValueError) as error:
        _say(str(error))
        return 2
    try:
        outcome = asyncio.run(_run(options, resources, meeting))
    finally:
        try:
            resources.release()
        except TimeoutError as error:
            _say(str(error))
    if outcome.why:
        _say(resources.logs.shortened(outcome.why))
    return outcome.code


async def _run(options: Options, resources: HostResources, meeting: election.Rendezvous) -> Outcome:
    loop = asyncio.get_running_loop()
    bug: asyncio.Future[Outcome] = loop.create_future()
    loop.set_exception_handler(lambda loop, context: _record_bug(bug, context))
    token = options.token or secrets.token_hex(16)
    candidacy = Candidacy(
        *(options, token, meeting, resources.say, resources.logs.show_summary),
        resigned=lambda: host.search.resign(),
    )
    host = Agent(options, token, meeting, resources, candidacy.lead)
    host.search.lead_if_alone()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(number, host.stop, number)
    loop.add_signal_handler(signal.SIGQUIT, host.show_stacks)  # Ctrl-\
    try:
        await asyncio.wait([host.over, bug], return_when=asyncio.FIRST_COMPLETED)
        outcome = host.over.result() if host.over.done() else bug.result()
        await candidacy.end(*outcome)
        return outcome
    finally:
        meeting.release()
        await host.leave()


# A daemon may have closed them: their numbers would go to processes' pipes.
def _open_standard_streams() -> None:
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(file)
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")


# asyncio would only log the error, and the run would never end.
def _record_bug(bug: asyncio.Future[Outcome], context: dict) -> None:
    if not bug.done():
        bug.set_exception(context.get("exception") or RuntimeError(context["message"]))


# Before the logs open, and after they close.
def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        data = f"jdp run: {text}\n".encode(errors="backslashreplace")
        write_all(sys.stderr.buffer, data)
