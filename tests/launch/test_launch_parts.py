"""The parts of the launcher that can be looked at alone."""

import asyncio
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jdp.__main__ import main
from jdp.launch import connection
from jdp.launch.connection import Channel
from jdp.launch.host import spawn
from jdp.launch.host.local_generation import num_oom_kills
from jdp.launch.host.standby_pool import Standbys
from jdp.launch.host.worker_process import SHARE, gpus_of_slots, memory_of_shared
from jdp.launch.leader import failure as failures
from jdp.launch.leader import rank_assignment
from jdp.launch.leader import remote_host as remotes
from jdp.launch.leader.generation import Generation
from jdp.launch.leader.rank_assignment import Part
from jdp.launch.leader.recovery import RestartBudget
from jdp.launch.leader.remote_host import HostSlot, RemoteHost
from jdp.launch.leader.run_report import Events, RunReport
from jdp.launch.options import misplaced_flags, parse, require_program
from jdp.worker.exit_codes import exit_code, in_words
from jdp.worker.launcher_client import VARIABLE, Assignment, LauncherClient, invitation
from jdp.worker.messages import MAX_LINE_BYTES, decode, encode
from jdp.worker.process_status import ProcessStatus


def remote(name="a", host_id=None, num=(2, 2), address=None, seen="10.0.0.2", leader="10.0.0.1"):
    facts = {"id": name, "name": name, "address": address, "port": 7, "host_id": host_id}
    channel = SimpleNamespace(addresses=(leader, seen), is_open=True)
    return RemoteHost(channel, {**facts, "num_processes": num, "generation": -1})


def test_hosts_with_a_number_come_first_and_the_others_as_they_came():
    hosts = [remote("x"), remote("b", 1), remote("y"), remote("a", 0)]
    made = rank_assignment.make(hosts, least=1, now=0.0)
    assert [part.remote.name for part in made] == ["a", "b", "x", "y"]
    assert [part.first for part in made] == [0, 2, 4, 6] and rank_assignment.size(made) == 8


def test_too_few_hosts_make_no_plan():
    assert rank_assignment.make([remote()], least=2, now=0.0) is None


def test_a_host_that_has_just_come_is_left_out_if_there_are_enough():
    old, new = remote("old"), remote("new")
    old.take_part(0)
    assert [part.remote for part in rank_assignment.make([old, new], least=1, now=0.0)] == [old]
    assert len(rank_assignment.make([old, new], least=2, now=0.0)) == 2
    new.is_ready = True
    assert len(rank_assignment.make([old, new], least=1, now=0.0)) == 2


def test_hosts_that_may_be_on_their_way_are_waited_for_at_the_start_only():
    flags = "--nnodes=1:2", "--rdzv-endpoint=a:7", "--last-call-timeout-s=5", "train.py"
    options = parse(flags, {"JDP_TOKEN": "a secret"})
    one, two = remote("one"), remote("two")
    start = rank_assignment.Gathering(options, is_start=True)
    assert start.plan([one], now=1.0) is None
    assert start.plan([], now=2.0) is None  # from now on it waits anew
    assert start.plan([one], now=3.0) is None
    assert start.plan([one], now=7.9) is None
    assert start.plan([one], now=8.0) == [Part(one, 0, [0, 1])]
    assert (
        rank_assignment.size(
            rank_assignment.Gathering(options, is_start=True).plan([one, two], now=1.0)
        )
        == 4
    )
    assert rank_assignment.Gathering(options, is_start=False).plan([one], now=1.0) is not None


def test_a_slot_that_rests_is_left_out_and_one_that_is_needed_is_waited_for():
    elastic, fixed = remote(num=(1, 2)), remote(num=(2, 2))
    for host in (elastic, fixed):
        host.slots[0].free_at = 5.0
    assert rank_assignment.make([elastic], least=1, now=0.0) == [Part(elastic, 0, [1])]
    assert rank_assignment.make([fixed], least=1, now=0.0) is None
    assert rank_assignment.make([fixed], least=1, now=5.0) == [Part(fixed, 0, [0, 1])]


