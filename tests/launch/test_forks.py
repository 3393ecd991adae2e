"""Processes that are forks of one that has run the script up to `jdp.init()`."""

import os
import random
import re
import signal
import subprocess
import sys

import pytest
from support.launcher import PACKAGES, SCRIPT
from support.threads import wait_until

# Written by each process that runs the script from its beginning.
COUNTS = "open(folder / 'starts', 'a').write(f'{os.getpid()}\\n')"
ITSELF = "each process imports its modules itself, because"


def starts(run):
    return len((run.folder / "starts").read_text().split())


@pytest.mark.parametrize("size", [1, 3])
def test_a_run_and_its_recoveries_run_the_beginning_of_the_script_once(jdp_run, size):
    run = jdp_run(f"--nproc-per-node={size}", before=COUNTS)
    for generation in range(3):
        pids = run.pids(generation, size)
        run.standbys(generation, size)
        os.kill(pids[-1], signal.SIGKILL)
    assert run.finish(3, size) == 0
    assert starts(run) == 1
    assert ITSELF not in run.output


def test_standbys_take_over_before_the_first_step_is_done(jdp_run):
    slow = "time.sleep(99 * (a.generation == 0))"
    run = jdp_run("--nproc-per-node=2", before=COUNTS, init=slow)
    run.until_true(lambda: len(run.alive()) == 4, "processes and standbys")
    first = run.until("joined", 2)
    os.kill(first[1]["pid"], signal.SIGKILL)
    assert run.finish(1, 2) == 0
    assert starts(run) == 1


def test_without_standbys_a_recovery_runs_the_beginning_once(jdp_run):
    run = jdp_run("--nproc-per-node=3", "--standbys=0", before=COUNTS)
    os.kill(run.pids(0, 3)[1], signal.SIGKILL)
    assert run.finish(1, 3) == 0
    assert starts(run) == 2


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("file = open(__file__)", r"train\.py is open before"),
        ("import threading; threading.Thread(target=time.sleep, args=(9,), "
         "name='loader', daemon=True).start()", "thread 'loader' runs before"),
        ("import tempfile; folder_ = tempfile.TemporaryDirectory()", "temporary folder exists"),
        ("rank = os.environ['RANK']", r"train\.py:\d+ names RANK, which"),
        ("import subprocess; child = subprocess.Popen(['sleep', '99'])", r"child process \d+ runs"),
        ("import multiprocessing as mp; lock = mp.Lock()", "a lock of multiprocessing exists"),
        ("import mmap; memory = mmap.mmap(-1, 9)", "shared memory or"),
        ("import mmap; file = open(__file__); memory = mmap.mmap(file.fileno(), 0, prot=1)",
         r"train\.py is open before"),
        ("signal.signal(signal.SIGALRM, signal.SIG_IGN); signal.alarm(99)", "a timer runs"),
        ("import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)", "adopts orphans"),
        ("file = open(folder / 'log', 'w'); os.dup2(file.fileno(), 1); file.close()",
         "its output goes to .*log"),
    ],
    ids=[
        "file", "thread", "folder", "rank", "child", "lock", "memory", "mapped file", "timer",
        "subreaper", "output",
    ],
)  # fmt: skip
def test_what_a_fork_would_break_is_named_once_and_not_forked(jdp_run, before, why):
    script = SCRIPT.replace("exec(sys.argv[1])", f"{COUNTS}\n{before}")
    run = jdp_run("--nproc-per-node=3", "--standbys=0", script=script)
    os.kill(run.pids(0, 3)[2], signal.SIGKILL)
    assert run.finish(1, 3) == 0
    assert starts(run) == 6
    [line] = [line for line in run.output.splitlines() if ITSELF in line]
    assert re.search(why, line)


@pytest.mark.parametrize(
    "call", ["main(os.environ['RANK'])", "main(\n    os.environ['RANK'],\n)"], ids=["one", "three"]
)
def test_a_name_in_the_statement_that_calls_init_is_read_before_it(jdp_run, call):
    head, _, rest = SCRIPT.partition("a = launcher.park()")
    parks = "def main(rank):\n    a = launcher.park()\n    assert rank == str(a.process_id)"
    run = jdp_run(
        "--nproc-per-node=2", script=f"{head}{parks}\n    return a\n\n\na = {call}\n{rest}"
    )
    assert run.finish(0, 2) == 0
    assert "names RANK" in run.output


