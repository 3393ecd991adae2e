"""Processes that stop getting on: alone, two without a launcher, two with one."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.launcher import free_port
from support.processes import environment

from jdp.worker.hang_detector import HangDetector
from jdp.worker.launcher_client import Assignment, invitation
from jdp.worker.messages import decode, encode
from jdp.worker.process_status import BETWEEN, DATA
from jdp.worker.progress_board import Board

STALLING = str(Path(__file__).parents[1] / "support" / "stalling.py")
DEADLINE_S = 40.0

slow = pytest.mark.slow


class Run:
    """Children that train by stalling.py, and what they wrote."""

    def __init__(self, kind, num_processes, timeout_s, fds=(), variables=({}, {}, {})):
        port = free_port()
        self.children = [
            subprocess.Popen(
                [sys.executable, STALLING, kind, str(timeout_s)],
                env=child_environment(process, num_processes, port) | variables[process],
                pass_fds=fds,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for process in range(num_processes)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for child in self.children:
            child.kill()
            child.communicate()

    def wait(self, process=0, words=None):
        """Exit code and last words of a process that ends by itself."""
        child = self.children[process]
        _, text = child.communicate(words, timeout=DEADLINE_S)
        return child.returncode, text


def child_environment(process, num_processes, port):
    variables = environment() | {"JAX_NUM_CPU_DEVICES": "2"}
    variables.pop("PYTEST_CURRENT_TEST", None)
    if num_processes > 1:
        variables |= {
            "RANK": str(process),
            "LOCAL_RANK": str(process),
            "WORLD_SIZE": str(num_processes),
            "LOCAL_WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    return variables


@pytest.mark.parametrize(
    ("kind", "phase", "stack"),
    [
        ("loader", f"{DATA} for .*, 4 steps ", "sleep_in_the_loader"),
        ("callback", f"{BETWEEN} for .*, 4 steps .*devices", "sleep_in_a_step"),
    ],
)
def test_one_process_that_hangs_in_what_is_jdps_is_told_and_ended(kind, phase, stack):
    with Run(kind, 1, 1.5) as run:
        code, text = run.wait()
    assert code == 124
    assert len(re.findall(rf"process 0 \(pid \d+\): {phase}", text)) == 2
    assert re.search(r"^jdp: .* 1\.5 s.*\.$", text, re.MULTILINE)
    assert f"in {stack}" in text


def test_one_process_may_take_its_time_in_code_and_phases_of_its_own():
    with Run("long", 1, 1.0) as run:
        assert run.wait() == (0, "")


def test_one_process_that_holds_pythons_lock_is_told_and_goes_on():
    with Run("short lock", 1, 1.0) as run:
        code, text = run.wait()
    assert code == 0
    assert "Timeout (0:00:01" in text
    assert "in hold_the_lock_for_a_while" in text


def test_at_a_prompt_a_process_is_told_and_never_ended():
    with Run("prompt", 1, 1.0) as run:
        child = run.children[0]
        for line in child.stderr:
            if line.startswith("jdp: ") and " 2." in line:
                break
        assert child.poll() is None
        assert "ends" not in line


def test_a_debugger_is_left_alone():
    with Run("debugger", 1, 1.0) as run:
        with pytest.raises(subprocess.TimeoutExpired):
            run.children[0].wait(4)
        assert run.wait(words="c\n") == (0, "")


# The odd one is the last process. Its own words and, of those that wait for it, the first one's.
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    ("kind", "odd", "stack"),
    [
        ("loader", f"{DATA} for .*, 4 steps ", "sleep_in_the_loader"),
        ("stop", None, None),
        pytest.param("loop", f"{BETWEEN} for .*, 4 steps ", "sleep_in_the_loop", marks=slow),
        pytest.param("lock", None, None, marks=slow),
    ],
)
def test_each_of_two_processes_tells_where_it_is_and_the_run_ends(kind, odd, stack):
    with Run(kind, 2, 2.0) as run:
        code, text = run.wait(0)
        assert re.search(r"jdp: .*\n  process 0 .*, 5 steps ", text)
        assert re.search(r"all-reduce \d", text)
        if odd is None:  # it can't say anything
            assert code == 124
            return
        other_code, other_text = run.wait(1)
        assert re.search(rf"process 1 \(pid \d+\): {odd}", other_text)
        assert f"in {stack}" in other_text
        assert 124 in (code, other_code)  # who ends first ends the other


class Launcher:
    """As much of a launcher as processes need, in this process."""

    def __init__(self, num_processes):
        self.board = Board.create(num_processes + 1)  # the first slot is another's
        self.commit = os.memfd_create("commit")
        self.pairs = [socket.socketpair() for _ in range(num_processes)]
        self.coordinator = f"127.0.0.1:{free_port()}"
        self.told = []

    @property
    def fds(self):
        return [self.board.fd, self.commit, *(theirs.fileno() for _, theirs in self.pairs)]

    def variables(self):
        return [
            invitation(socket=theirs.fileno(), board=self.board.fd, slot=i + 1, commit=self.commit)
            for i, (_, theirs) in enumerate(self.pairs)
        ]

    def go(self):
        num = len(self.pairs)
        for i, (ours, theirs) in enumerate(self.pairs):
            theirs.close()
            assignment = Assignment(5, i, num, i, num, self.coordinator, True, None, "a run")
            ours.sendall(encode("go", assignment._asdict()))

    def slots(self):
        return {i: self.board.slot(i + 1).read() for i in range(len(self.pairs))}

    def watched(self, timeout_s):
        """What a watch said, until it found that the run is over."""
        watch, said, deadline = HangDetector(timeout_s), [], time.monotonic() + DEADLINE_S
        while not (said and said[-1].is_over):
            assert time.monotonic() < deadline, self.slots()
            time.sleep(0.1)
            stall = watch.poll(time.monotonic(), self.slots())
            said += [stall] if stall else []
        return said

    def close(self):
        for ours, _ in self.pairs:
            ours.close()
        os.close(self.commit)


@pytest.fixture
def launcher():
    launcher = Launcher(2)
    yield launcher
    launcher.close()


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    ("kind", "odd", "stack"),
    [
        ("loop", BETWEEN, "sleep_in_the_loop"),
        ("lock", BETWEEN, "hold_the_lock"),
        pytest.param("loader", DATA, "sleep_in_the_loader", marks=slow),
        pytest.param("stop", f"stopped, {BETWEEN}", None, marks=slow),
    ],
)
def test_a_launcher_sees_which_process_holds_up_the_others(kind, odd, stack, launcher):
    with Run(kind, 2, 600.0, launcher.fds, launcher.variables()) as run:
        launcher.go()
        said = launcher.watched(2.0)
        assert [stall.processes for stall in said] == [[1], [1]]
        first, second = said[-1].report.splitlines()[1:3]
        pids = [child.pid for child in run.children]
        assert first.startswith(f"  process 1 (pid {pids[1]}), 1 step behind: {odd} for ")
        assert second.startswith(f"  process 0 (pid {pids[0]}): ")
        assert re.search(r" 5 steps .* all-reduce \d", second)
        assert [it.generation for it in launcher.slots().values()] == [5, 5]
        if stack is not None:
            run.children[1].send_signal(signal.SIGQUIT)
            assert f"in {stack}" in lines_until(run.children[1].stderr, "in <module>")


def lines_until(file, end):
    lines = []
    for line in file:
        lines.append(line)
        if end in line:
            break
    return "".join(lines)


@pytest.mark.xdist_group("processes")
def test_a_process_that_makes_a_step_less_is_named_and_the_first_step_is_told(launcher):
    with Run("skip", 2, 600.0, launcher.fds, launcher.variables()) as run:
        launcher.go()
        said = launcher.watched(2.0)
        assert [stall.processes for stall in said] == [[1], [1]]
        assert "1 step behind" in said[-1].report
        for ours, _ in launcher.pairs:
            told = dict(map(decode, ours.recv(1 << 16).splitlines()))
            assert 0 < told["first_step"]["compile_s"] < told["first_step"]["s"] < DEADLINE_S
        assert run.children[0].poll() is None
