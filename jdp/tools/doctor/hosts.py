"""Connections between a run's processes, and their clocks' differences."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from jdp.tools.doctor.diagnosis import ERROR, OK, WARNING, Diagnosis

CONNECT_TIMEOUT_S = 5.0
_NUM_QUESTIONS = 5
_MAX_SKEW_S = 1.0


class Listener(NamedTuple):
    """Where a process listens; `space` identifies the host and its network namespace."""

    process: int
    host: str
    address: str
    port: int
    space: str


class Reached(NamedTuple):
    """A connection to a process, or why it failed; its clock is `skew_s` ahead."""

    other: Listener
    failure: str | None
    skew_s: float = 0.0
    error_s: float = 0.0


@contextlib.contextmanager
def listening(clock: Callable[[], float] = time.time) -> Iterator[int]:
    """Listen on a free port, and answer each byte with the time."""
    with socket.create_server(("", 0), backlog=128) as server:
        thread = threading.Thread(target=_serve, args=(server, clock), daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # ends `accept`
            thread.join(CONNECT_TIMEOUT_S)


def _serve(server: socket.socket, clock: Callable[[], float]) -> None:
    while True:
        try:
            client, _ = server.accept()
        except OSError:
            return
        with client, contextlib.suppress(OSError):
            client.settimeout(CONNECT_TIMEOUT_S)
            while client.recv(1):
                client.sendall(f"{clock():.6f}\n".encode())


def to_reach(me: int, listeners: Mapping[int, Listener]) -> list[Listener]:
    """Return the processes to connect to: the next, and the first of each host."""
    order = sorted(listeners)
    following = order[(order.index(me) + 1) % len(order)]
    firsts: dict[str, int] = {}
    for process in order:
        firsts.setdefault(listeners[process].space, process)
    mine = listeners[me].space
    wanted = {following, *(first for space, first in firsts.items() if space != mine)} - {me}
    return [listeners[process] for process in sorted(wanted)]


def reach(other: Listener, mine: str, clock: Callable[[], float] = time.time) -> Reached:
    """Connect to a process, and compare the clocks (Cristian 1989)."""
    address = "127.0.0.1" if other.space == mine else other.address
    if other.space != mine and address.startswith("127."):
        return Reached(other, f"its name stands for {address}, which is every host's own address")
    try:
        best = (float("inf"), 0.0)
        with socket.create_connection((address, other.port), CONNECT_TIMEOUT_S) as link:
            answers = link.makefile("r")
            for _ in range(_NUM_QUESTIONS):
                before = clock()
                link.sendall(b"?")
                theirs = float(answers.readline())
                after = clock()
                best = min(best, ((after - before) / 2, theirs - (before + after) / 2))
    except (OSError, ValueError) as error:
        return Reached(other, f"{type(error).__name__}: {error}")
    return Reached(other, None, best[1], best[0])


def reachability(found: list[Reached]) -> Diagnosis:
    """Return whether all connections were made."""
    failed = [it for it in found if it.failure]
    facts = {
        "connections": len(found),
        "failed": [[it.other.process, it.other.port, it.failure] for it in failed],
    }
    if not failed:
        peers = f"{len(found)} connection{'' if len(found) == 1 else 's'} to other processes"
        return Diagnosis("ports", OK, f"{peers}, all made." if found else "alone.", facts=facts)
    other = failed[0].other
    return Diagnosis(
        "ports",
        ERROR,
        f"{len(failed)} of {len(found)} connections failed: process {other.process} on host "
        f"{other.host}, {other.address} port {other.port}: {failed[0].failure}.",
        "Gloo and NCCL connect the processes on ports chosen by the system. They wait until "
        "their timeout if a firewall drops packets, or a host name resolves to another address.",
        "Open all TCP ports between the hosts of the run (the range is in "
        "/proc/sys/net/ipv4/ip_local_port_range), and list in /etc/hosts the reachable address "
        "of each host. For NCCL, NCCL_SOCKET_IFNAME chooses the network.",
        facts,
    )


def clocks(found: list[Reached]) -> Diagnosis:
    """Return the differences to other processes' clocks."""
    known = [it for it in found if not it.failure]
    worst = max(known, key=lambda it: abs(it.skew_s) - it.error_s, default=None)
    if worst is None:
        return Diagnosis("clocks", OK, "no other process to compare with.")
    facts = {"skew_s": worst.skew_s, "error_s": worst.error_s, "process": worst.other.process}
    apart = f"{abs(worst.skew_s):.3f} s (give or take {worst.error_s:.3f} s)"
    if abs(worst.skew_s) - worst.error_s < _MAX_SKEW_S:
        level = "less than 0.01 s" if abs(worst.skew_s) + worst.error_s < 0.01 else apart
        return Diagnosis("clocks", OK, f"apart by {level}.", facts=facts)
    ahead = "ahead of" if worst.skew_s > 0 else "behind"
    return Diagnosis(
        "clocks",
        WARNING,
        f"the clock of process {worst.other.process} on host {worst.other.host} is {apart} {ahead} "
        "this one.",
        "Logs, events and traces of the hosts cannot be ordered, and files on a shared disk have "
        "wrong ages. jdp's own deadlines do not use this clock.",
        "Start chrony or ntpd on every host.",
        facts,
    )
