"""Several hosts that may lead: when the leader is lost, at most one other host leads."""

import asyncio
import contextlib
import itertools
import json
import random
import re
import signal
import socket
import threading
from types import SimpleNamespace

import pytest
from support import launcher

from jdp.launch import election
from jdp.launch.connection import Channel, Lifeline
from jdp.launch.election import LeaderSearch, Rendezvous, claim_of
from jdp.launch.host.leader_connection import LeaderLifeline
from jdp.launch.leader.membership import Membership
from jdp.launch.leader.remote_host import RemoteHost
from jdp.launch.leader.run_report import Events
from jdp.launch.options import parse
from jdp.launch.quorum import Electorate
from jdp.worker.messages import decode, encode

TOKEN = {"JDP_TOKEN": "a secret"}


def subsets(members):
    return [
        set(chosen)
        for n in range(len(members) + 1)
        for chosen in itertools.combinations(members, n)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_two_halves_never_both_have_a_quorum_whatever_deaths_each_has_seen(size):
    electors = [*range(size)]
    electorate = Electorate().changed(electors)
    for dead in subsets(electors):
        living = {*electors} - dead
        for one in subsets(living):
            other = living - one
            with_quorum = [
                half
                for half in (one, other)
                if any(electorate._replace(dead=[*seen]).has_quorum(half) for seen in subsets(dead))
            ]
            assert len(with_quorum) <= 1, (dead, one)


class World:
    """Launchers that form generations, die, start again and lose messages, as a die decides.

    The rule is that of `Agent` and `Leader`: a host joins, takes part, leaves, or sees a death.
    """

    def __init__(self, seed, size):
        self.die = random.Random(seed)
        self.num_started, self.size = 0, size
        self.ids = [self.start() for _ in range(size)]
        self.known = {}
        self.leader_of = {}
        self.took_part = set()  # with the leader that they have now
        self.generations = []
        self.num_formed = self.num_of_minorities = 0

    def start(self):
        self.num_started += 1
        return self.num_started

    def may(self, probability):
        return self.die.random() < probability

    def learn(self, host, known):
        self.known[host] = self.known.get(host, Electorate()).merged(known)

    def form(self):
        present = self.die.sample(self.ids, self.die.randint(1, self.size))
        leader = present[0]
        self.generations = [each for each in self.generations if not {*each} & {*present}]
        for host in present:
            if self.leader_of.get(host) != leader:
                self.leader_of[host] = leader
                self.took_part.discard(host)
            self.learn(leader, self.known.get(host, Electorate()))
        # A leader says farewell to hosts that it goes on without, and when it follows another one.
        for host in {*self.ids} - {*present}:
            if self.leader_of.get(host) in present:
                del self.leader_of[host]
        if len(present) < self.size and not self.known[leader].has_quorum(present):
            return
        assert not self.generations, "two generations run at the same time"
        self.generations.append(present)
        self.num_formed += 1
        self.num_of_minorities += 2 * len(present) <= self.size
        self.known[leader] = self.known[leader].changed(present)
        got = [host for host in present if host == leader or self.may(0.8)]
        for host in got:
            self.learn(host, self.known[leader])
            self.took_part.add(host)
        if got == present and self.may(0.7):
            self.known[leader] = self.known[leader].settled(present)
            for host in present:
                if self.may(0.8):
                    self.learn(host, self.known[leader])

    def kill(self):
        dead = self.die.choice(self.ids)
        for host in {*self.ids} - {dead}:
            leads = self.leader_of.get(dead) == host
            follows = self.leader_of.get(host) == dead and host in self.took_part
            if (leads or follows) and self.may(0.8):
                self.learn(host, self.known.get(host, Electorate()).with_dead(dead))
        self.generations = [each for each in self.generations if dead not in each]
        self.ids[self.ids.index(dead)] = self.start()


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_two_generations_never_run_at_once_in_a_world_of_accidents(size):
    num_formed = num_of_minorities = 0
    for seed in range(300):
        world = World(seed, size)
        for _ in range(60):
            world.kill() if world.die.random() < 0.15 else world.form()
        num_formed += world.num_formed
        num_of_minorities += world.num_of_minorities
    assert num_formed > 300 and num_of_minorities > 0


def test_a_launcher_that_started_again_does_not_count_as_the_one_that_died():
    electorate = Electorate().changed(["a", "b", "c"])
    assert not electorate.has_quorum({"b", "a again"})


def test_electors_that_were_superseded_are_forgotten():
    early = Electorate().changed(["a", "b"])
    late = early.changed(["b", "c"]).settled(["b", "c"])
    for merged in (early.with_dead("a").merged(late), late.merged(early.with_dead("a"))):
        assert [*merged.groups.values()] == [["b", "c"]] and merged.dead == []


def test_a_settled_group_supersedes_one_with_a_higher_number_that_became_known_later():
    first = Electorate().changed(["a", "b", "c"])
    ours = first.changed(["a", "b"])
    rival = first.changed(["c"]).changed(["c", "d"])
    settled = ours.merged(rival).settled(["a", "b"])
    assert [*settled.groups.values()] == [["a", "b"]]
    assert settled.merged(rival) == rival.merged(settled) == settled


def test_what_hosts_know_of_electors_does_not_grow_with_the_number_of_losses():
    electorate, sizes = Electorate().changed(["0", "1", "2"]), []
    for i in range(3, 1000):
        electorate = electorate.with_dead(str(i - 3)).changed([str(i - 1), str(i - 2)])
        electorate = electorate.settled([str(i - 1), str(i - 2)])
        electorate = electorate.changed([str(i - 1), str(i - 2), str(i)])
        electorate = electorate.settled([str(i - 1), str(i - 2), str(i)])
        sizes.append(len(json.dumps(electorate)))
    assert max(sizes) <= sizes[0] + 20


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (claim_of(True, 3, 2), claim_of(False, 9, 0)),
        (claim_of(False, 4, 2), claim_of(False, 3, 0)),
        (claim_of(False, 4, 1), claim_of(False, 4, 2)),
        (claim_of(False, 0, 2), claim_of(False, -1, 0)),
    ],
)
def test_who_has_a_generation_or_a_later_one_or_comes_first_leads(better, worse):
    assert better < worse


