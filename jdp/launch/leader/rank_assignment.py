"""Which hosts make the next generation, with which of their slots, and when there are enough."""

import time
from dataclasses import dataclass, field

from jdp.error_codes import with_code
from jdp.launch.leader.remote_host import RemoteHost
from jdp.launch.options.options import Options
from jdp.worker.progress_board import ProcessStatus


@dataclass
class Part:
    """What one host has of a generation.

    Attributes:
      remote: the host.
      first: its first process; the others follow.
      slots: of the host, one for each process.
      statuses: of its processes, by process id, on the leader's clock.
    """

    remote: RemoteHost
    first: int
    slots: list[int]
    statuses: dict[int, ProcessStatus] = field(default_factory=dict)

    @property
    def process_ids(self) -> range:
        """Its processes."""
        return range(self.first, self.first + len(self.slots))


# In the order of their processes.
Plan = list[Part]


def make(remotes: list[RemoteHost], least: int, now: float) -> Plan | None:
    """Make the plan of a generation that would be formed now.

    Args:
      remotes: all that have joined.
      least: hosts that there must be.
      now: time.monotonic().

    Returns:
      The plan; None if there are too few hosts, or one will soon have slots that it needs.
    """
    # One that has just come to a run, and would have to start its processes from nothing, is not
    # waited for, unless it is needed.
    settled = [remote for remote in remotes if remote.took_part or remote.is_ready]
    chosen = settled if len(settled) >= least else [*remotes]
    # Sorting keeps the order of those without a number: that in which they came.
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
    """Count the processes of a plan."""
    return sum(len(part.slots) for part in plan)


def coordinator(plan: Plan, home: str) -> str:
    """Return the "address:port" at which process 0, on the first host, is to listen.

    Args:
      plan: of the generation.
      home: id of the leader's own host.
    """
    first, *others = [part.remote for part in plan]
    address = first.address
    if address is None:
        # Where others have found the leader, its own host is, too.
        is_home = first.id == home and others
        address = others[0].leader_address if is_home else first.seen_address
    return f"[{address}]:{first.port}" if ":" in address else f"{address}:{first.port}"


class Gathering:
    """The time before a generation, until there are enough hosts for one.

    Args:
      options: of the command line.
      is_start: there was none before, so that more hosts than are needed may be on their way.
        Later on they make the run grow when they come.
    """

    def __init__(self, options: Options, is_start: bool) -> None:
        self._options, self._is_start = options, is_start
        self._since = time.monotonic()
        self._enough_since: float | None = None

    def plan(self, remotes: list[RemoteHost], now: float) -> Plan | None:
        """Return the plan of the generation that is to be formed now, if it is time for one."""
        least, most = self._options.nnodes
        chosen = make(remotes, least, now)
        if chosen is None:
            self._enough_since = None
            return None
        if self._enough_since is None:
            self._enough_since = now
        waited_s = now - self._enough_since
        may_wait = self._is_start and waited_s < self._options.last_call_timeout_s
        return None if may_wait and len(chosen) < most else chosen

    def why_in_vain(self, remotes: list[RemoteHost], now: float) -> str | None:
        """Return which hosts are there, if too few have come in time."""
        least, most = self._options.nnodes
        if len(remotes) >= least or now - self._since <= self._options.join_timeout_s:
            return None
        there = ", ".join(remote.name for remote in remotes) or "none"
        return with_code(
            "JDP306",
            f"only {len(remotes)} of at least {least} hosts are there ({there}) after "
            f"{self._options.join_timeout_s:g} s. Start `jdp run` on the others, or ask for fewer "
            f"with --nnodes 1:{most}, or wait longer with --join-timeout-s.",
        )
