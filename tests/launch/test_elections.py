"""Several hosts that may lead: when the leader is lost, at most one other host leads."""

import itertools
import random
import signal
from types import SimpleNamespace

import pytest
from support import launcher

from jdp.launch.claim import claim_of
from jdp.launch.electorate import Electorate
from jdp.launch.host import leader_search
from jdp.launch.host.leader_search import LeaderSearch
from jdp.launch.rendezvous import Rendezvous

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
    electorate = Electorate({"": electors})
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

    The rule is that of `Host` and `Leader`: a host joins, takes part, leaves, or sees a death.
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
        for host in {*self.ids} - {*present}:
            if self.leader_of.get(host) == leader:
                del self.leader_of[host]
        if len(present) < self.size and not self.known[leader].has_quorum(present):
            return
        assert not self.generations, "two generations run at the same time"
        self.generations.append(present)
        self.num_formed += 1
        self.num_of_minorities += 2 * len(present) <= self.size
        name = str(self.num_formed)
        self.known[leader] = self.known[leader].changed(name, present)
        got = [host for host in present if host == leader or self.may(0.8)]
        for host in got:
            self.learn(host, self.known[leader])
            self.took_part.add(host)
        if got == present and self.may(0.7):
            self.known[leader] = self.known[leader].settled(name)
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
    electorate = Electorate({"": ["a", "b", "c"]})
    assert not electorate.has_quorum({"b", "a again"})


def test_electors_that_were_superseded_are_forgotten_and_deaths_are_not():
    early = Electorate({"0": ["a", "b"]})
    late = early.changed("1", ["b", "c"]).settled("1")
    for merged in (early.with_dead("a").merged(late), late.merged(early.with_dead("a"))):
        assert merged.groups == {"1": ["b", "c"]} and merged.dead == ["a"]


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
    run = Hosts(jdp_run, 2, "--join-timeout-s=5")
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
    run = Hosts(jdp_run, 3, "--join-timeout-s=2")
    first, second = run.add(0), run.add(1)
    assert {first.wait(), second.wait()} == {1}
    assert "JDP306" in first.output and not first.events("formed")


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


@pytest.fixture
def search(monkeypatch):
    """search(own, generation): a LeaderSearch of three addresses, on a clock that a test sets."""

    def search(own, generation):
        addresses = [("a", 1), ("b", 2), ("c", 3)]
        made = LeaderSearch(Rendezvous(addresses, own), 5.0, lambda: generation, lambda: None)
        made.clock = [100.0]
        clock = SimpleNamespace(monotonic=lambda: made.clock[0])
        monkeypatch.setattr(leader_search, "time", clock)
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