class Hosts:
    """Launchers of which those of the first `num_listed` hosts may lead."""

    def __init__(self, start, num_hosts, *flags, num_listed=None, **scripts):
        listed = range(num_listed or num_hosts)
        self.endpoints = ",".join(f"127.0.0.1:{launcher.free_port()}" for _ in listed)
        self._start, self._scripts = start, scripts
        self._flags = f"--nnodes=1:{num_hosts}", *flags

    def add(self, rank, **changes):
        flags = *self._flags, f"--rdzv-endpoint={self.endpoints}", f"--node-rank={rank}"
        return self._start(*flags, **{**TOKEN, **self._scripts, **changes})


def test_the_next_host_leads_when_the_leader_has_died_until_one_is_left(jdp_run):
    run = Hosts(jdp_run, 3)
    first, second, third = [run.add(rank) for rank in range(3)]
    first.pids(0, 3)
    first.process.kill()
    second.pids(1, 2)
    second.process.kill()
    third.pids(2, 1)
    assert not third.events("formed", generation=1)
    assert third.finish() == 0


def test_a_host_that_may_not_lead_follows_the_next_leader(jdp_run):
    run = Hosts(jdp_run, 3, num_listed=2)
    first, second, third = [run.add(rank) for rank in range(3)]
    first.pids(0, 3)
    first.process.kill()
    second.until("formed", num_processes=2)
    assert {second.finish(), third.wait()} == {0}