def test_a_slot_rests_when_it_fails_twice_in_a_minute_and_each_time_for_longer():
    slot = HostSlot()
    slot.fail(0.0, can_rest=True)
    slot.fail(remotes.WINDOW_S, can_rest=True)
    assert slot.free_at == 0.0
    slot.fail(remotes.WINDOW_S + 1, can_rest=True)
    assert slot.free_at == remotes.WINDOW_S + 1 + remotes.REST_S
    slot.fail(remotes.WINDOW_S + 2, can_rest=True)
    assert slot.free_at == remotes.WINDOW_S + 2 + 2 * remotes.REST_S


def test_a_slot_that_is_needed_backs_off_only():
    slot = HostSlot()
    slot.fail(0.0, can_rest=False)
    assert slot.free_at == 0.0
    for failure in range(1, 30):
        slot.fail(float(failure), can_rest=False)
        waits_s = min(remotes.BACKOFF_S * 2 ** (failure - 1), remotes.MAX_BACKOFF_S)
        assert slot.free_at == failure + waits_s


def test_process_0_listens_where_others_reach_its_host():
    home = Part(remote("home", seen="127.0.0.1"), 0, [0])
    other = Part(remote("other", leader="10.0.0.1"), 1, [0])
    chosen = Part(remote("home", address="fe80::1"), 0, [0])
    assert rank_assignment.coordinator([home], "home") == "127.0.0.1:7"
    assert rank_assignment.coordinator([home, other], "home") == "10.0.0.1:7"
    assert rank_assignment.coordinator([other, home], "home") == "10.0.0.2:7"
    assert rank_assignment.coordinator([chosen, other], "home") == "[fe80::1]:7"


def test_the_first_failure_is_the_cause_unless_a_later_one_is_sure():
    host, other = remote("a"), remote("b")
    parts = [Part(host, 0, [0, 1]), Part(other, 2, [1])]
    options = parse(["train.py"], {})
    events = Events(None, print)
    report = RunReport(print, events)
    generation = Generation(0, parts, options, say=print, events=events, report=report)

    def end(on, process_id, returncode):
        facts = {"traceback": None, "last_lines": [], "status": [*ProcessStatus(7)]}
        generation.record_exit(on, process_id, 7, returncode, **facts)
        return generation.cause and generation.cause.code

    assert end(host, 1, 0) is None
    assert end(host, 0, 3) == 3
    assert end(host, 0, -signal.SIGABRT) == 3  # as JAX does when another process is lost
    assert end(other, 2, -signal.SIGSEGV) == 139
    assert end(host, 0, -signal.SIGKILL) == 139
    for now in (0.0, 1.0):
        generation.blame(now)
    assert [slot.free_at > 0 for slot in host.slots + other.slots] == [False] * 3 + [True]


LOST = failures.loss_of_host("a", "silent", 5.0)


# The reasons to end, "" where the run goes on, of failures of (seconds, step).
def reasons(*failed, why=LOST, max_restarts=3):
    budget, found = RestartBudget(max_restarts, window_s=600.0), []
    for now, step in failed:
        found.append(budget.reason_to_end(why, step, now))
        budget.record_failure(why, step, now)
    return found


def test_a_run_of_weeks_may_fail_three_times_in_ten_minutes():
    assert not any(reasons(*[(200.0 * i, i) for i in range(3)]))
    assert not any(reasons(*[(301.0 * i, i) for i in range(99)]))
    *_, last = reasons(*[(199.0 * i, i) for i in range(4)])
    assert "--max-restarts 3" in last and "600 s" in last
    assert "--max-restarts 0" in reasons((0.0, 0), max_restarts=0)[0]


