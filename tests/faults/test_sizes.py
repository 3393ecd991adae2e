"""Hosts are lost and come back: the run goes on with as many processes as there are."""

import contextlib
import subprocess

import harness
import pytest
from support.launcher import free_port
from support.namespaces import two_hosts, why_no_namespaces

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.slow]

TOKEN = {"JDP_TOKEN": "a secret"}


class Hosts:
    """One launcher for each host, with one process each; host 0 leads."""

    def __init__(self, training, num_hosts, address="127.0.0.1", within=None):
        self.launchers = [None] * num_hosts
        self._training = training
        self._within = within or [()] * num_hosts
        self._flags = f"--nnodes=1:{num_hosts}", f"--rdzv-endpoint={address}:{free_port()}"

    def start(self, rank):
        """Start the launcher of a host, perhaps again."""
        flags = *self._flags, f"--node-rank={rank}"
        self.launchers[rank] = self._training.start(*flags, within=self._within[rank], **TOKEN)

    def kill(self, rank):
        """Have a host die."""
        self.launchers[rank].process.kill()

    def until_trained_by(self, num_processes):
        """Wait until each process of a generation of that size has made a step."""
        leader = self.launchers[0]

        def steps():
            last = leader.until("formed")[-1]
            told = leader.events("first_step", generation=last["generation"])
            return last["num_processes"] == num_processes == len(told)

        leader.until_true(steps, f"generation of {num_processes}")


def test_shrinking_and_growing_give_the_same_parameters(trainings, oracle):
    training = trainings(leash=20)
    hosts = Hosts(training, 3)
    for rank in range(3):
        hosts.start(rank)
    hosts.until_trained_by(3)
    hosts.launchers[0].until_ready(3)
    hosts.kill(2)
    training.order(40)
    hosts.until_trained_by(2)
    hosts.kill(1)
    training.order(60)
    hosts.until_trained_by(1)
    training.until_step(hosts.launchers[0], 60)
    hosts.start(1)
    hosts.start(2)
    hosts.until_trained_by(3)
    # The leader goes, too, and all that it knew; the others have the commit.
    training.order(100)
    training.until_step(hosts.launchers[0], 100)
    hosts.kill(0)
    hosts.start(0)
    hosts.until_trained_by(3)
    training.order(None)
    assert [launcher.wait() for launcher in hosts.launchers] == [0, 0, 0]
    for launcher in training.launchers:
        for record in launcher.events("recovered"):
            print(record)
    training.close()
    harness.assert_close(training, oracle, num_processes=3)
    assert not training.miscounted()
    assert max(training.lost_steps()) <= 2 * harness.victim.COMMIT_EVERY


@pytest.mark.thorough
def test_a_host_whose_wire_is_cut_is_left_out_until_it_can_be_reached(trainings, oracle):
    if reason := why_no_namespaces():
        pytest.skip(reason)
    with two_hosts() as within:
        training = trainings(leash=20)
        hosts = Hosts(training, 2, "10.83.0.1", within)
        hosts.start(0)
        hosts.start(1)
        hosts.until_trained_by(2)
        hosts.launchers[0].until_ready(2)
        with wire_cut(within[1]):
            training.order(40)
            hosts.until_trained_by(1)
            training.until_step(hosts.launchers[0], 40)
        hosts.until_trained_by(2)
        training.order(None)
        assert [launcher.wait() for launcher in hosts.launchers] == [0, 0]
        training.close()
    for record in hosts.launchers[0].events("recovered"):
        print(record)
    harness.assert_close(training, oracle, num_processes=2)
    assert not training.miscounted()


@contextlib.contextmanager
def wire_cut(within):
    subprocess.run([*within, "ip", "link", "set", "wire1", "down"], check=True)
    try:
        yield
    finally:
        subprocess.run([*within, "ip", "link", "set", "wire1", "up"], check=True)
