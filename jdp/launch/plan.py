"""Which hosts make the next generation, and with which of their slots."""

from jdp.launch.guest import Guest

# Hosts in the order of their processes, with the slots that are used of each.
Plan = list[tuple[Guest, list[int]]]


def make(guests: list[Guest], least: int, now: float) -> Plan | None:
    """Make the plan of a generation that would be formed now.

    Args:
      guests: all that have joined.
      least: hosts that there must be.
      now: time.monotonic().

    Returns:
      The plan; None if there are too few hosts, or one will soon have slots that it needs.
    """
    # One that has just come to a run, and would have to start its processes from nothing, is not
    # waited for, unless it is needed.
    settled = [guest for guest in guests if guest.used or guest.is_ready]
    chosen = settled if len(settled) >= least else [*guests]
    # Sorting keeps the order of those without a number: that in which they came.
    chosen.sort(key=lambda guest: (guest.host_id is None, guest.host_id))
    plan = [(guest, guest.free(now)) for guest in chosen]
    if len(plan) < least or any(len(slots) < guest.least for guest, slots in plan):
        return None
    return plan


def size(plan: Plan) -> int:
    """Count the processes of a plan."""
    return sum(len(slots) for _, slots in plan)


def coordinator(plan: Plan, home: str) -> str:
    """Give the "address:port" at which process 0, on the first host, is to listen.

    Args:
      plan: of the generation.
      home: id of the leader's own host.
    """
    (first, _), *others = plan
    address = first.address
    if address is None:
        # Where others have found the leader, its own host is, too.
        is_home = first.id == home and others
        address = others[0][0].leader_address if is_home else first.seen_address
    return f"[{address}]:{first.port}" if ":" in address else f"{address}:{first.port}"
