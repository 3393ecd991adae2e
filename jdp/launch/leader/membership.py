"""A run's hosts: which may join, have joined, and are lost."""

import asyncio
import functools
import resource
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jdp.error_codes import with_code
from jdp.launch import connection
from jdp.launch.connection import LIFELINE_S, Channel, Lifeline, source_of
from jdp.launch.leader import failure, rank_assignment
from jdp.launch.leader.failure import Cause
from jdp.launch.leader.remote_host import RemoteHost
from jdp.launch.leader.run_report import Events
from jdp.launch.options import Options
from jdp.worker import build_info
from jdp.worker.messages import MAX_LINE_BYTES

# The limit until a connection proves that it knows the token.
VISITOR_BYTES = 1 << 16
VISITOR_S = 10.0
# The oldest is closed, since a host proves itself at once. At most a quarter of this process's
# descriptors.
MAX_VISITORS = 256


class Refusal(NamedTuple):
    """Why a host may not join, perhaps never."""

    why: str
    is_final: bool


class Admission:
    """Listens for hosts, and admits those that know the token.

    Args:
      judge: returns the reason to refuse a host, given the facts of its `join`.
      admit: called with the channel, the facts of `join` and the leader's proof, for `welcome`.
      code: digest of this build without comments; None if no other host can come.
      claim: returns the leader's claim, see `jdp/launch/election.py`.
      attach: called with a lifeline's channel, its facts and the leader's proof.
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
        """Stop admitting hosts."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for visitor in [*self._visitors]:
            self._dismiss(visitor)

    def _accept(self) -> None:
        try:
            stream, address = self._listener.accept()
        except OSError:  # no descriptor is left, or the visitor is gone
            return self._dismiss_oldest()
        if len(self._visitors) >= self._max_visitors:
            self._dismiss_oldest()
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = connection.make_nonce()
        addresses = stream.getsockname()[0], address[0]
        visitor = Channel(
            stream, max_line_bytes=VISITOR_BYTES, addresses=addresses, source=source_of(address)
        )
        visitor.received = functools.partial(self._visited, visitor, nonce)
        visitor.closed = lambda why: self._dismiss(visitor)
        self._visitors[visitor] = None
        self._loop.call_later(VISITOR_S, self._dismiss, visitor)
        protocol = build_info.source_digest(build_info.PROTOCOL)
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
        if kind not in ("join", "lifeline") or not connection.is_token_proof(
            given, self._token, "host", *nonces
        ):
            refusal: Refusal | None = Refusal(
                with_code("JDP309", "its token differs from that of this run."), True
            )
        else:
            refusal = self._judge(facts) if kind == "join" else None
        if refusal is not None:
            visitor.send("refused", **refusal._asdict())
            return self._dismiss(visitor)
        del self._visitors[visitor]
        visitor.max_line_bytes = MAX_LINE_BYTES
        enter = self._admit if kind == "join" else self._attach
        enter(visitor, facts, connection.token_proof(self._token, "leader", *nonces))


_THROUGH_PROXY = (
    "host {} is connected through a proxy or NAT, which hides the death of a launcher, so a dead "
    "launcher counts as alive, and the run continues only with a majority of the hosts of "
    "--rdzv-endpoint. Use addresses there at which hosts reach each other directly."
)


