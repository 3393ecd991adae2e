"""Several hosts, each a launcher of its own: they join, leave, are lost and come back."""

import contextlib
import os
import re
import signal
import socket
import threading

import pytest
from support import launcher
from support.terminal import AFTER, OFTEN, TRAINS

from jdp.worker import build_info
from jdp.worker.messages import encode

TOKEN = {"JDP_TOKEN": "a secret"}


class Hosts:
    """Launchers that meet at one port; the first of them leads."""

    def __init__(self, start, flags, scripts):
        self.endpoint = f"127.0.0.1:{launcher.free_port()}"
        self._start, self._flags, self._scripts = start, flags, scripts

    def add(self, rank, **changes):
        where = [f"--rdzv-endpoint={self.endpoint}", f"--node-rank={rank}"]
        return self._start(*self._flags, *where, **{**TOKEN, **self._scripts, **changes})


@pytest.fixture
def hosts(jdp_run):
    return lambda *flags, **scripts: Hosts(jdp_run, flags, scripts)


def test_hosts_are_one_run(hosts):
    num_hosts = 3
    run = hosts(f"--nnodes={num_hosts}", "--nproc-per-node=2", after="print(a)")
    all_hosts = [run.add(rank) for rank in range(num_hosts)]
    all_hosts[0].pids(0, 2 * num_hosts)
    assert {host.finish() for host in all_hosts} == {0}
    for host_id, host in enumerate(all_hosts):
        for local_id in (0, 1):
            rank = 2 * host_id + local_id
            who = f"process_id={rank}, num_processes={2 * num_hosts}, local_id={local_id}"
            assert f"{who}, num_local=2" in host.output
        assert f"host_id={host_id})" in host.output


# The process of the second host computes for all of its steps, in which the other waits 5 of 25 ms.
STEPS = """
from jdp.worker.progress_board import Board
from jdp.worker.progress_board import NUM_RECORDS, StepRecord
slot = Board.attach(launcher.board_file).slot(launcher.slot)
slot.claim(a.generation, 600.0)
for _ in range(NUM_RECORDS):
    slot.times.write(StepRecord(1, 25_000_000, waited_ns=0 if a.process_id else 5_000_000))
"""


def test_a_slow_process_of_another_host_is_named_by_the_leader_alone(hosts):
    run = hosts("--nnodes=2", after=STEPS)
    leads, follows = run.add(0), run.add(1)
    (slow,) = leads.until("slow")
    assert (slow["process_id"], slow["part"], slow["share"]) == (1, "compute", 0.2)
    assert {leads.finish(), follows.finish()} == {0}
    assert "process 1 is slow" in leads.output
    assert "is slow" not in follows.output


def test_a_failure_on_one_host_is_recovered_from_on_all(hosts):
    run = hosts("--nnodes=2", "--nproc-per-node=2")
    leader, other = run.add(0), run.add(1)
    pids = leader.pids(0, 4)
    leader.until("ready", 2, generation=0)
    standbys = {*leader.alive(), *other.alive()} - {*pids}
    os.kill(pids[3], signal.SIGKILL)
    # One of each host stays in reserve, and is forked.
    assert len({*leader.pids(1, 4)} & standbys) == 2
    assert {leader.finish(), other.finish()} == {0}


def test_a_failure_ends_the_run_on_all_hosts_with_the_same_code(hosts):
    run = hosts("--nnodes=2", "--max-restarts=0", after="if a.process_id: sys.exit(7)")
    leader, other = run.add(0), run.add(1)
    assert {leader.wait(), other.wait()} == {7}
    assert all("7 (jdp explain-error JDP301)" in host.output for host in (leader, other))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("first", [0, 1])
def test_a_signal_to_one_host_reaches_all(hosts, first, number):
    run = hosts("--nnodes=2", after="signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))")
    both = [run.add(0), run.add(1)]
    both[0].until("running", 2)
    both[first].process.send_signal(number)
    assert [host.wait() for host in both] == [75, 75]


def test_a_host_that_comes_later_makes_the_run_grow_and_costs_no_restart(hosts):
    run = hosts("--nnodes=1:3", "--max-restarts=1")
    leader = run.add(0)
    leader.pids(0, 1)
    others = [run.add(1)]
    leader.pids(1, 2)
    others.append(run.add(2))
    leader.pids(2, 3)
    os.kill(leader.pids(2, 3)[2], signal.SIGKILL)
    leader.pids(3, 3)
    assert {host.finish() for host in (leader, *others)} == {0}