def test_failures_that_a_run_never_gets_beyond_are_not_forgotten():
    assert [bool(each) for each in reasons(*[(9999.0 * i, 50) for i in range(4)])] == [
        False
    ] * 3 + [True]
    assert not any(reasons(*[(9999.0 * i, None) for i in range(9)]))  # a run that counts no steps


def test_an_error_that_is_raised_at_the_same_step_again_ends_the_run():
    def raised(error, process_id=1):
        note = f"{'-' * 20}\nFor simplicity, JAX has removed its internal frames from it\n"
        text = f"Traceback\n  in step\nValueError: {error}\n{note}"
        return failures.exit_of_process(process_id, "a", 7, 1, text, [], step=50)

    budget = RestartBudget(9, window_s=600.0)
    budget.record_failure(raised("nan"), 50, 0.0)
    assert "step 50" in budget.reason_to_end(raised("nan", process_id=0), 50, 9999.0)
    assert not budget.reason_to_end(raised("nan"), 51, 1.0)
    assert not budget.reason_to_end(raised("other"), 50, 1.0)
    assert not budget.reason_to_end(failures.exit_of_process(1, "a", 7, -9, None, []), 50, 1.0)


def test_a_run_whose_ranks_differ_is_not_restarted():
    for code, ends in (("JDP213", True), ("JDP214", False)):
        text = f"Traceback\nRuntimeError: `['w']` of rank 1 (jdp explain-error {code})\n"
        why = failures.exit_of_process(0, "a", 7, 1, text, [], step=50)
        assert bool(RestartBudget(9, window_s=600.0).reason_to_end(why, 50, 0.0)) == ends


def standby(name, parked=True, can_run=True, can_fork=False):
    killed = []
    return SimpleNamespace(
        name=name,
        parked=parked,
        can_fork=can_fork,
        is_fork=True,
        can_run=lambda: can_run,
        kill=lambda: killed.append(True),
        killed=killed,
    )


def standbys(number, start, say=print, can_fork=False):
    return Standbys(number, start, lambda: can_fork, ready=lambda: None, say=say)


# Those that are taken, one after the other.
def taken(*processes):
    waiting = iter(processes)
    each = standbys(len(processes), lambda *_: next(waiting))
    each.fill()
    if any(process.parked for process in processes):
        each.record_parked()
    return [process.name for process in iter(each.take_standby, None)]


def test_the_standbys_that_wait_are_taken_first_and_those_that_cannot_run_never():
    waits, starts, dies = standby("w"), standby("s", parked=False), standby("d", can_run=False)
    assert taken(dies, starts, waits) == ["w", "s"]
    assert taken(dies) == []
    assert taken(starts) == []  # perhaps it never waits


def test_the_last_standby_that_can_be_forked_stays_and_is_forked():
    forks, number = [], iter(range(9))

    def start(local_id, parent):
        forks.append(parent and parent.name)
        return standby(f"s{next(number)}", can_fork=True)

    each = standbys(2, start, can_fork=True)
    each.fill()
    assert forks == [None]  # the other one follows when it waits
    each.record_parked()
    assert forks == [None, "s0"]
    assert [each.take_standby().name for _ in range(4)] == ["s0", "s2", "s3", "s4"]
    assert forks[2:] == ["s1"] * 3 and each.num_parked == 1


def test_a_standby_whose_fork_fails_is_taken_itself():
    failed = standby("f", parked=False)
    failed.is_fork = False
    coming = iter([standby("s", can_fork=True), failed])
    each = standbys(1, lambda *_: next(coming), can_fork=True)
    each.fill()
    assert each.take_standby().name == "s" and failed in each


def test_a_standby_that_cannot_run_is_replaced_when_standbys_are_filled_up():
    stopped, waits, new = standby("s"), standby("w"), standby("n")
    coming = iter([stopped, waits, new])
    each = standbys(2, lambda *_: next(coming), pytest.fail)
    each.fill()
    stopped.can_run = lambda: False
    each.fill()
    assert stopped.killed and not waits.killed
    assert stopped in each  # until it was waited for
    assert new not in each  # which needs the place of that one
    each.record_exit(stopped)
    assert stopped not in each and new in each
    each.record_parked()
    assert [each.take_standby().name for _ in range(2)] == ["w", "n"]