class Membership:
    """A run's hosts, in the order of their `join`.

    Args:
      joined: called with a host and the facts of its `join`; returns whether a generation runs.
      received: called with a host, and kind and facts of its message.
      lost: called with a lost host, and this as a cause.
      died: called with a host whose launcher has died.

    Attributes:
      home: id of the leader's own host.
      is_ending: no host may join.
      is_over: hosts leave.
    """

    def __init__(
        self,
        options: Options,
        token: str,
        listener: socket.socket,
        say: Callable[[str], None],
        events: Events,
        joined: Callable[[RemoteHost, dict[str, Any]], bool],
        received: Callable[[RemoteHost, str, dict[str, Any]], None],
        lost: Callable[[RemoteHost, Cause], None],
        died: Callable[[RemoteHost], None],
        claim: Callable[[], list[int]],
    ) -> None:
        self.remotes: list[RemoteHost] = []
        self._lost_remotes: list[RemoteHost] = []  # their lifelines may show their death
        self.home = ""
        self.is_ending = self.is_over = False
        self._all_left = asyncio.Event()
        self._options, self._say, self._events = options, say, events
        self._joined, self._received, self._lost, self._died = joined, received, lost, died
        code = build_info.code_digest(build_info.PROTOCOL) if options.nnodes[1] > 1 else None
        self._admission = Admission(
            listener, token, self._refusal, self._admit, code, claim, self._attach
        )

    def could_form_more(self, now: float, num_processes: int) -> bool:
        """Whether a larger generation could be formed now."""
        plan = rank_assignment.make(self.remotes, self._options.nnodes[0], now) or []
        is_quick = all(part.remote.is_ready for part in plan)
        return is_quick and rank_assignment.size(plan) > num_processes

    def free_after(self, now: float) -> list[float]:
        """Return the times after `now` at which slots are free."""
        free_at = (slot.free_at for remote in self.remotes for slot in remote.slots)
        return [at for at in free_at if at > now]

    def remove_silent_hosts(self, now: float) -> None:
        """Remove hosts silent for too long."""
        silence_s = 1.5 * self._options.heartbeat_timeout_s
        for remote in [*self.remotes]:
            if remote.id != self.home and now - remote.heard > silence_s:
                self._remove(remote, f"silent for {now - remote.heard:.1f} s")

    def go_on_without_lost_hosts(self) -> None:
        """Send lost hosts a farewell: they must not count this launcher as dead."""
        for remote in self._lost_remotes:
            remote.end_connection()
        self._lost_remotes.clear()

    def end_run(self, **outcome: Any) -> None:
        """End the run on all hosts."""
        self.is_ending = self.is_over = True
        for remote in self.remotes:
            remote.channel.send("over", **outcome)
        self._check_all_left()

    async def end_connections(self, timeout_s: float) -> None:
        """Wait until the other hosts have left, and close all connections."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_left.wait()
        except TimeoutError:
            pass  # it will detect the loss of its leader
        self._admission.stop_listening()
        for remote in self.remotes:
            remote.end_connection()

    def resign(self) -> None:
        """Send all hosts to another leader."""
        self.is_ending = self.is_over = True
        self._admission.stop_listening()
        for remote in self.remotes:
            remote.channel.send("resigned")
            remote.end_connection()

    def _refusal(self, facts: dict[str, Any]) -> Refusal | None:
        if self.is_ending:
            return Refusal("the run is over.", True)
        run_ids = {facts["run_id"], self._options.rdzv_id} - {None}
        if len(run_ids) > 1:
            text = (
                f"its --rdzv-id is {facts['run_id']!r}, that of this run {self._options.rdzv_id!r}."
            )
            return Refusal(with_code("JDP312", text), True)
        own = self._options.rdzv_endpoint
        listed = facts.get("endpoints") or own
        if listed != own and "," in f"{listed}{own}":
            return Refusal(
                f"its --rdzv-endpoint is {listed}, that of the leader {own}. The list of hosts "
                "must be the same on all of them, or two could lead at the same time.",
                True,
            )
        timeouts_s = facts["heartbeat_timeout_s"], self._options.heartbeat_timeout_s
        if timeouts_s[0] != timeouts_s[1]:
            text = (
                "its --heartbeat-timeout-s is {:g}, that of the leader {:g}. A lost host must "
                "end its processes before others continue, so pass the same value on all hosts."
            )
            return Refusal(text.format(*timeouts_s), True)
        for remote in [*self.remotes]:
            if remote.id == facts["id"]:
                self._remove(remote, "it joined again")
            elif remote.host_id == facts["host_id"] is not None:
                return Refusal(f"host {remote.host_id} has already joined ({remote.name})", False)
        if len(self.remotes) == self._options.nnodes[1]:
            return Refusal(f"all {len(self.remotes)} hosts have already joined", False)
        return None

    def _admit(self, channel: Channel, facts: dict[str, Any], proof: str) -> None:
        remote = RemoteHost(channel, facts)
        channel.received = functools.partial(self._received, remote)
        channel.closed = functools.partial(self._remove, remote)
        self.remotes.append(remote)
        is_running = self._joined(remote, facts)
        channel.send("welcome", proof=proof, is_running=is_running, leader=self.home)
        most = self._options.nnodes[1]
        if most > 1:
            self._say(f"host {remote.name} joined: {len(self.remotes)} of {most}.")
        self._events.write("host joined", host=remote.name, num_hosts=len(self.remotes))

    def _attach(self, channel: Channel, facts: dict[str, Any], proof: str) -> None:
        for remote in self.remotes:
            if remote.id == facts.get("id"):
                is_direct = facts.get("source") == channel.source
                died = functools.partial(self._died, remote)
                remote.lifeline = Lifeline(channel, died, is_direct)
                if not is_direct:
                    self._say(_THROUGH_PROXY.format(remote.name))
                return channel.send("attached", proof=proof, is_direct=is_direct)
        channel.close_connection()

    def _remove(self, remote: RemoteHost, why: str) -> None:
        if remote not in self.remotes:
            return
        remote.end_connection(LIFELINE_S if not remote.channel.is_open else 0.0)
        self.remotes.remove(remote)
        self._lost_remotes.append(remote)
        self._check_all_left()
        if not self.is_over:
            self._events.write("host lost", host=remote.name, why=why)
            silent_s = time.monotonic() - remote.heard
            self._lost(remote, failure.loss_of_host(remote.name, why, silent_s))

    def _check_all_left(self) -> None:
        if {remote.id for remote in self.remotes} <= {self.home}:
            self._all_left.set()
