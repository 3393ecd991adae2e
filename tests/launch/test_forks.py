"""Processes that are forks of one that has run the script up to `jdp.init()`."""

import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
from support.launcher import SCRIPT

# Written by each process that runs the script from its beginning.
COUNTS = "open(folder / 'starts', 'a').write(f'{os.getpid()}\\n')"
ITSELF = "each process imports its modules itself, since"


def starts(run):
    return len((run.folder / "starts").read_text().split())


@pytest.mark.parametrize("size", [1, 3])
def test_a_run_and_its_recoveries_run_the_beginning_of_the_script_once(jdp_run, size):
    run = jdp_run(f"--nproc-per-node={size}", before=COUNTS)
    for generation in range(3):
        pids = run.pids(generation, size)
        run.standbys(generation, size)
        os.kill(pids[-1], signal.SIGKILL)
    run.pids(3, size)
    assert run.finish() == 0
    assert starts(run) == 1
    assert ITSELF not in run.output


def test_standbys_take_over_before_the_first_step_is_done(jdp_run):
    slow = "time.sleep(99 * (a.generation == 0))"
    run = jdp_run("--nproc-per-node=2", before=COUNTS, init=slow)
    run.until_true(lambda: len(run.alive()) == 4, "processes and standbys")
    first = run.until("joined", 2)
    os.kill(first[1]["pid"], signal.SIGKILL)
    run.pids(1, 2)
    assert run.finish() == 0
    assert starts(run) == 1


def test_without_standbys_a_recovery_runs_the_beginning_once(jdp_run):
    run = jdp_run("--nproc-per-node=3", "--standbys=0", before=COUNTS)
    os.kill(run.pids(0, 3)[1], signal.SIGKILL)
    run.pids(1, 3)
    assert run.finish() == 0
    assert starts(run) == 2


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("file = open(__file__)", r"train\.py is open before"),
        ("import threading; threading.Thread(target=time.sleep, args=(9,), "
         "name='loader', daemon=True).start()", "thread 'loader' runs before"),
        ("import tempfile; folder_ = tempfile.TemporaryDirectory()", "temporary folder exists"),
        ("rank = os.environ['RANK']", r"train\.py:\d+ reads RANK before"),
    ],
    ids=["file", "thread", "folder", "rank"],
)  # fmt: skip
def test_what_a_fork_would_break_is_named_once_and_not_forked(jdp_run, before, why):
    script = SCRIPT.replace("exec(sys.argv[1])", f"{COUNTS}\n{before}")
    run = jdp_run("--nproc-per-node=3", "--standbys=0", script=script)
    os.kill(run.pids(0, 3)[2], signal.SIGKILL)
    run.pids(1, 3)
    assert run.finish() == 0
    assert starts(run) == 6
    [line] = [line for line in run.output.splitlines() if ITSELF in line]
    assert re.search(why, line)


def test_a_name_that_stands_behind_init_is_not_read_before_it(jdp_run):
    script = SCRIPT.replace("exec(sys.argv[2])", "assert os.environ['RANK'] == str(a.process_id)")
    run = jdp_run("--nproc-per-node=2", script=script)
    run.pids(0, 2)
    assert run.finish() == 0
    assert ITSELF not in run.output


def test_mapped_memory_is_shared(jdp_run):
    maps = "import mmap\nwith open(__file__) as f: memory = mmap.mmap(f.fileno(), 0, prot=1)"
    run = jdp_run("--nproc-per-node=2", before=f"{COUNTS}\n{maps}", init="assert memory[:1]")
    run.pids(0, 2)
    assert run.finish() == 0
    assert starts(run) == 1


def test_spawn_runs_all_of_the_script_in_each_process(jdp_run):
    flags = "--nproc-per-node=3", "--standbys=0", "--start-method=spawn"
    run = jdp_run(*flags, before=COUNTS)
    run.pids(0, 3)
    assert run.finish() == 0
    assert starts(run) == 3


def test_a_script_that_never_calls_init_runs_in_each_process(jdp_run):
    script = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    run = jdp_run("--nproc-per-node=3", script=script)
    assert run.wait() == 0
    assert all(f"rank {i} of 3" in run.output for i in range(3))
    assert "never called jdp.init()" in run.output


def test_a_process_that_does_not_answer_a_request_is_not_waited_for(jdp_run):
    silent = "launcher.tell('parked', pid=os.getpid(), cannot_fork=None); time.sleep(3)"
    script = SCRIPT.replace("a = launcher.park()", f"{silent}\na = launcher.park()")
    run = jdp_run("--nproc-per-node=2", "--standbys=0", before=COUNTS, script=script)
    run.pids(0, 2)
    assert run.finish() == 0
    assert starts(run) == 2


def test_the_generators_of_a_fork_continue_as_the_script_has_seeded_them(jdp_run):
    seeds = "import random, numpy as np; random.seed(7); np.random.seed(8)"
    draws = "print('drawn', random.random(), np.random.random())"
    run = jdp_run("--nproc-per-node=3", before=seeds, init=draws)
    run.pids(0, 3)
    assert run.finish() == 0
    code = f"{seeds}\n{draws}"
    alone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.output.count(alone.stdout.strip()) == 3
    assert str(random.Random(7).random()) in alone.stdout


def test_output_before_init_is_shown_once(jdp_run):
    script = SCRIPT.replace(
        "exec(sys.argv[1])", "sys.stdout.write('rest of a line '); print('now')"
    )
    run = jdp_run("--nproc-per-node=3", script=script, PYTHONUNBUFFERED="")
    run.pids(0, 3)
    assert run.finish() == 0
    assert run.output.count("rest of a line now") == 1


def test_the_script_may_end_by_signals_and_codes_in_forks(jdp_run):
    ends = "if a.process_id == 2: os.kill(os.getpid(), signal.SIGSEGV)"
    run = jdp_run("--nproc-per-node=3", "--max-restarts=0", "--standbys=1", after=ends)
    assert run.wait() == 128 + signal.SIGSEGV
    assert "process 2 (pid" in run.output and "SIGSEGV" in run.output


def test_forks_end_with_a_killed_launcher(jdp_run):
    run = jdp_run("--nproc-per-node=3")
    run.pids(0, 3)
    run.standbys(0, 3)
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + 20
    while run.alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not run.alive()
