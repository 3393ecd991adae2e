"""No orphans: what a launcher has started ends with it, whichever way it ends."""

import asyncio
import functools
import os
import pwd
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from support.threads import wait_until

from jdp.launch.host import spawn
from jdp.launch.host.reaper import MARK, Guardian
from jdp.launch.host.worker_process import HostResources, Process
from jdp.launch.options import parse
from jdp.tools import calibration

TIMEOUT_S = 10.0

# Two processes that a data loader could have started: one as usual, one in a session of its own.
FAMILY = "sleep 600 & echo $!; setsid sleep 600 & echo $!; wait"


def is_alive(pid):
    try:
        # What is dead may stay a zombie, if nobody waits for it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


until = functools.partial(wait_until, deadline_s=TIMEOUT_S)


def leave_none(pids):
    for pid in filter(is_alive, pids):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def guardian():
    guardian = Guardian()
    yield guardian
    guardian.kill_all()


# A launcher that starts a family and prints the pids of all that there is.
LAUNCHER = f"""
import os, sys, time
from jdp.launch.host import spawn
from jdp.launch.host.reaper import Guardian
pids, mark = [], {{}}
if "guardian" in sys.argv:
    guardian = Guardian()
    mark = guardian.environment
    pids.append(guardian._process.pid)
process = spawn.spawn(["sh", "-c", {FAMILY!r}], spawn.environment(**mark))
pids += [process.pid, int(process.stdout.readline()), int(process.stdout.readline())]
if "guardian" in sys.argv:
    guardian.add(process.pid)
print(*pids, flush=True)
time.sleep(600)
"""


def launcher(*arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *arguments], stdout=subprocess.PIPE, text=True
    )
    with process.stdout:
        pids = [int(pid) for pid in process.stdout.readline().split()]
    assert all(map(is_alive, pids))
    return process, pids


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_all_that_a_launcher_started_dies_with_it(end):
    process, pids = launcher("guardian")
    try:
        assert len(pids) == 4
        process.send_signal(end)
        process.wait(TIMEOUT_S)
        until(lambda: not any(map(is_alive, pids)))
    finally:
        leave_none([process.pid, *pids])


def test_a_process_dies_with_its_launcher_when_there_is_no_guardian():
    process, pids = launcher()
    try:
        process.kill()
        process.wait(TIMEOUT_S)
        until(lambda: not is_alive(pids[0]))
    finally:
        leave_none(pids)


def test_a_process_whose_launcher_died_while_it_started_dies():
    never = subprocess.run(
        [sys.executable, "-c", spawn._BEFORE, "1", "echo", "alive"], capture_output=True
    )
    assert (never.returncode, never.stdout) == (-signal.SIGKILL, b"")


def test_the_guardian_hears_no_signal_of_a_terminal_or_a_scheduler(guardian):
    pid = guardian._process.pid
    assert os.getsid(pid) == pid
    terminal = signal.SIGINT, signal.SIGHUP, signal.SIGQUIT
    for number in (*terminal, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        until(lambda number=number: ignores(pid, number))


def ignores(pid, number):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = int(next(line for line in lines if line.startswith("SigIgn")).split()[1], 16)
    return bool(mask >> (number - 1) & 1)


# Names in /dev/shm, as a data loader has them that does not fork, and a process that uses them.
SHARES = """
import multiprocessing, time
from multiprocessing import shared_memory
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    memory, lock = shared_memory.SharedMemory(create=True, size=8), context.Lock()
    child = context.Process(target=time.sleep, args=(600,))
    child.start()
    print(memory.name, lock._semlock.name.replace("/", "sem."), child.pid, flush=True)
    child.join()
"""


@pytest.mark.parametrize("how", ["process", "died", "guardian"])
def test_what_a_killed_process_shared_is_removed_from_shared_memory(tmp_path, how):
    (tmp_path / "shares.py").write_text(SHARES)
    guardian = Guardian()
    variables = spawn.environment(**guardian.environment)
    process = spawn.spawn([sys.executable, str(tmp_path / "shares.py")], variables)
    guardian.add(process.pid)
    try:
        *names, child = process.stdout.readline().decode().split()
        shared = [Path("/dev/shm", name) for name in names]
        assert len(shared) == 2 and all(path.exists() for path in shared)
        if how == "died":
            os.kill(process.pid, signal.SIGKILL)
            until(lambda: not is_alive(process.pid))
        if how != "guardian":
            spawn.kill(process)
            until(lambda: not any(path.exists() for path in shared))
        guardian.kill_all()
        assert not any(path.exists() for path in shared)
        assert not is_alive(process.pid) and not is_alive(int(child))
    finally:
        guardian.kill_all()
        process.wait()
    close_pipes(process)


def test_closing_a_guardian_kills_what_is_left_and_nothing_else():
    guardian = Guardian()
    mark = guardian.environment
    process = spawn.spawn(["sh", "-c", FAMILY], spawn.environment(**mark))
    unmarked = subprocess.Popen(["sleep", "600"])
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: "another launcher's"})
    try:
        pids = [process.pid, int(process.stdout.readline()), int(process.stdout.readline())]
        guardian.kill_all()
        until(lambda: not any(map(is_alive, pids)))
        assert is_alive(unmarked.pid) and is_alive(other.pid)
    finally:
        for each in (process, unmarked, other):
            each.kill()
            each.wait()
        close_pipes(process)