# A death from outside says nothing of the next standby; an exit of its own does.
@pytest.mark.parametrize(("returncode", "comes"), [(-signal.SIGKILL, True), (1, False)])
def test_a_standby_that_was_killed_has_a_successor_after_the_next_recovery(returncode, comes):
    first, new, said = standby("f", parked=False), standby("n"), []
    first.popen = SimpleNamespace(pid=7, returncode=returncode)
    first.last_lines = lambda: ["its end"]
    coming = iter([first, new])
    each = standbys(1, lambda *_: next(coming), said.append)
    each.fill()
    each.record_exit(first)
    each.fill()
    assert (new in each) == comes
    [text] = said
    assert ("RANK" in text) == ("its end" in text) == (not comes)


def test_gpus_are_divided_evenly_or_not_at_all():
    assert gpus_of_slots(8, 2, {}) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert gpus_of_slots(0, 3, {}) == [None] * 3
    with pytest.raises(ValueError, match="3 .* 8 GPUs .* one of 1, 2, 4, 8;.* JAX_PLATFORMS=cpu"):
        gpus_of_slots(8, 3, {SHARE: "1"})


def test_processes_share_gpus_and_their_memory_where_nccl_is_told_so():
    with pytest.raises(ValueError, match=f"6 .* 2 GPUs .* one of 1, 2; .*{SHARE}=1.* 3 of them"):
        gpus_of_slots(2, 6, {})
    assert gpus_of_slots(2, 6, {SHARE: "1"}) == [[0], [0], [0], [1], [1], [1]]
    assert memory_of_shared(2, 6, {}) == {"XLA_CLIENT_MEM_FRACTION": "0.25"}
    assert memory_of_shared(2, 6, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}) == {}
    # JAX ignores an empty variable, and would take three quarters for each process.
    assert memory_of_shared(1, 2, {"XLA_CLIENT_MEM_FRACTION": ""}) == {
        "XLA_CLIENT_MEM_FRACTION": "0.375"
    }
    assert memory_of_shared(8, 2, {}) == memory_of_shared(0, 2, {}) == {}


def test_a_proof_is_of_one_part_one_token_and_one_connection():
    good = ("token", "host", "1", "2")
    proof = connection.token_proof(*good)
    assert connection.is_token_proof(proof, *good)
    assert "token" not in proof
    for i in range(4):
        assert not connection.is_token_proof(proof, *good[:i], "other", *good[i + 1 :])
    assert not connection.is_token_proof(None, *good)
    assert not connection.is_token_proof("\ud800", *good[:3], "\ud800")  # which JSON can hold


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
    assert why


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


def test_what_the_kernel_takes_in_parts_arrives_as_a_whole():
    texts = ["x" * (MAX_LINE_BYTES - 100), "the end"]

    async def talk():
        ours, theirs = socket.socketpair()
        got, all_came = [], asyncio.Event()

        def take(kind, facts):
            got.append(facts["text"])
            all_came.set() if len(got) == len(texts) else None

        channel, other = Channel(ours), Channel(theirs, take, got.append)
        for text in texts:
            channel.send("n", text=text)
        await asyncio.wait_for(all_came.wait(), 5.0)
        channel.close_connection()
        other.close_connection()
        return got

    assert asyncio.run(talk()) == texts


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ECONNRESET])
def test_a_connection_that_breaks_while_one_sends_is_lost_and_no_bug(number):
    class Broken(socket.socket):
        def send(self, *_):
            raise OSError(number, os.strerror(number))

    async def talk():
        ours, theirs = socket.socketpair()
        closed = asyncio.get_running_loop().create_future()
        channel = Channel(Broken(fileno=ours.detach()), closed=closed.set_result)
        with theirs:
            channel.send("n")
            return await asyncio.wait_for(closed, 5.0)

    assert asyncio.run(talk()) == os.strerror(number)