# Long enough for a host to come.
LONG_BACKOFF = "from jdp.launch.leader import remote_host; remote_host.BACKOFF_S = 2.0"


def test_a_host_that_comes_between_two_generations_makes_the_run_grow(hosts):
    run = hosts("--nnodes=1:2", changes=LONG_BACKOFF)
    leader = run.add(0)
    for generation in (0, 1):
        os.kill(leader.pids(generation, 1)[0], signal.SIGKILL)
    other = run.add(1)
    leader.pids(2, 1)
    leader.pids(3, 2)
    assert {leader.finish(), other.finish()} == {0}


def test_a_run_that_would_begin_at_step_0_does_not_grow(hosts):
    script = launcher.SCRIPT.replace('tell("restored"', 'tell("has no Checkpointer"')
    run = hosts("--nnodes=1:2", script=script)
    leader = run.add(0)
    leader.pids(0, 1)
    other = run.add(1)
    leader.until("ready", 2)
    assert {leader.finish(), other.finish()} == {0}
    assert len(leader.events("formed")) == 1


def test_the_run_shrinks_without_a_lost_host_and_grows_when_it_is_back(hosts):
    run = hosts("--nnodes=1:2", "--last-call-timeout-s=30")
    leader, other = run.add(0), run.add(1)
    leader.pids(0, 2)
    other.process.kill()
    leader.pids(1, 1)
    again = run.add(1)
    leader.pids(2, 2)
    assert {leader.finish(), again.finish()} == {0}
    assert f"host {socket.gethostname()} " in leader.output


def test_a_fixed_number_of_hosts_waits_for_a_lost_one(hosts):
    run = hosts("--nnodes=2", after="print(launcher.assignment.resumes)")
    leader, other = run.add(0), run.add(1)
    leader.pids(0, 2)
    other.process.kill()
    leader.until("host lost")
    again = run.add(1)
    leader.pids(1, 2)
    assert {leader.finish(), again.finish()} == {0}


def test_too_few_hosts_are_an_error_that_names_who_is_there(hosts):
    leader = hosts("--nnodes=2", "--join-timeout-s=3").add(0)
    assert leader.wait() == 1
    assert f"({socket.gethostname()})" in leader.output and "JDP306" in leader.output


def test_a_host_without_a_leader_gives_up(hosts):
    host = hosts("--nnodes=2", "--join-timeout-s=0.5").add(1)
    assert host.wait() == 1
    assert "127.0.0.1" in host.output and "JDP307" in host.output


def test_what_is_being_saved_when_the_leader_dies_is_saved(hosts):
    saves = "(folder / f'saving {a.process_id}').touch(); time.sleep(1); sys.exit(75)"
    run = hosts(
        "--nnodes=2",
        "--shutdown-timeout-s=30",
        after=f"def save(*_): {saves}\nsignal.signal(signal.SIGTERM, save)",
    )
    leader, other = run.add(0), run.add(1)
    leader.signal(signal.SIGTERM)
    other.until_true((other.folder / "saving 1").exists, "saving")
    leader.process.kill()
    assert other.wait() == 75


KEEPS = """
text = os.pread(launcher.commit_file, 99, 0).decode()
if not text: os.pwrite(launcher.commit_file, b"commit %d" % a.generation, 0)
print("generation", a.generation, "resumes", a.resumes, "found", text)
"""


def test_the_death_of_the_leaders_host_loses_nothing(hosts):
    run = hosts("--nnodes=2", after=KEEPS)
    leader, other = run.add(0), run.add(1)
    pids = leader.pids(0, 2)
    other.until_true(lambda: "generation 0" in other.output, "its commit")
    leader.process.kill()
    other.until_true(lambda: not {*pids} & {*other.alive()}, "end of its processes")
    other.until_true(lambda: "JDP311" in other.output, "line about it")
    again = run.add(0)
    again.pids(1, 2)
    assert {again.finish(), other.finish()} == {0}
    assert "generation 1 resumes True found commit 0" in other.output
    assert "generation 1 resumes True found \n" in again.output