def test_a_group_is_killed_unless_it_was_removed():
    guardian = Guardian()
    # Without the mark, as what cleared its environment.
    ours, removed = (subprocess.Popen(["sleep", "600"], process_group=0) for _ in range(2))
    try:
        for each in (ours, removed):
            guardian.add(each.pid)
        guardian.remove(removed.pid)
        guardian.kill_all()
        assert ours.wait(TIMEOUT_S) == -signal.SIGKILL
        assert is_alive(removed.pid)
    finally:
        for each in (ours, removed):
            each.kill()
            each.wait()


def test_a_launcher_inside_another_keeps_the_mark_of_the_outer_one(monkeypatch, guardian):
    monkeypatch.setenv(MARK, guardian.environment[MARK])
    inner = Guardian()
    inner.kill_all()
    assert inner.environment[MARK].startswith(guardian.environment[MARK] + ",")


def close_pipes(process):
    process.stdout.close()
    process.stderr.close()


# What a program prints that was started by spawn.
def output(command, variables=None, **keywords):
    process = spawn.spawn(command, variables or spawn.environment(), **keywords)
    out, err = process.communicate(timeout=TIMEOUT_S)
    return out.decode().strip(), err.decode().strip(), process.returncode


def test_killing_a_process_kills_what_it_started():
    process = spawn.spawn(["sh", "-c", "sleep 600 & echo $!; wait"], spawn.environment())
    child = int(process.stdout.readline())
    spawn.kill(process)
    assert process.wait(TIMEOUT_S) == -signal.SIGKILL
    until(lambda: not is_alive(child))
    close_pipes(process)


def test_killing_a_process_that_has_ended_kills_what_it_left_behind():
    process = spawn.spawn(["sh", "-c", "sleep 600 & echo $!"], spawn.environment())
    child = int(process.stdout.readline())
    until(lambda: not is_alive(process.pid))  # a zombie, since nobody has waited
    spawn.kill(process)
    until(lambda: not is_alive(child))
    assert process.wait(TIMEOUT_S) == 0
    spawn.kill(process)  # its number is no longer ours: nothing happens
    close_pipes(process)


LEAVES_A_CHILD = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"


def test_what_a_process_started_dies_with_it_also_if_a_signal_comes_too_late(tmp_path):
    (tmp_path / "leaves.py").write_text(LEAVES_A_CHILD)
    resources = HostResources(parse([str(tmp_path / "leaves.py")], {}))

    async def child():
        died = asyncio.Event()
        process = Process(resources, 0, None, lambda *_: None, lambda _: died.set())
        os.waitid(os.P_PID, process.popen.pid, os.WEXITED | os.WNOWAIT)
        [pid] = map(int, process.last_lines())
        assert is_alive(pid)
        process.signal(signal.SIGTERM)
        await asyncio.wait_for(died.wait(), TIMEOUT_S)
        return pid

    try:
        pid = asyncio.run(child())
        until(lambda: not is_alive(pid))
    finally:
        resources.release()


def test_a_process_has_a_group_of_its_own():
    program = "import os; print(os.getpgid(0) == os.getpid(), os.getsid(0))"
    assert output([sys.executable, "-c", program])[0] == f"True {os.getsid(0)}"


def test_a_process_keeps_the_descriptors_that_it_is_given_and_no_others():
    ours, theirs = os.pipe()
    program = f"import os; os.write({theirs}, b'x'); os.fstat({ours})"
    _, err, code = output([sys.executable, "-c", program], pass_fds=[theirs])
    assert code == 1 and "Bad file descriptor" in err
    assert os.read(ours, 2) == b"x"
    os.close(ours)
    os.close(theirs)


def test_signals_that_the_launcher_blocks_reach_the_process():
    program = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        assert output([sys.executable, "-c", program])[0] == "set()"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_program_that_is_not_there_is_named():
    _, err, code = output(["no-such-program"])
    assert code == 1 and "no-such-program" in err and "No such file or directory" in err


def test_what_the_environment_says_comes_before_what_jdp_would_say():
    usual = spawn.environment({})
    own = dict.fromkeys(usual, "mine")
    assert spawn.environment(own) == own
    assert {"PYTHONUNBUFFERED", "JAX_COMPILATION_CACHE_DIR", "GLIBC_TUNABLES"} <= set(usual)
    assert "OMP_NUM_THREADS" not in usual


def test_a_user_without_a_home_has_a_folder_of_programs(tmp_path, monkeypatch):
    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = Path(spawn.environment({})["JAX_COMPILATION_CACHE_DIR"])
    assert found.is_relative_to(tmp_path)
    assert calibration.default_path("cpu").is_relative_to(tmp_path)


def test_huge_pages_are_for_hosts_without_gpus():
    assert "GLIBC_TUNABLES" not in spawn.environment({}, num_gpus=1)


@pytest.mark.parametrize(("phase", "is_kept"), [("compiling", False), ("running a step", True)])
def test_what_a_killed_process_may_have_written_half_is_compiled_again(
    tmp_path, jdp_run, phase, is_kept
):
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("jit_f-1-cache", "jit_g-2-cache", "mine.txt"):
        (folder / name).touch()
    long_ago = time.time() - 60
    os.utime(folder / "jit_f-1-cache", (long_ago, long_ago))
    run = jdp_run(
        after=f"""
from jdp.worker import progress, watching
if a.generation == 0:
    watching.begin_watching(60.0)
    with progress.phase({phase!r}):
        for name in "jit_g-2-cache", "mine.txt": Path({str(folder)!r}, name).touch()
        os.kill(os.getpid(), signal.SIGKILL)
""",
        JAX_COMPILATION_CACHE_DIR=str(folder),
    )
    assert run.finish(1, 1) == 0
    assert (folder / "jit_g-2-cache").exists() is is_kept
    assert (folder / "jit_f-1-cache").exists() and (folder / "mine.txt").exists()