def test_the_cause_has_who_where_how_and_the_traceback():
    raised = "Traceback\nValueError: x\n"
    why = failures.exit_of_process(2, "h", 7, 1, raised, last_lines=["not shown"])
    first, *rest = why.full_text.splitlines()
    assert re.search(r"process 2 \(pid 7 on h\) .* 1 \(jdp explain-error JDP301\)$", first)
    assert rest == ["  Traceback", "  ValueError: x"]
    assert why.error_code == "JDP301"


@pytest.mark.parametrize(
    ("returncode", "code", "words"),
    [
        (-signal.SIGKILL, 137, "SIGKILL (signal 9)"),
        (-signal.SIGTERM, 143, "SIGTERM (signal 15)"),
        (-64, 192, "SIGRTMAX (signal 64)"),
        (-63, 191, "(signal 63)"),
        (1, 1, " code 1"),
        (124, 124, " code 124: "),
    ],
)
def test_ends_are_told_in_words_and_handed_on(returncode, code, words):
    assert exit_code(returncode) == code
    assert words in in_words(returncode)


@pytest.fixture
def launched(monkeypatch):
    for name in os.environ:
        if "RANK" in name or "MASTER" in name or "WORLD" in name:
            monkeypatch.delenv(name)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield LauncherClient(theirs, -1, 0, -1), ours


ASSIGNMENT = Assignment(3, 1, 2, 1, 2, "127.0.0.1:99", True, None, "a run")


def test_parking_twice_is_parking_once(launched, monkeypatch):
    monkeypatch.setattr("atexit.register", lambda call, *args: None)
    monkeypatch.setattr(os, "environ", {**os.environ})
    member, launcher = launched
    launcher.sendall(encode("go", ASSIGNMENT._asdict()))
    assert member.assignment is None
    assert member.park() == ASSIGNMENT == member.park() == member.assignment
    assert os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "3"
    kind, facts = decode(launcher.recv(9999))
    assert (kind, facts) == ("parked", {"pid": os.getpid(), "cannot_fork": None})


@pytest.mark.parametrize("is_told", [True, False])
def test_a_process_prepares_only_while_it_has_the_time(launched, monkeypatch, is_told):
    monkeypatch.setattr("atexit.register", lambda call, *args: None)
    monkeypatch.setattr(os, "environ", {**os.environ})
    member, launcher = launched
    done = []

    def tell():
        launcher.sendall(encode("go", ASSIGNMENT._asdict()))

    def prepare():
        done.append("prepared")
        tell()

    if is_told:
        tell()
    assert member.park(prepare) == ASSIGNMENT
    assert done == ([] if is_told else ["prepared"])