def test_a_leader_that_starts_again_follows_the_one_that_leads_now(jdp_run):
    run = Hosts(jdp_run, 2, after="(folder / f'{a.generation} {a.process_id} {a.resumes}').touch()")
    first, second = run.add(0), run.add(1)
    first.pids(0, 2)
    first.process.kill()
    second.pids(1, 1)
    again = run.add(0)
    second.pids(2, 2)
    assert {second.finish(), again.wait()} == {0}
    assert not again.events("formed")
    assert {path.name for path in again.folder.glob("2 *")} == {"2 0 True", "2 1 True"}


def test_a_majority_leaves_a_silent_leader_which_ends_its_processes_and_follows_later(jdp_run):
    run = Hosts(jdp_run, 3)
    first, second, third = [run.add(rank) for rank in range(3)]
    pids = first.pids(0, 3)
    first.process.send_signal(signal.SIGSTOP)
    second.pids(1, 2)
    first.process.send_signal(signal.SIGCONT)
    second.pids(2, 3)
    assert pids[0] not in first.alive()
    assert len(first.events("formed")) == 1
    assert {second.finish(), first.wait(), third.wait()} == {0}


def test_one_of_two_hosts_does_not_leave_a_silent_leader_behind(jdp_run):
    run = Hosts(jdp_run, 2, f"--join-timeout-s={launcher.JOIN_TIMEOUT_S}")
    first, second = run.add(0), run.add(1)
    pids = first.pids(0, 2)
    first.process.send_signal(signal.SIGSTOP)
    assert second.wait() == 1
    assert "JDP311" in second.output and "JDP306" in second.output
    assert not second.events("formed") and pids[1] not in second.alive()
    first.process.send_signal(signal.SIGCONT)
    first.pids(1, 1)
    assert first.finish() == 0


def test_hosts_that_know_no_generation_begin_none_until_all_that_may_lead_are_there(jdp_run):
    run = Hosts(jdp_run, 3, f"--join-timeout-s={launcher.JOIN_TIMEOUT_S}")
    first, second = run.add(0), run.add(1)
    assert {first.wait(), second.wait()} == {1}
    assert "JDP306" in first.output and not first.events("formed")


@pytest.mark.parametrize("wrong", ["a..b", "x" * 64, "a:0", "fe80::1", "", "a"])
def test_a_list_with_a_wrong_address_or_one_twice_is_refused(wrong):
    with pytest.raises(ValueError, match=re.escape(f"{wrong}' ")):
        parse(["--nnodes=1:2", f"--rdzv-endpoint=a,{wrong}", "train.py"], TOKEN)


def test_hosts_with_different_lists_are_refused(jdp_run):
    run = Hosts(jdp_run, 2)
    first = run.add(0)
    first.until("host joined")
    own = f"127.0.0.1:{launcher.free_port()}"
    listed = run.endpoints
    run.endpoints = f"{listed.partition(',')[0]},{own}"
    other = run.add(1)
    assert other.wait() == 1
    assert listed in other.output and own in other.output
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 128 + signal.SIGTERM


def test_hosts_whose_lists_have_another_order_end_with_an_error(jdp_run):
    run = Hosts(jdp_run, 2, f"--join-timeout-s={launcher.JOIN_TIMEOUT_S}")
    first = run.add(0)
    run.endpoints = ",".join(reversed(run.endpoints.split(",")))
    second = run.add(0)
    assert {first.wait(), second.wait()} == {1}
    for host in (first, second):
        assert (
            "place 1" in host.output
            and "place 0" in host.output
            and run.endpoints[:15] in host.output
        )


def test_a_list_with_two_names_of_one_host_is_an_error(jdp_run):
    run = Hosts(jdp_run, 2, f"--join-timeout-s={launcher.JOIN_TIMEOUT_S}")
    run.endpoints = f"127.0.0.1:{(port := launcher.free_port())},localhost:{port}"
    host = run.add(0)
    assert host.wait() == 1
    assert f"localhost:{port} has place 1" in host.output and "reports place 0" in host.output


