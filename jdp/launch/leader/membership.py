"""The hosts of a run: which may join, which have joined, and which are lost."""

import asyncio
import functools
import socket
import time
from collections.abc import Callable
from typing import Any

from jdp.error_codes import with_code
from jdp.launch.leader import failure, rank_assignment
from jdp.launch.leader.admission import Admission, Refusal
from jdp.launch.leader.event_log import Events
from jdp.launch.leader.failure import Cause
from jdp.launch.leader.remote_host import RemoteHost
from jdp.launch.options.options import Options
from jdp.launch.transport.connection import Channel
from jdp.launch.transport.lifeline import LIFELINE_S, Lifeline
from jdp.worker import source_digest

_THROUGH_PROXY = (
    "host {} is connected through a proxy or NAT, which hides the death of a launcher. So a dead "
    "launcher counts as alive, and the run continues only with a majority of the hosts of "
    "--rdzv-endpoint. Name addresses there at which hosts reach each other directly."
)


class Membership:
    """The hosts that have joined, in the order in which they did.

    Args:
      options, token, listener, say, events: of the run. The listening socket is closed at the end.
      joined: is called with a host and the facts of its `join`; returns whether a generation lives.
      received: is called with a host, and kind and facts of its message.
      lost: is called with a host that is gone, and the cause that it would be.
      died: is called with a host whose launcher has died.
      claim: of `Admission`.

    Attributes:
      remotes: the hosts.
      home: id of the leader's own host, once it is known.
      is_ending: whether the run ends, so that no host may join.
      is_over: whether it has ended, so that hosts leave.
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
        self._lost_remotes: list[RemoteHost] = []  # whose lifelines may still show their death
        self.home = ""
        self.is_ending = self.is_over = False
        self._all_left = asyncio.Event()
        self._options, self._say, self._events = options, say, events
        self._joined, self._received, self._lost, self._died = joined, received, lost, died
        code = source_digest.of_code(source_digest.PROTOCOL) if options.nnodes[1] > 1 else None
        self._admission = Admission(
            listener, token, self._refusal, self._admit, code, claim, self._attach
        )

    def could_form_more(self, now: float, num_processes: int) -> bool:
        """Whether a generation with more processes than that could be formed at once."""
        plan = rank_assignment.make(self.remotes, self._options.nnodes[0], now) or []
        is_quick = all(part.remote.is_ready for part in plan)
        return is_quick and rank_assignment.size(plan) > num_processes

    def free_after(self, now: float) -> list[float]:
        """Return the times after `now` at which slots of hosts have rested."""
        free_at = (slot.free_at for remote in self.remotes for slot in remote.slots)
        return [at for at in free_at if at > now]

    def remove_silent_hosts(self, now: float) -> None:
        """Remove the hosts that have been silent for longer than a host that lives can be."""
        silence_s = 1.5 * self._options.heartbeat_timeout_s
        for remote in [*self.remotes]:
            if remote.id != self.home and now - remote.heard > silence_s:
                self._remove(remote, f"silent for {now - remote.heard:.1f} s")

    def go_on_without_lost_hosts(self) -> None:
        """Send lost hosts a farewell: from now on they must not see the death of this launcher."""
        for remote in self._lost_remotes:
            remote.end_connection()
        self._lost_remotes.clear()

    def end_run(self, **outcome: Any) -> None:
        """Report to all hosts how the run ended."""
        self.is_ending = self.is_over = True
        for remote in self.remotes:
            remote.channel.send("over", **outcome)
        self._check_all_left()

    async def end_connections(self, timeout_s: float) -> None:
        """Wait until the other hosts have left, then stop listening, and close all connections."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_left.wait()
        except TimeoutError:
            pass  # A host that misses the message detects the loss of its leader.
        self._admission.stop_listening()
        for remote in self.remotes:
            remote.end_connection()

    def resign(self) -> None:
        """Send all hosts to another leader, and stop listening."""
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
                f"its --rdzv-id is {facts['run_id']!r}, and that of this run is "
                f"{self._options.rdzv_id!r}."
            )
            return Refusal(with_code("JDP312", text), True)
        own = self._options.rdzv_endpoint
        listed = facts.get("endpoints") or own
        if listed != own and "," in f"{listed}{own}":
            return Refusal(
                f"its --rdzv-endpoint is {listed}, and that of the leader {own}. A list of hosts "
                "must be the same on all of them, or two could lead at the same time.",
                True,
            )
        timeouts_s = facts["heartbeat_timeout_s"], self._options.heartbeat_timeout_s
        if timeouts_s[0] != timeouts_s[1]:
            text = (
                "its --heartbeat-timeout-s is {:g}, and that of the leader {:g}. A host must end "
                "its processes before others go on without it: give all hosts the same."
            )
            return Refusal(text.format(*timeouts_s), True)
        for remote in [*self.remotes]:
            if remote.id == facts["id"]:
                self._remove(remote, "it joined again")
            elif remote.host_id == facts["host_id"] is not None:
                return Refusal(f"host {remote.host_id} has joined already ({remote.name})", False)
        if len(self.remotes) == self._options.nnodes[1]:
            return Refusal(f"all {len(self.remotes)} hosts have joined already", False)
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