def test_a_parked_process_without_a_launcher_ends(launched):
    member, launcher = launched
    launcher.close()
    with pytest.raises(SystemExit, match=r"^jdp: "):
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
from jdp.worker.launcher_client import current
assert current().slot == 5 and current() is current()
assert {VARIABLE!r} not in os.environ and not os.get_inheritable({theirs.fileno()})
"""
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | invitation(**fds, slot=5),
            pass_fds=[theirs.fileno()],
            check=True,
            timeout=240,
        )


def test_a_process_with_another_jdp_than_its_launcher_says_so():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = subprocess.run(
            [sys.executable, "-c", "import jdp; jdp.init()"],
            env=os.environ | {VARIABLE: json.dumps({"socket": theirs.fileno(), "place": 3})},
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 1 and "python -m jdp run" in done.stderr


def test_what_a_process_starts_before_it_asks_is_no_member_either():
    code = "from jdp.worker.launcher_client import current; assert current() is None"
    variables = os.environ | invitation(socket=77, board=78, commit=79, slot=0)  # without them
    subprocess.run([sys.executable, "-c", code], env=variables, check=True, timeout=240)


@pytest.mark.parametrize(
    ("path", "why"),
    [("/dev/full", "No space left on device"), ("/dev/null/logs/events", "Not a directory")],
)
def test_a_record_that_cannot_be_written_ends_nothing(path, why):
    said = []
    events = Events(Path(path), said.append)
    for _ in range(3):
        events.write("formed", generation=0)
    events.close_file()
    assert len(said) == 1 and path in said[0] and why in said[0]


def test_a_record_that_cannot_be_opened_ends_nothing(tmp_path):
    (tmp_path / "logs").touch()
    said = []
    path = tmp_path / "logs" / "events.jsonl"
    events = Events(path, said.append)
    events.write("formed", generation=0)
    events.close_file()
    assert len(said) == 1 and str(path) in said[0]


def test_the_token_is_not_in_the_environment_of_processes():
    assert "JDP_TOKEN" not in spawn.environment({"JDP_TOKEN": "secret"})


@pytest.mark.parametrize(
    ("files", "count"),
    [
        (
            {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.events": "oom 3\noom_kill 2\n"},
            2,
        ),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/memory.events": "oom_kill 4\n"}, 4),
        (
            {
                "proc/self/cgroup": "9:cpu:/b\n4:memory:/b\n0::/\n",
                "sys/fs/cgroup/memory/memory.oom_control": "under_oom 0\noom_kill 1\n",
                "proc/vmstat": "oom_kill 9\n",
            },
            1,
        ),
        ({"proc/self/cgroup": "0::/\n", "proc/vmstat": "oom_kill 9\n"}, None),
        ({}, None),
    ],
)
def test_kills_of_the_kernel_for_want_of_memory_are_those_of_the_cgroup(tmp_path, files, count):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert num_oom_kills(tmp_path) == count


@pytest.mark.parametrize("python", ["python", "python3", "/usr/bin/python3.12"])
def test_python_before_the_program_is_left_out(python):
    with pytest.raises(ValueError, match=f"Remove '{python}', as in jdp run train.py"):
        require_program([python, "train.py"])


def test_the_command_refuses_it_before_a_process_is_started(capsys):
    assert main(["run", "--nproc-per-node", "2", "python", "train.py"]) == 2
    assert "'python'" in capsys.readouterr().err
    assert main(["run", ""]) == 2
    assert "empty" in capsys.readouterr().err


def test_a_program_that_is_not_there_is_refused_before_a_process_is_started(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--nproc-per-node", "2", "nope.py"]) == 2
    error = capsys.readouterr().err
    assert "'nope.py'" in error and str(tmp_path) in error and "-m package.train" in error


@pytest.mark.parametrize(
    ("given", "meant"),
    [("--nproc", "--nproc-per-node"), ("--max-restart=3", "--max-restarts"), ("--xyz", None)],
)
def test_a_flag_that_is_none_is_named_with_the_nearest_one(capsys, given, meant):
    assert main(["run", given, "2", "train.py"]) == 2
    error = capsys.readouterr().err
    assert f"the flag {given.partition('=')[0]} does not exist." in error
    assert (f"Did you mean {meant}?" in error) if meant else ("Did you mean" not in error)


def test_a_program_with_that_name_is_accepted():
    require_program(["python"])
    require_program(["python_train.py", "--lr", "1"])


@pytest.mark.parametrize("flag", ["--nproc-per-node", "--nproc_per_node", "--nnodes=2"])
def test_a_flag_of_the_launcher_behind_the_program_is_reported(flag):
    text = misplaced_flags(["train.py", "--lr", "1", flag, "2"])
    assert text is not None and text.startswith(flag.partition("=")[0].replace("_", "-"))


def test_flags_that_programs_have_themselves_are_theirs():
    assert misplaced_flags(["train.py", "--resume", "--seed", "2", "--timeout-s=3"]) is None
