"""A closed port and a clock that is wrong are found, between processes and between hosts."""

import contextlib
import subprocess
import sys
import time

import pytest
from support.namespaces import two_hosts, why_no_namespaces
from support.processes import free_port

from jdp.tools.doctor import hosts
from jdp.tools.doctor.hosts import Listener

HERE, THERE = "this host", "another host"


def listener(process=1, port=1, space=HERE, address="10.9.9.9"):
    return Listener(process, "host1", address, port, space)


def test_a_process_that_listens_is_reached_and_its_clock_is_read():
    with hosts.listening() as port:
        found = hosts.reach(listener(port=port), HERE)
    assert found.failure is None
    assert abs(found.skew_s) < 0.5 and 0 < found.error_s < 5.0
    assert hosts.reachability([found]).level == "ok"
    assert hosts.clocks([found]).level == "ok"


def test_a_closed_port_is_an_error_that_names_process_and_port():
    port = free_port()  # closed again
    found = hosts.reachability([hosts.reach(listener(3, port), HERE)])
    assert found.level == "error"
    assert "process 3" in found.found and str(port) in found.found and "refused" in found.found


def test_a_host_whose_name_stands_for_its_loopback_address_is_an_error():
    with hosts.listening() as port:
        found = hosts.reach(listener(port=port, space=THERE, address="127.0.1.1"), HERE)
    assert "127.0.1.1" in hosts.reachability([found]).found


def test_a_clock_that_is_wrong_is_a_warning_with_its_seconds():
    with hosts.listening(clock=lambda: time.time() + 120) as port:
        found = hosts.clocks([hosts.reach(listener(2, port), HERE)])
    assert found.level == "warning"
    assert "process 2" in found.found and found.facts["skew_s"] == pytest.approx(120, abs=1)


def test_each_process_reaches_the_next_one_and_the_first_of_every_other_host():
    spaces = ["a", "a", "b", "b", "c"]
    listeners = {i: listener(i, space=space) for i, space in enumerate(spaces)}
    reached = {me: [it.process for it in hosts.to_reach(me, listeners)] for me in listeners}
    assert reached == {0: [1, 2, 4], 1: [2, 4], 2: [0, 3, 4], 3: [0, 4], 4: [0, 2]}


def test_there_is_nobody_to_reach_alone():
    assert hosts.to_reach(0, {0: listener(0)}) == []
    assert hosts.reachability([]).level == hosts.clocks([]).level == "ok"


LISTEN = """
import sys
from jdp.tools.doctor import hosts
with hosts.listening() as port:
    print(port, flush=True)
    sys.stdin.read()
"""
REACH = """
import sys
from jdp.tools.doctor.hosts import Listener, reach, reachability
for address, port in [("10.83.0.1", {port}), ("10.84.0.1", {port}), ("10.83.0.1", {port} + 1)]:
    found = reach(Listener(0, "host0", address, port, "there"), "here")
    print(reachability([found]).level, found.failure)
"""


@pytest.mark.skipif(why_no_namespaces() is not None, reason=str(why_no_namespaces()))
def test_a_host_is_reached_through_the_wire_and_not_where_there_is_no_route_or_no_listener():
    with two_hosts() as (first, second), contextlib.ExitStack() as stack:
        command = [*first, sys.executable, "-c", LISTEN]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        listening = stack.enter_context(subprocess.Popen(command, **pipes))
        stack.callback(listening.kill)
        script = REACH.format(port=int(listening.stdout.readline()))
        done = subprocess.run(
            [*second, sys.executable, "-c", script], capture_output=True, text=True, timeout=240
        )
    reached, no_route, closed = done.stdout.splitlines()
    assert reached == "ok None", done.stderr
    assert no_route.startswith("error") and "unreachable" in no_route
    assert closed.startswith("error") and "refused" in closed
