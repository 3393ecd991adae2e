"""Chooses the next generation's hosts and slots."""

import time
from dataclasses import dataclass, field
from typing import Any

from jdp.error_codes import with_code
from jdp.launch.leader.remote_host import RemoteHost
from jdp.launch.options import Options
from jdp.launch.quorum import Electors
from jdp.worker.process_status import ProcessStatus


@dataclass
class Part:
    """A generation's part on one host.

    Attributes:
      first: id of its first process; the others follow.
      slots: of the host, one per process.
      statuses: by process id, on the leader's clock.
    """

    remote: RemoteHost
    first: int
    slots: list[int]
    statuses: dict[int, ProcessStatus] = field(default_factory=dict)

    @property
    def process_ids(self) -> range:
        """Its processes' ids."""
        return range(self.first, self.first + len(self.slots))

    def begin(self, generation: int, **facts: Any) -> None:
        """Start its processes."""
        self.remote.take_part(generation)
        self.remote.channel.send(
            "go", first=self.first, slots=self.slots, generation=generation, **facts
        )

    def record_statuses(self, statuses: dict[str, list], ahead_s: float) -> None:
        """Record a host's statuses, `ahead_s` behind."""
        self.statuses = {
            int(i): ProcessStatus.of_json(each).moved(ahead_s) for i, each in statuses.items()
        }


Plan = list[Part]


def make(remotes: list[RemoteHost], least: int, now: float) -> Plan | None:
    """Return the plan of a generation formed now."""
    # A connection may end before its host is removed.
    there = [remote for remote in remotes if remote.channel.is_open]
    # A new host starts its processes from scratch; others wait only if they need it.
    settled = [remote for remote in there if remote.took_part or remote.is_ready]
    chosen = settled if len(settled) >= least else there
    # Hosts without a rank keep the order of joining.
    chosen.sort(key=lambda remote: (remote.host_id is None, remote.host_id))
    if len(chosen) < least:
        return None
    plan, first = [], 0
    for remote in chosen:
        slots = remote.free(now)
        if len(slots) < remote.least:
            return None
        plan.append(Part(remote, first, slots))
        first += len(slots)
    return plan


def size(plan: Plan) -> int:
    """Count a plan's processes."""
    return sum(len(part.slots) for part in plan)


def coordinator(plan: Plan, home: str) -> str:
    """Return "address:port" of process 0; `home` is the leader's host."""
    first, *others = [part.remote for part in plan]
    address = first.address
    if address is None:
        # The address at which others found the leader.
        is_home = first.id == home and others
        address = others[0].leader_address if is_home else first.seen_address
    return f"[{address}]:{first.port}" if ":" in address else f"{address}:{first.port}"


class Gathering:
    """The time before a generation; the first waits for more hosts than needed."""

    def __init__(self, options: Options, is_start: bool, electors: Electors | None = None) -> None:
        self._options, self._is_start = options, is_start
        self._electors = electors or Electors(1)
        self._since = time.monotonic()
        self._enough_since: float | None = None

    def plan(self, remotes: list[RemoteHost], now: float) -> Plan | None:
        """Return the plan of a generation to form now."""
        least, most = self._options.nnodes
        chosen = make(remotes, least, now)
        if chosen is None or not self._electors.may_form(part.remote for part in chosen):
            self._enough_since = None
            return None
        if self._enough_since is None:
            self._enough_since = now
        waited_s = now - self._enough_since
        may_wait = self._is_start and waited_s < self._options.last_call_timeout_s
        may_wait = may_wait and self._electors.may_still_come(remotes)
        return None if may_wait and len(chosen) < most else chosen

    def timeout_error(self, remotes: list[RemoteHost], now: float) -> str | None:
        """Return the join timeout's error."""
        least, most = self._options.nnodes
        may_form = self._electors.may_form(remotes)
        if (
            len(remotes) >= least and may_form
        ) or now - self._since <= self._options.join_timeout_s:
            return None
        there = ", ".join(remote.name for remote in remotes) or "none"
        if not may_form:
            return with_code(
                "JDP306",
                f"too few hosts of --rdzv-endpoint joined ({there}) within "
                f"{self._options.join_timeout_s:g} s. The others may be alive, and continue "
                "without these. Start `jdp run` on them, or wait longer with --join-timeout-s.",
            )
        return with_code(
            "JDP306",
            f"only {len(remotes)} of at least {least} hosts joined ({there}) within "
            f"{self._options.join_timeout_s:g} s. Start `jdp run` on the other hosts, request "
            f"fewer with --nnodes 1:{most}, or wait longer with --join-timeout-s.",
        )