def test_modules_in_other_folders_and_with_names_like_the_script_are_searched(jdp_run, tmp_path):
    for folder, name in (tmp_path / "elsewhere", "package"), (tmp_path, "n"):
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text("\n" * 99 + "import os\nRANK = os.environ['RANK']\n")
        run = jdp_run(
            "--nproc-per-node=2",
            script=SCRIPT.replace("exec(sys.argv[1])", f"import {name}"),
            init=f"assert {name}.RANK == str(a.process_id)",
            PYTHONPATH=f"{PACKAGES}:{folder}",
        )
        assert run.finish(0, 2) == 0
        assert f"{name}.py:101 names RANK" in run.output
        (tmp_path / "done").unlink()


def test_an_installed_module_that_reads_a_rank_is_found_and_a_copy_is_no_read(jdp_run, tmp_path):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "tracker.py").write_text("import os\nmain = os.getenv('RANK', '0') == '0'\n")
    copies = "{**os.environ}, os.environ.copy(), list(os.environ.items())"
    for imports, reason in ("import tracker", "tracker.py:2 names RANK"), (copies, None):
        script = SCRIPT.replace("exec(sys.argv[1])", f"import jdp\n{imports}")
        run = jdp_run(
            "--nproc-per-node=2", script=script, PYTHONPATH=f"{PACKAGES}:{folder}",
            init=f"assert {not reason} or tracker.main == (a.process_id == 0)",
        )  # fmt: skip
        assert run.finish(0, 2) == 0
        assert (ITSELF in run.output) == bool(reason)
        assert (reason or "") in run.output
        (tmp_path / "done").unlink()


def test_a_name_that_stands_behind_init_is_not_read_before_it(jdp_run):
    script = SCRIPT.replace("exec(sys.argv[2])", "assert os.environ['RANK'] == str(a.process_id)")
    run = jdp_run("--nproc-per-node=2", script=script)
    assert run.finish(0, 2) == 0
    assert ITSELF not in run.output


def test_a_log_file_and_a_name_without_quotes_are_no_reasons(jdp_run):
    logs = "import logging; logging.basicConfig(filename=folder / 'log'); RANK = 8"
    writes = "logging.warning('process %d', a.process_id)"
    script = SCRIPT.replace("exec(sys.argv[1])", logs)
    run = jdp_run("--nproc-per-node=3", "--standbys=0", script=script, init=writes)
    assert run.finish(0, 3) == 0
    assert ITSELF not in run.output
    lines = (run.folder / "log").read_text().splitlines()
    assert sorted(lines) == [f"WARNING:root:process {i}" for i in range(3)]


def silent_for(seconds):
    """A script whose first process is asked for forks, and does not answer."""
    silent = f"launcher.tell('parked', pid=os.getpid(), cannot_fork=None); time.sleep({seconds})"
    return SCRIPT.replace("a = launcher.park()", f"{silent}\na = launcher.park()")


MAPS = "\nimport mmap\nwith open(__file__) as f: memory = mmap.mmap(f.fileno(), 0, prot=1)"
WAITS = """
def reap(*_):
    try: os.waitpid(-1, os.WNOHANG)
    except ChildProcessError: pass
signal.signal(signal.SIGCHLD, reap)
"""


@pytest.mark.parametrize(
    ("size", "flags", "before", "options", "num_starts"),
    [
        (2, [], MAPS, {"init": "assert memory[:1]"}, 1),
        (3, [], WAITS, {}, 1),
        (3, ["--standbys=0", "--start-method=spawn"], "", {}, 3),
        (2, ["--standbys=0"], "", {"script": silent_for(3)}, 2),
    ],
    ids=["mapped memory", "a handler that waits for all children", "spawn", "no answer"],
)
def test_how_often_the_beginning_runs(jdp_run, size, flags, before, options, num_starts):
    run = jdp_run(f"--nproc-per-node={size}", *flags, before=COUNTS + before, **options)
    assert run.finish(0, size) == 0
    assert starts(run) == num_starts


