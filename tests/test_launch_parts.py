"""The parts of the launcher that can be looked at alone."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jdp.launch import guest as guests
from jdp.launch import handshake, plan, spawn
from jdp.launch.channel import Channel, decode, encode
from jdp.launch.guest import Guest, Slot
from jdp.launch.member import VARIABLE, Assignment, Member
from jdp.launch.process import gpus_of_slots
from jdp.launch.recovery import Events
from jdp.launch.standbys import Standbys


def guest(name="a", host_id=None, num=(2, 2), address=None, seen="10.0.0.2", leader="10.0.0.1"):
    facts = {"id": name, "name": name, "address": address, "port": 7, "host_id": host_id}
    channel = SimpleNamespace(addresses=(leader, seen))
    return Guest(channel, {**facts, "num_processes": num, "generation": -1})


def test_hosts_with_a_number_come_first_and_the_others_as_they_came():
    hosts = [guest("x"), guest("b", 1), guest("y"), guest("a", 0)]
    made = plan.make(hosts, least=1, now=0.0)
    assert [host.name for host, _ in made] == ["a", "b", "x", "y"]
    assert plan.size(made) == 8


def test_too_few_hosts_make_no_plan():
    assert plan.make([guest()], least=2, now=0.0) is None


def test_a_host_that_has_just_come_is_left_out_if_there_are_enough():
    old, new = guest("old"), guest("new")
    old.used = [0]
    assert [host.name for host, _ in plan.make([old, new], least=1, now=0.0)] == ["old"]
    assert len(plan.make([old, new], least=2, now=0.0)) == 2
    new.is_ready = True
    assert len(plan.make([old, new], least=1, now=0.0)) == 2


def test_a_slot_that_rests_is_left_out_and_one_that_is_needed_is_waited_for():
    elastic, fixed = guest(num=(1, 2)), guest(num=(2, 2))
    for host in (elastic, fixed):
        host.slots[0].free_at = 5.0
    assert plan.make([elastic], least=1, now=0.0) == [(elastic, [1])]
    assert plan.make([fixed], least=1, now=0.0) is None
    assert plan.make([fixed], least=1, now=5.0) == [(fixed, [0, 1])]


def test_a_slot_rests_when_it_fails_twice_in_a_minute_and_each_time_for_longer():
    slot = Slot()
    slot.fail(0.0, can_rest=True)
    slot.fail(guests.WINDOW_S, can_rest=True)
    assert slot.free_at == 0.0
    slot.fail(guests.WINDOW_S + 1, can_rest=True)
    assert slot.free_at == guests.WINDOW_S + 1 + guests.REST_S
    slot.fail(guests.WINDOW_S + 2, can_rest=True)
    assert slot.free_at == guests.WINDOW_S + 2 + 2 * guests.REST_S


def test_a_slot_that_is_needed_backs_off_only():
    slot = Slot()
    slot.fail(0.0, can_rest=False)
    assert slot.free_at == 0.0
    for failure in range(1, 30):
        slot.fail(float(failure), can_rest=False)
        waits_s = min(guests.BACKOFF_S * 2 ** (failure - 1), guests.MAX_BACKOFF_S)
        assert slot.free_at == failure + waits_s


def test_process_0_listens_where_others_reach_its_host():
    home, other = guest("home", seen="127.0.0.1"), guest("other", leader="10.0.0.1")
    assert plan.coordinator([(home, [0])], "home") == "127.0.0.1:7"
    assert plan.coordinator([(home, [0]), (other, [0])], "home") == "10.0.0.1:7"
    assert plan.coordinator([(other, [0]), (home, [0])], "home") == "10.0.0.2:7"
    chosen = guest("home", address="fe80::1")
    assert plan.coordinator([(chosen, [0]), (other, [0])], "home") == "[fe80::1]:7"


def standby(name, parked=True, is_dying=False):
    return SimpleNamespace(name=name, parked=parked, is_dying=lambda: is_dying)


# Those that are taken, one after the other.
def taken(*processes):
    waiting = iter(processes)
    each = Standbys(len(processes), lambda _: next(waiting), ready=lambda: None, say=print)
    each.fill()
    if any(process.parked for process in processes):
        each.note_parked()
    return [process.name for process in iter(each.take, None)]


def test_the_standbys_that_wait_are_taken_first_and_those_that_die_never():
    waits, starts, dies = standby("w"), standby("s", parked=False), standby("d", is_dying=True)
    assert taken(dies, starts, waits) == ["w", "s"]
    assert taken(dies) == []
    assert taken(starts) == []  # perhaps it never waits


def test_gpus_are_shared_evenly_or_not_at_all():
    assert gpus_of_slots(8, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert gpus_of_slots(0, 3) == [None] * 3
    with pytest.raises(ValueError, match="8 GPUs, which 3 processes"):
        gpus_of_slots(8, 3)


def test_a_proof_is_of_one_part_one_token_and_one_connection():
    good = ("token", "host", "1", "2")
    proof = handshake.proof(*good)
    assert handshake.is_proof(proof, *good)
    assert "token" not in proof
    for i in range(4):
        assert not handshake.is_proof(proof, *good[:i], "other", *good[i + 1 :])
    assert not handshake.is_proof(None, *good)
    assert not handshake.is_proof("\ud800", *good[:3], "\ud800")  # which JSON can hold


@pytest.mark.parametrize("line", [b"", b"7", b"[]", b"{}", b'{"kind": 1}', b"\xff", b"[" * 9999])
def test_what_is_no_message_is_refused(line):
    with pytest.raises(ValueError):
        decode(line)


# What a channel received and why it was closed, after `data` was sent to it.
def received(data, **limits):
    async def talk():
        ours, theirs = socket.socketpair()
        got, closed = [], asyncio.get_running_loop().create_future()
        Channel(ours, lambda *message: got.append(message), closed.set_result, **limits)
        with theirs:
            theirs.sendall(data)
        return got, await asyncio.wait_for(closed, 5.0)

    return asyncio.run(talk())


def test_messages_come_in_order_and_then_the_end():
    got, why = received(b"".join(encode("n", {"i": i}) for i in range(3000)))
    assert got == [("n", {"i": i}) for i in range(3000)]
    assert why == "connection closed"


def test_a_line_without_an_end_closes_a_channel():
    got, why = received(b"x" * 5000, max_line_bytes=4096)
    assert not got and "4096 bytes" in why


def test_a_channel_never_waits_for_who_does_not_read():
    async def talk():
        ours, theirs = socket.socketpair()
        closed = asyncio.get_running_loop().create_future()
        channel = Channel(ours, closed=closed.set_result)
        with theirs:
            while channel.is_open:
                channel.send("n", text="x" * 10_000)
            return await asyncio.wait_for(closed, 5.0)

    assert asyncio.run(talk())


@pytest.fixture
def launched(monkeypatch):
    for name in os.environ:
        if "RANK" in name or "MASTER" in name or "WORLD" in name:
            monkeypatch.delenv(name)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Member(theirs, -1, 0, -1), ours


ASSIGNMENT = Assignment(3, 1, 2, 1, 2, "127.0.0.1:99", True, None, "a run")


def test_parking_twice_is_parking_once(launched, monkeypatch):
    monkeypatch.setattr("atexit.register", lambda call, *args: None)
    monkeypatch.setattr(os, "environ", {**os.environ})
    member, launcher = launched
    launcher.sendall(encode("go", ASSIGNMENT._asdict()))
    assert member.assignment is None
    assert member.park() == ASSIGNMENT == member.park() == member.assignment
    assert os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "3"
    assert launcher.recv(9999) == b'{"kind": "parked"}\n'


@pytest.mark.parametrize("is_told", [True, False])
def test_a_process_prepares_only_while_it_has_the_time(launched, monkeypatch, is_told):
    monkeypatch.setattr("atexit.register", lambda call, *args: None)
    monkeypatch.setattr(os, "environ", {**os.environ})
    member, launcher = launched
    done = []

    def tell():
        launcher.sendall(encode("go", ASSIGNMENT._asdict()))

    def prepare():
        done.append(launcher.recv(9999))
        tell()

    if is_told:
        tell()
    assert member.park(prepare) == ASSIGNMENT
    assert done == ([] if is_told else [b'{"kind": "parked"}\n'])


def test_a_parked_process_without_a_launcher_ends(launched):
    member, launcher = launched
    launcher.close()
    with pytest.raises(SystemExit, match="launcher is gone"):
        member.park()
    member.tell("ended")  # into nothing


def test_a_forked_child_does_not_speak_for_the_process(launched):
    member, launcher = launched
    member._pid += 1
    member.tell("ended")
    launcher.setblocking(False)
    with pytest.raises(BlockingIOError):
        launcher.recv(9999)


def test_what_a_process_starts_is_no_member_of_the_run():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fds = {"socket": theirs.fileno(), "board": theirs.fileno(), "commit": theirs.fileno()}
        code = f"""
import os
from jdp.launch.member import current
assert current().slot == 5 and current() is current()
assert {VARIABLE!r} not in os.environ and not os.get_inheritable({theirs.fileno()})
"""
        variables = {**os.environ, VARIABLE: json.dumps({**fds, "slot": 5})}
        subprocess.run(
            [sys.executable, "-c", code],
            env=variables,
            pass_fds=[theirs.fileno()],
            check=True,
            timeout=30,
        )


def test_what_a_process_starts_before_it_asks_is_no_member_either():
    description = json.dumps({"socket": 77, "board": 78, "commit": 79, "slot": 0})
    code = "from jdp.launch.member import current; assert current() is None"
    variables = {**os.environ, VARIABLE: description}  # without the descriptors
    subprocess.run([sys.executable, "-c", code], env=variables, check=True, timeout=30)


def test_a_record_that_cannot_be_written_ends_nothing(capfd):
    events = Events(Path("/dev/full"))
    for _ in range(3):
        events.write("formed", generation=0)
    events.close()
    assert capfd.readouterr().err.count("/dev/full can't be written") == 1


def test_the_token_is_not_in_the_environment_of_processes():
    assert "JDP_TOKEN" not in spawn.environment({"JDP_TOKEN": "secret"})