def test_hosts_with_different_heartbeat_timeouts_are_refused(jdp_run):
    run = Hosts(jdp_run, 2)
    first = run.add(0)
    first.until("host joined")
    run._flags = *run._flags, "--heartbeat-timeout-s=3.5"
    other = run.add(1)
    assert other.wait() == 1
    assert "--heartbeat-timeout-s is 3.5" in other.output
    assert f"leader {launcher.HEARTBEAT_TIMEOUT_S}" in other.output
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 128 + signal.SIGTERM


def test_a_host_whose_processes_have_joined_goes_on_if_the_leader_dies_before_a_step(jdp_run):
    run = Hosts(jdp_run, 2, init="if a.generation == 2: time.sleep(60)")
    first, second = run.add(0), run.add(1)
    first.pids(0, 2)
    first.process.kill()
    second.pids(1, 1)
    first = run.add(0)
    second.until("restored", 2, generation=2)  # told after "joined" of both
    second.process.kill()
    first.pids(3, 1)
    assert not second.events("first_step", generation=2) and first.finish() == 0


def test_losses_of_leaders_count_towards_max_restarts(jdp_run):
    run = Hosts(jdp_run, 3, "--max-restarts=1")
    first, second, third = [run.add(rank) for rank in range(3)]
    first.pids(0, 3)
    first.process.kill()
    second.pids(1, 2)
    [recovered] = second.until("recovered")
    assert recovered["error_codes"] == ["JDP311"]
    second.process.kill()
    assert third.wait() == 1
    assert not third.events("formed") and "--max-restarts 1." in third.output


def test_a_failure_that_a_lost_leader_has_counted_counts(jdp_run):
    run = Hosts(jdp_run, 2, "--max-restarts=2", after="if a.generation == 0: sys.exit(3)")
    first, second = run.add(0), run.add(1)
    first.pids(1, 2)
    first.process.kill()
    second.pids(2, 1)
    [recovered] = second.until("recovered")
    assert recovered["generation"] == 2
    first = run.add(0)
    # Told after the first step of both: so the first host knows that it is an elector for good.
    second.until("running", 2, generation=3)
    second.process.kill()
    assert first.wait() == 1 and "2 failures" in first.output


@contextlib.contextmanager
def proxy(port):
    """A port that leads to this one, until `cut()` ends all connections, in order."""
    listener, ends = socket.create_server(("127.0.0.1", 0)), []

    def copy(source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", port))
                ends.extend([near, far])
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=copy, args=pair, daemon=True).start()

    def cut():
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield SimpleNamespace(port=listener.getsockname()[1], cut=cut)
    finally:
        with contextlib.suppress(OSError):
            cut()
        for end in ends:
            end.close()


def test_the_end_of_a_proxy_is_not_taken_for_the_death_of_the_leader(jdp_run):
    run = Hosts(jdp_run, 2, f"--join-timeout-s={launcher.JOIN_TIMEOUT_S}")
    port = int(run.endpoints.partition(",")[0].rpartition(":")[2])
    first = run.add(0)
    first.until("host joined")
    with proxy(port) as between:
        through = f"""
from jdp.launch import connection
connect = connection.connect
async def through(address, timeout_s):
    name, port = address
    return await connect((name, {between.port} if port == {port} else port), timeout_s)
connection.connect = through
"""
        second = run.add(1, changes=through)
        pids = first.pids(0, 2)
        between.cut()
        assert second.wait() == 1 and "JDP306" in second.output
    assert not second.events("formed") and pids[1] not in second.alive()
    first.pids(1, 1)
    assert "through a proxy" in first.output
    assert first.finish() == 0


def test_a_host_that_leaves_while_its_lifeline_opens_is_not_taken_for_dead():
    async def leave():
        loop, listener = asyncio.get_running_loop(), socket.create_server(("127.0.0.1", 0))
        with listener:
            listener.setblocking(False)
            lifeline = LeaderLifeline("token", listener.getsockname(), "a")
            leader, _ = await loop.sock_accept(listener)
        with leader:
            leader.setblocking(False)
            await loop.sock_sendall(leader, encode("challenge", {"nonce": "1"}))
            read = await loop.sock_recv(leader, 1 << 16)
            lifeline.leave()
            while data := await loop.sock_recv(leader, 1 << 16):
                read += data
        return [decode(line)[0] for line in read.splitlines()]

    assert asyncio.run(asyncio.wait_for(leave(), 10.0)) == ["lifeline", "farewell"]


