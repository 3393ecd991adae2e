"""`jdp run`: one launcher, from its start to its exit code."""

import asyncio
import contextlib
import os
import secrets
import signal
import sys

from jdp.launch import rendezvous
from jdp.launch.candidacy import Candidacy
from jdp.launch.host.agent import Agent, Outcome
from jdp.launch.host.console import write_all
from jdp.launch.host.worker_process import HostResources
from jdp.launch.leader.metrics_endpoint import require_endpoint
from jdp.launch.options.options import Options

# The processes get SIGTERM in place of the last three, for which scripts have no handler.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run(options: Options) -> int:
    """Run a program on the processes of this host, together with other hosts if there are any."""
    _open_standard_streams()
    try:
        meeting = rendezvous.find(options)
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


async def _run(
    options: Options,
    resources: HostResources,
    meeting: rendezvous.Rendezvous,
) -> Outcome:
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