def test_the_run_goes_on_without_a_stopped_host_and_grows_when_it_is_back(hosts):
    run = hosts("--nnodes=1:2", "--last-call-timeout-s=30")
    leader, other = run.add(0), run.add(1)
    leader.pids(0, 2)
    other.process.send_signal(signal.SIGSTOP)
    [lost] = leader.until("host lost")
    assert re.search(r" \d\.\d s", lost["why"])
    leader.pids(1, 1)
    other.process.send_signal(signal.SIGCONT)
    leader.pids(2, 2)
    assert {leader.finish(), other.finish()} == {0}


def test_hosts_leave_a_leader_that_is_silent_and_find_it_again(hosts):
    run = hosts("--nnodes=2")
    leader, other = run.add(0), run.add(1)
    pids = leader.pids(0, 2)
    leader.process.send_signal(signal.SIGSTOP)
    silent = f"silent for {launcher.HEARTBEAT_TIMEOUT_S} s"
    other.until_true(lambda: silent in other.output, "line about it")
    other.until_true(lambda: pids[1] not in other.alive(), "end of its process")
    leader.process.send_signal(signal.SIGCONT)
    leader.pids(1, 2)
    assert {leader.finish(), other.finish()} == {0}


def test_a_stopped_launcher_that_is_alone_loses_nothing(jdp_run):
    run = jdp_run("--heartbeat-timeout-s=0.2")
    run.pids(0, 1)
    run.process.send_signal(signal.SIGSTOP)
    run.until_true(lambda: _state(run.process.pid) == "T", "stop")
    signal.sigtimedwait([], 0.5)
    run.process.send_signal(signal.SIGCONT)
    assert run.finish() == 0
    assert len(run.events("formed")) == 1


def _state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