def test_a_leader_says_farewell_to_a_lost_host_before_it_goes_on():
    facts = {"id": "b", "name": "b", "address": None, "port": 7, "num_processes": [1, 1]}
    facts |= {"host_id": None, "generation": 0}

    async def go_on():
        options = parse(["--nnodes=1:2", "--rdzv-endpoint=a,b", "train.py"], TOKEN)
        members = Membership(
            *(options, "token", socket.create_server(("127.0.0.1", 0)), print, Events(None, print)),
            *(lambda *_: None for _ in range(5)),
        )
        (main, other), (lifeline, host) = socket.socketpair(), socket.socketpair()
        remote = RemoteHost(Channel(main), facts)
        remote.lifeline = Lifeline(Channel(lifeline), lambda: None, is_direct=True)
        members.remotes.append(remote)
        remote.channel.close_connection()
        members._remove(remote, "lost")
        host.setblocking(False)
        with pytest.raises(BlockingIOError):
            host.recv(99)  # the lifeline may still show the death of the host
        members.go_on_without_lost_hosts()
        members.resign()
        with other, host:
            return decode(host.recv(99))

    assert asyncio.run(go_on()) == ("farewell", {})


def test_a_name_that_cannot_be_found_is_that_of_another_host(monkeypatch):
    find_address, own = socket.getaddrinfo, socket.gethostname()

    def unknown(name, *args, **more):
        if name in (own, "other"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return find_address(name, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", unknown)

    async def place(*names):
        listed = ",".join(f"{name}:{launcher.free_port()}" for name in names)
        flags = "--nnodes=1:2", f"--rdzv-endpoint={listed}"
        found = election.find(parse([*flags, "train.py"], TOKEN))
        found.release()
        return found.own

    assert asyncio.run(place("other", "127.0.0.1")) == 1
    assert asyncio.run(place("other", own)) == 1
    assert asyncio.run(place("other")) is None


@pytest.fixture
def search(monkeypatch):
    """search(own, generation): a LeaderSearch of three addresses, on a clock that a test sets."""

    def search(own, generation):
        addresses = [("a", 1), ("b", 2), ("c", 3)]
        made = LeaderSearch(Rendezvous(addresses, own), 5.0, lambda: generation, lambda: None)
        made.clock = [100.0]
        clock = SimpleNamespace(monotonic=lambda: made.clock[0])
        monkeypatch.setattr(election, "time", clock)
        return made

    return search


# The leader hears nothing for 5 s of a host that has left it, counts it as lost after 7.5 s, and
# then kills its processes.
def test_a_host_follows_another_leader_after_a_silent_one_has_killed_its_processes(search):
    host = search(own=1, generation=0)
    host.record_joined(0)
    host.begin(is_leader_dead=False)
    host.clock[0] += 9.9
    assert host.places() == [0] and not host.begins_to_lead()
    host.clock[0] += 0.2
    assert host.places() == [2, 0] and host.begins_to_lead()
    assert host.leads and host.places() == [1]


def test_the_first_that_lives_leads_and_those_behind_it_give_it_time(search):
    for own, num_rounds in ((1, 1), (2, 2)):
        host = search(own, generation=0)
        host.record_joined(0)
        host.begin(is_leader_dead=True)
        assert [host.begins_to_lead() for _ in range(num_rounds)][-1]
        assert host.places() == [own]


def test_a_launcher_that_knows_no_generation_leads_only_if_it_is_the_first(search):
    first, second, unlisted = search(0, -1), search(1, -1), search(None, 3)
    assert first.begins_to_lead()
    assert not any([host.begins_to_lead() for host in (second, unlisted) for _ in range(9)])