def test_a_first_process_that_is_late_is_not_waited_for(jdp_run):
    late = f"{COUNTS}\ntime.sleep(3 * (len(open(folder / 'starts').read().split()) == 1))"
    soon = "from jdp.launch.host import agent; agent._FIRST_S = 0.5"
    run = jdp_run("--nproc-per-node=2", "--standbys=0", before=late, changes=soon)
    assert run.finish(0, 2) == 0
    assert starts(run) == 2
    assert "process 0 did not call jdp.init() within 0.5 s" in run.output


def test_a_script_that_never_calls_init_runs_in_each_process(jdp_run):
    script = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    run = jdp_run("--nproc-per-node=3", script=script)
    assert run.wait() == 0
    assert all(f"rank {i} of 3" in run.output for i in range(3))
    assert "never called jdp.init()" in run.output


def test_a_late_answer_is_not_taken_for_another_and_its_fork_ends_without_the_script(jdp_run):
    script = silent_for(1.5)
    ends = "import atexit; atexit.register(lambda: (folder / f'end {os.getpid()}').touch())"
    run = jdp_run("--nproc-per-node=4", "--standbys=0", before=f"{COUNTS}\n{ends}", script=script)
    assert run.finish(0, 4) == 0
    assert starts(run) == len([*run.folder.glob("end *")]) == 4


def test_children_of_a_fork_do_not_inherit_its_connection(jdp_run):
    count = "for _ in range(99): os.open('/dev/null', 0)  # no number is free"
    check = "assert not [f for f in range(3, 99) if os.get_inheritable(f)], 'inherited'"
    run = jdp_run("--nproc-per-node=2", init=f"{count}\n{check}")
    assert run.finish(0, 2) == 0


def test_a_busy_log_thread_loses_no_line_of_a_fork(jdp_run):
    busy = """
import time
from jdp.launch.host.output import OutputMux
add = OutputMux._add
OutputMux._add = lambda self, output: (time.sleep(0.3), add(self, output))
"""
    hello = "print(f'hello {a.process_id} of {a.generation}', flush=True)"
    run = jdp_run("--nproc-per-node=3", "--standbys=1", changes=busy, init=hello)
    os.kill(run.pids(0, 3)[0], signal.SIGKILL)
    assert run.finish(1, 3) == 0
    assert all(f"[process {i}] hello {i} of 1" in run.output for i in range(3))


def test_the_generators_of_a_fork_continue_as_the_script_has_seeded_them(jdp_run):
    seeds = "import random, numpy as np; random.seed(7); np.random.seed(8)"
    draws = "print('drawn', random.random(), np.random.random())"
    run = jdp_run("--nproc-per-node=3", before=seeds, init=draws)
    assert run.finish(0, 3) == 0
    code = f"{seeds}\n{draws}"
    alone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.output.count(alone.stdout.strip()) == 3
    assert str(random.Random(7).random()) in alone.stdout


def test_output_before_init_is_shown_once(jdp_run):
    script = SCRIPT.replace(
        "exec(sys.argv[1])", "sys.stdout.write('rest of a line '); print('now')"
    )
    run = jdp_run("--nproc-per-node=3", script=script, PYTHONUNBUFFERED="")
    assert run.finish(0, 3) == 0
    assert run.output.count("rest of a line now") == 1


def test_a_signal_in_a_fork_is_the_exit_code(jdp_run):
    ends = "if a.process_id == 2: os.kill(os.getpid(), signal.SIGSEGV)"
    run = jdp_run("--nproc-per-node=3", "--max-restarts=0", "--standbys=1", after=ends)
    assert run.wait() == 128 + signal.SIGSEGV and "process 2 (pid" in run.output


def test_forks_end_with_a_killed_launcher(jdp_run):
    run = jdp_run("--nproc-per-node=3")
    run.pids(0, 3)
    run.standbys(0, 3)
    run.process.kill()
    run.process.wait()
    wait_until(lambda: not run.alive(), 20)
