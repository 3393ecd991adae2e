"""`jdp run`: one launcher, from its start to its exit code."""

import asyncio
import contextlib
import errno
import ipaddress
import os
import secrets
import signal
import socket
import sys

from jdp.error_codes import with_code
from jdp.launch.host.agent import Host, Outcome
from jdp.launch.host.console import write_all
from jdp.launch.host.worker_process import HostResources
from jdp.launch.leader.leader import Leader
from jdp.launch.options.options import Options

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run(options: Options) -> int:
    """Run a program on the processes of this host, together with other hosts if there are any.

    Args:
      options: what to run, and how.

    Returns:
      The exit code: 0; 75 if the program saved after a signal; 124 if the watchdog ended it;
      128 + n after signal n; else that of the first process that failed, or 1.
    """
    _open_standard_streams()
    try:
        address, listener = _rendezvous(options)
        resources = HostResources(options)
        resources.orphans.start_adopting()
    except (OSError, ValueError) as error:
        _say(str(error))
        return 2
    try:
        outcome = asyncio.run(_run(options, resources, address, listener))
    finally:
        try:
            resources.release()
        except TimeoutError as error:
            _say(str(error))
    if outcome.why:
        _say(outcome.why)
    return outcome.code


async def _run(
    options: Options,
    resources: HostResources,
    address: tuple[str, int],
    listener: socket.socket | None,
) -> Outcome:
    loop = asyncio.get_running_loop()
    bug: asyncio.Future[Outcome] = loop.create_future()
    loop.set_exception_handler(lambda loop, context: _record_bug(bug, context))
    token = options.token or secrets.token_hex(16)
    leader = None
    if listener is not None:
        leader = Leader(options, token, listener, resources.say, resources.logs.show_summary)
    host = Host(options, token, address, resources, leads=leader is not None)
    if leader is not None:
        leader.members.home = host.id
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(number, host.stop, number)
    loop.add_signal_handler(signal.SIGQUIT, host.show_stacks)  # Ctrl-\
    try:
        await asyncio.wait([host.over, bug], return_when=asyncio.FIRST_COMPLETED)
        outcome = host.over.result() if host.over.done() else bug.result()
        if leader is not None:
            await leader.finish_run(*outcome)
        return outcome
    finally:
        await host.leave()


# The address where the hosts meet, and a socket that listens there if this launcher leads.
def _rendezvous(options: Options) -> tuple[tuple[str, int], socket.socket | None]:
    if options.nnodes[1] == 1 or options.rdzv_endpoint is None:
        return _listening(("127.0.0.1", 0))
    name, _, port = options.rdzv_endpoint.rpartition(":")
    address = name.strip("[]"), int(port)
    if options.node_rank:
        return address, None
    try:
        return _listening(_address_here(*address))
    except OSError as error:
        # The address is of another host, or another launcher of this host leads.
        if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE) and options.node_rank is None:
            return address, None
        text = (
            f"host 0 leads, and cannot listen at {options.rdzv_endpoint}: {error.strerror}. Give "
            "--rdzv-endpoint an address of this host and a free port."
        )
        raise ValueError(with_code("JDP310", text)) from error


# The address to listen at when the others know this host by `name`. Many hosts resolve their own
# name to a loopback address, which no other host can reach, or not at all: then all addresses, "".
def _address_here(name: str, port: int) -> tuple[str, int]:
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0][4][0]
    except socket.gaierror:
        return "", port
    is_alias = ipaddress.ip_address(found).is_loopback and name not in (found, "localhost")
    return ("" if is_alias else str(found)), port


def _listening(address: tuple[str, int]) -> tuple[tuple[str, int], socket.socket]:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    listener = socket.create_server(address, family=family, backlog=128)
    own, port = listener.getsockname()[:2]
    return ("127.0.0.1" if own == "0.0.0.0" else own, port), listener


# A daemon may have closed them. The next files would get their descriptors, which are pipes in the
# processes.
def _open_standard_streams() -> None:
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(file)
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")


# Otherwise asyncio would only log an error of a callback, and the run would never end.
def _record_bug(bug: asyncio.Future[Outcome], context: dict) -> None:
    if not bug.done():
        bug.set_exception(context.get("exception") or RuntimeError(context["message"]))


# Before the logs are opened, and after they are closed.
def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        data = f"jdp run: {text}\n".encode(errors="backslashreplace")
        write_all(sys.stderr.buffer, data)