class Wire:
    """Between a host and the leader, until it is cut; nobody is told that, as with a real one."""

    def __init__(self, endpoint):
        address, _, port = endpoint.rpartition(":")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._leader = address, int(port)
        self._is_cut = threading.Event()
        self._ends = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self):
        self._is_cut.set()

    def close(self):
        for end in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                host, _ = self._listener.accept()
                leader = socket.create_connection(self._leader)
                self._ends += [host, leader]
                for a, b in ((host, leader), (leader, host)):
                    threading.Thread(target=self._forward, args=(a, b), daemon=True).start()

    # An end that is closed is no news for the other one either.
    def _forward(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                if not self._is_cut.is_set():
                    target.sendall(data)
            if not self._is_cut.is_set():
                target.shutdown(socket.SHUT_RDWR)


def test_a_host_that_is_cut_off_ends_its_processes_before_the_others_go_on(hosts):
    run = hosts("--nnodes=1:2", "--join-timeout-s=2", "--last-call-timeout-s=30")
    leader = run.add(0)
    leader.until("host joined")
    with contextlib.closing(Wire(run.endpoint)) as wire:
        run.endpoint = wire.endpoint
        other = run.add(1)
        pids = leader.pids(0, 2)
        wire.cut()
        other.until_true(lambda: pids[1] not in other.alive(), "end of its process")
        assert not leader.events("host lost")
        leader.pids(1, 1)
        assert other.wait() == 1
    assert "within 2 s" in other.output and "JDP307" in other.output
    assert leader.finish() == 0


def test_nobody_joins_without_the_token(hosts):
    run = hosts("--nnodes=2")
    leader = run.add(0)
    stranger = run.add(1, JDP_TOKEN="another")
    assert stranger.wait() == 1 and "JDP309" in stranger.output
    other = run.add(1)
    leader.pids(0, 2)
    assert {leader.finish(), other.finish()} == {0}


def test_who_does_not_know_the_token_is_no_leader(hosts):
    run = hosts("--nnodes=2")
    address, _, port = run.endpoint.rpartition(":")
    with socket.create_server((address, int(port))) as listener:
        host = run.add(1)
        connection, _ = listener.accept()
        with connection:
            connection.sendall(
                encode(
                    "challenge",
                    {"nonce": "1", "protocol": build_info.source_digest(build_info.PROTOCOL)},
                )
            )
            assert b"a secret" not in connection.recv(9999)
            connection.sendall(b'{"kind": "welcome", "proof": "1", "is_running": true}\n')
            assert host.wait() == 1
    assert "JDP309" in host.output


STRANGERS = [b"", b"\n", b"{}\n", b"x" * 9999, b"[" * 3999 + b"\n", b'{"kind": "beat"}\n', b"[1]\n"]


def test_strangers_disturb_nobody(hosts):
    run = hosts("--nnodes=2")
    leader = run.add(0)
    leader.until("host joined")
    address, _, port = run.endpoint.rpartition(":")
    with contextlib.ExitStack() as stack:
        for data in STRANGERS:
            stranger = stack.enter_context(socket.create_connection((address, int(port))))
            stranger.sendall(data)
        other = run.add(1)
        leader.pids(0, 2)
        assert {leader.finish(), other.finish()} == {0}


def test_strangers_that_take_all_descriptors_disturb_nobody(hosts):
    run = hosts("--nnodes=2", within=["sh", "-c", 'ulimit -n 120; exec "$@"', "sh"])
    leader = run.add(0)
    leader.until("host joined")
    address, _, port = run.endpoint.rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stranger = stack.enter_context(socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex((address, int(port)))
        other = run.add(1)
        leader.pids(0, 2)
        assert {leader.finish(), other.finish()} == {0}


def test_a_host_of_another_run_is_refused(hosts):
    run = hosts("--nnodes=2")
    leader = run.add(0, JDP_RDZV_ID="one")
    other = run.add(1, JDP_RDZV_ID="two")
    assert other.wait() == 1
    assert "'two'" in other.output and "'one'" in other.output
    leader.process.send_signal(signal.SIGTERM)
    assert leader.wait() == 128 + signal.SIGTERM


def test_launchers_without_a_number_agree_who_leads(jdp_run):
    endpoint = f"127.0.0.1:{launcher.free_port()}"
    flags = "--nnodes=2", f"--rdzv-endpoint={endpoint}"
    leader = jdp_run(*flags, **TOKEN)
    leader.until("host joined")
    other = jdp_run(*flags, **TOKEN)
    leader.pids(0, 2)
    assert {leader.finish(), other.finish()} == {0}


def test_a_second_leader_at_one_endpoint_is_an_error(hosts):
    run = hosts("--nnodes=2")
    leader = run.add(0)
    leader.until("host joined")
    second = run.add(0)
    assert second.wait() == 2
    assert run.endpoint in second.output and "JDP310" in second.output
    leader.process.send_signal(signal.SIGTERM)
    assert leader.wait() == 128 + signal.SIGTERM


# A name of TEST-NET-1, as that of a Service, or of the pod that had the name before.
ELSEWHERE = """
import socket
known, there = socket.getaddrinfo, ("192.0.2.7", 0)
socket.getaddrinfo = lambda name, *args, **more: (
    [(socket.AF_INET, socket.SOCK_STREAM, 6, "", there)] if name == "train-0.train"
    else known(name, *args, **more)
)
"""


def test_a_leader_whose_name_leads_elsewhere_listens_at_all_its_addresses(jdp_run):
    port = launcher.free_port()

    def host(rank, name):
        where = f"--rdzv-endpoint={name}:{port}", f"--node-rank={rank}"
        return jdp_run("--nnodes=2", *where, changes=ELSEWHERE, **TOKEN)

    leader, other = host(0, "train-0.train"), host(1, "127.0.0.1")
    leader.pids(0, 2)
    assert {leader.finish(), other.finish()} == {0}
    assert "192.0.2.7" in leader.output


def test_an_address_of_another_host_is_an_error_at_once(jdp_run):
    where = f"--rdzv-endpoint=192.0.2.7:{launcher.free_port()}", "--node-rank=0"
    run = jdp_run("--nnodes=2", *where, **TOKEN)
    assert run.wait() == 2
    assert "192.0.2.7" in run.output and "JDP310" in run.output


def test_the_leader_shows_how_far_the_processes_of_all_hosts_are(hosts):
    run = hosts("--nnodes=2", "--nproc-per-node=2", init=TRAINS, after=AFTER, changes=OFTEN)
    leader, other = run.add(0), run.add(1)
    shown = "step 40, loss 0.25, "
    leader.until_true(lambda: shown in leader.output, shown)
    assert {leader.finish(), other.finish()} == {0}
    assert "ETTR" not in other.output
