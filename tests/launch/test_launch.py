"""One host: processes that fail are replaced, and the launcher says how the run ended."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest
from support.launcher import SCRIPT, free_port
from support.namespaces import two_hosts, why_no_namespaces

from jdp.launch.leader import failure
from jdp.worker.process_status import BEFORE


@pytest.mark.parametrize("size", [1, 3])
def test_processes_are_told_who_they_are(jdp_run, size):
    run = jdp_run(
        f"--nproc-per-node={size}",
        "--rdzv-id=a run",
        after="print(a, os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['MASTER_PORT'])",
    )
    assert run.finish(0, size) == 0
    for rank in range(size):
        assert f"process_id={rank}, num_processes={size}, local_id={rank}" in run.output
        port = run.output.partition("coordinator='127.0.0.1:")[2].partition("'")[0]
        assert f"run_id='a run', host_id=0) {rank} {size} {port}" in run.output


def test_a_script_that_never_asks_finds_the_environment_of_torchrun(jdp_run):
    script = "import os; print({k: os.environ[k] for k in sorted(os.environ) if 'RANK' in k})"
    run = jdp_run("--nproc-per-node=2", script=script)
    assert run.wait() == 0
    for rank in (0, 1):
        assert f"{{'GROUP_RANK': '0', 'LOCAL_RANK': '{rank}', 'RANK': '{rank}'}}" in run.output
    assert "jdp.init()" in run.output


def test_a_launcher_with_closed_streams_runs_and_recovers(jdp_run):
    run = jdp_run("--nproc-per-node=2", within=("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"))
    os.kill(run.pids(0, 2)[1], signal.SIGKILL)
    assert run.finish(1, 2) == 0


BEGINS = """
from jdp.worker import progress, watching
watching.begin_watching(600.0, a.process_id, a.num_processes)
"""
# What Python does before it has ended.
FORGETS = "import faulthandler; faulthandler.unregister(signal.SIGQUIT)"


@pytest.mark.parametrize("after", ["", BEGINS, BEGINS + FORGETS])
def test_ctrl_backslash_ends_nothing(jdp_run, after):
    run = jdp_run("--nproc-per-node=2", after=after)
    run.until("running", 2)
    os.kill(run.process.pid, signal.SIGQUIT)
    if after == BEGINS:
        run.until_true(lambda: run.output.count("most recent call first") >= 2, "stacks")
    assert run.finish() == 0
    assert [e["returncode"] for e in run.events("exited")] == [0, 0]
    assert "jdp.init()" not in run.output


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (3, 1)])
def test_a_killed_process_is_replaced_by_a_standby(jdp_run, size, rank):
    run = jdp_run(f"--nproc-per-node={size}")
    pids = run.pids(0, size)
    standbys = run.standbys(0, size)
    os.kill(pids[rank], signal.SIGKILL)
    new = run.pids(1, size)
    # One stays in reserve, and is forked.
    assert len({*new} & {*standbys}) == size - 1 and not {*new} & {*pids}
    assert not set(pids) & set(run.alive())
    assert len({*run.standbys(1, size)} & {*standbys}) == 1
    assert run.finish() == 0
    assert f"process {rank} (pid {pids[rank]}" in run.output
    assert "SIGKILL" in run.output
    [recovered] = run.events("recovered")
    assert recovered["restored_step"] == 10


# A second model, trained after one of 60 steps.
SECOND = f"""{BEGINS}
step, base = (5, 65) if a.generation else (0, 60)
launcher.tell("restored", step=step, base=base, tier="commit", s=0.0)
for _ in range(7 * (1 - a.generation)):
    with progress.TRAIN_STEP: pass
"""


def test_steps_that_are_lost_are_those_of_the_model_that_trains(jdp_run):
    run = jdp_run("--nproc-per-node=2", init=SECOND)
    pids = run.pids(0, 2)
    run.until("first_step", 4)  # the script tells it, too
    os.kill(pids[1], signal.SIGKILL)
    assert run.finish(1, 2) == 0
    [recovered] = run.events("recovered")
    assert (recovered["restored_step"], recovered["lost_steps"]) == (5, 2)


def test_a_recovery_whose_program_is_in_no_cache_says_why(jdp_run):
    script = SCRIPT.replace("compile_s=0.0", "compile_s=9.3, is_uncached=True")
    run = jdp_run("--nproc-per-node=2", script=script)
    os.kill(run.pids(0, 2)[1], signal.SIGKILL)
    assert run.finish(1, 2) == 0
    assert re.search(r"\(compiled 9\.300, not cached: .*order of collectives", run.output)


def test_each_recovery_has_standbys_again(jdp_run):
    run = jdp_run("--nproc-per-node=2")
    for generation in range(3):
        pids = run.pids(generation, 2)
        run.standbys(generation, 2)
        os.kill(pids[generation % 2], signal.SIGKILL)
    assert run.finish(3, 2) == 0


def test_processes_that_die_together_are_one_failure(jdp_run):
    run = jdp_run("--nproc-per-node=3", "--max-restarts=1")
    pids = run.pids(0, 3)
    run.standbys(0, 3)
    run.process.send_signal(signal.SIGSTOP)  # or the launcher would be faster
    os.kill(pids[0], signal.SIGKILL)
    os.kill(pids[2], signal.SIGKILL)
    run.process.send_signal(signal.SIGCONT)
    assert run.finish(1, 3) == 0


def test_a_stopped_standby_is_not_chosen(jdp_run):
    run = jdp_run("--nproc-per-node=2")
    pids = run.pids(0, 2)
    stopped, other = run.standbys(0, 2)
    os.kill(stopped, signal.SIGSTOP)
    os.kill(pids[0], signal.SIGKILL)
    replaced = run.pids(1, 2)
    assert not {*replaced} & {stopped, other}
    left = run.standbys(1, 2)
    assert other in left and stopped not in left
    assert run.finish() == 0


def test_without_standbys_processes_are_started_anew(jdp_run):
    run = jdp_run("--nproc-per-node=2")
    pids = run.pids(0, 2)
    standbys = run.standbys(0, 2)
    for pid in standbys:
        os.kill(pid, signal.SIGKILL)
    run.until_true(lambda: run.output.count("a standby (pid") >= 1, "word of a lost standby")
    os.kill(pids[1], signal.SIGKILL)
    new = run.pids(1, 2)
    assert not set(new) & {*pids, *standbys}
    assert run.standbys(1, 2)
    assert run.finish() == 0


def test_a_script_that_needs_its_rank_before_init_runs_without_standbys(jdp_run):
    reads = SCRIPT.replace("exec(sys.argv[1])", "rank = os.environ['RANK']")
    run = jdp_run("--nproc-per-node=2", script=reads)
    pids = run.pids(0, 2)
    run.until_true(lambda: "a standby (pid " in run.output, "line about it")
    os.kill(pids[0], signal.SIGKILL)
    assert run.finish(1, 2) == 0
    assert "KeyError: 'RANK'" in run.output
    assert run.output.count("a standby (pid ") == 1


def test_a_failure_while_standbys_start_is_recovered_from(jdp_run):
    run = jdp_run("--nproc-per-node=2", before="time.sleep(0.3)")
    os.kill(run.pids(0, 2)[0], signal.SIGKILL)
    os.kill(run.pids(1, 2)[1], signal.SIGKILL)
    assert run.finish(2, 2) == 0


def test_a_failure_while_the_next_generation_forms_is_recovered_from(jdp_run):
    run = jdp_run("--nproc-per-node=2", init="if a.generation == 1 and a.process_id: sys.exit(9)")
    os.kill(run.pids(0, 2)[0], signal.SIGKILL)
    assert run.finish(2, 2) == 0
    [recovered] = run.events("recovered")
    assert "SIGKILL" in recovered["cause"] and "code 9" in recovered["cause"]


def test_a_run_that_had_no_step_left_after_a_failure_says_so(jdp_run):
    run = jdp_run("--nproc-per-node=2", init="if a.generation: sys.exit()")
    os.kill(run.pids(0, 2)[1], signal.SIGKILL)
    assert run.wait() == 0
    last = run.output.splitlines()[-1]
    assert "process 1 " in last and "SIGKILL" in last


def test_nothing_is_restarted_before_a_step_was_finished(jdp_run):
    run = jdp_run(
        "--nproc-per-node=2", init="if a.process_id: sys.exit('no such file')\ntime.sleep(9)"
    )
    assert run.wait() == 1
    assert len(run.events("formed")) == 1
    assert "process 1 (pid " in run.output.splitlines()[-4]
    assert "no such file" in run.output.splitlines()[-2]
    assert "--max-restarts" not in run.output


@pytest.mark.parametrize("budget", [0, 1])
def test_a_process_that_is_killed_while_it_starts_is_replaced_within_the_budget(jdp_run, budget):
    wait = """
if not (folder / "first").exists():
    (folder / "first").write_text(str(os.getpid()))
    time.sleep(9)
"""
    run = jdp_run("--nproc-per-node=2", f"--max-restarts={budget}", before=wait)
    first = run.folder / "first"
    run.until_true(lambda: first.exists() and first.read_text(), "the first process")
    os.kill(int(first.read_text()), signal.SIGKILL)
    if not budget:
        assert run.wait() == 128 + signal.SIGKILL
        return
    assert run.finish(1, 2) == 0
    assert len(run.events("formed")) == 2


def test_a_program_that_can_not_be_started_is_an_error(jdp_run):
    run = jdp_run("--no-python", "/does/not/exist")
    assert run.wait() == 1
    assert "No such file or directory" in run.output


@pytest.mark.parametrize("budget", [0, 1])
def test_the_last_failure_of_the_budget_is_the_exit_code(jdp_run, budget):
    run = jdp_run(
        "--nproc-per-node=2", f"--max-restarts={budget}", after="if a.process_id: sys.exit(7)"
    )
    assert run.wait() == 7
    assert len(run.events("formed")) == 1 + budget
    assert re.search(r"process 1 \(pid .*\b7 \(jdp explain-error JDP301\)", run.output)
    assert f"--max-restarts {budget}" in run.output.splitlines()[-1]


def test_what_a_script_raised_is_printed_last(jdp_run):
    run = jdp_run(
        "--nproc-per-node=2",
        "--max-restarts=0",
        after="if a.process_id: launcher.tell('failed', code=1, traceback='KeyError: 7'); "
        "time.sleep(9)",
    )
    assert run.wait() == 1
    assert "KeyError: 7" in run.output.splitlines()[-2]


@pytest.mark.parametrize("size", [1, 2])
def test_the_exit_code_of_a_process_that_says_why_is_its_own(jdp_run, size):
    run = jdp_run(
        f"--nproc-per-node={size}",
        "--max-restarts=0",
        after="if a.process_id == a.num_processes - 1: "
        "launcher.tell('failed', code=3, traceback='SystemExit: 3'); sys.exit(3)",
    )
    assert run.wait() == 3
    assert "SystemExit: 3" in run.output.splitlines()[-2]
    assert "JDP304" not in run.output


@pytest.mark.parametrize(
    "says",
    [
        "[print('x' * 500_000) for _ in range(9)]",
        "fail_fast.fail_fast(); raise KeyError('\U0001f600' * 100_000)",  # 12 bytes each in JSON
    ],
    ids=["output", "traceback"],
)
def test_who_failed_is_the_cause_however_much_it_says(jdp_run, says):
    after = f"from jdp.distributed import fail_fast\nif a.process_id == 0: {says}; sys.exit(1)"
    run = jdp_run("--nproc-per-node=2", "--max-restarts=0", after=after)
    assert run.wait() == 1
    assert "process 0 (pid " in run.output
    assert not run.events("host lost")


def test_a_process_that_fails_alone_may_clean_up(jdp_run):
    cleans_up = "lambda: (time.sleep(0.3), (folder / 'clean').touch())"
    run = jdp_run(
        "--max-restarts=0",
        before=f"import atexit; atexit.register({cleans_up})",
        after="launcher.tell('failed', code=1, traceback='KeyError: 7'); sys.exit(1)",
    )
    assert run.wait() == 1
    assert (run.folder / "clean").exists()


@pytest.mark.parametrize(
    ("fails", "code", "why"),
    [
        ("sys.exit(3)", 3, "SystemExit: 3"),
        ("sys.excepthook = print; raise KeyError(7)", 1, "KeyError: 7"),
        # What the other one raises is that this one failed, and it may be the faster one.
        ("time.sleep(0.3); raise KeyError(7)", 1, "KeyError: 7"),
    ],
)
def test_who_failed_is_the_cause_with_its_own_code(jdp_run, fails, code, why):
    after = f"""
from jdp.distributed import fail_fast
fail_fast.fail_fast()
if a.process_id == 0: {fails}
raise fail_fast.OtherFailedError("process 0 failed")
"""
    run = jdp_run("--nproc-per-node=2", "--max-restarts=0", after=after)
    assert run.wait() == code
    assert "process 0 (pid " in run.output
    assert why in run.output.splitlines()[-2]


TELLS = "launcher.tell('failed', code=1, traceback='lost it')"


@pytest.mark.parametrize(("lost", "by"), [(0, TELLS), (1, TELLS), (0, "os._exit(3)")])
def test_the_cause_is_who_was_lost_and_not_who_noticed(jdp_run, lost, by):
    after = f"""
while not (folder / "lost").exists(): time.sleep(0.005)
if a.generation == 0: (folder / "noticed").touch(); {by}; time.sleep(9)
"""
    run = jdp_run("--nproc-per-node=2", after=after)
    pids = run.pids(0, 2)
    run.until_true(lambda: len([*run.folder.glob("stepped *")]) == 2, "first step of both")
    run.process.send_signal(signal.SIGSTOP)
    os.kill(pids[lost], signal.SIGKILL)
    (run.folder / "lost").touch()
    run.until_true((run.folder / "noticed").exists, "notice")
    time.sleep(0.1)
    run.process.send_signal(signal.SIGCONT)
    [recovered] = run.until("recovered")
    assert f"process {lost} " in recovered["cause"] and "SIGKILL" in recovered["cause"]
    assert run.finish() == 0


# Two generations die: one before it restores, one after.
RESTORES_LATE = """
import os, signal
from jdp.worker import launcher_client
launcher = launcher_client.current()
a = launcher.park()
launcher.tell("joined", s=0.0)
print("resumes:", a.resumes, flush=True)
if a.generation == 1:
    launcher.tell("restored", step=0, base=0, tier="none", s=0.0)
if a.generation < 2:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_resume_only_what_this_run_may_have_kept(jdp_run):
    run = jdp_run("--max-restarts=2", "--standbys=0", script=RESTORES_LATE)
    assert run.wait() == 0, run.output
    found = [line.split()[-1] for line in run.output.splitlines() if "resumes:" in line]
    assert found == ["False", "False", "True"]


@pytest.mark.parametrize(
    "is_complete, words", [(True, "Step 30 was the last one"), (False, "continues from step 30")]
)
def test_a_failure_behind_the_last_step_promises_no_further_one(jdp_run, is_complete, words):
    told = f"step=30, base=30, tier='checkpoint', s=0.0, is_complete={is_complete}"
    restores = "from jdp.worker import launcher_client\nlauncher = launcher_client.current()\n"
    restores += f"launcher.park()\nlauncher.tell('restored', {told})\nundefined"
    run = jdp_run(script=restores)
    assert run.wait() == 1
    assert words in run.output.splitlines()[-1]


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
@pytest.mark.parametrize(
    "option, num_told", [("'--local-rank'", 1), ("'--local-rank' LOCAL_RANK", 0)]
)
def test_an_option_that_no_launcher_passes_is_named_once(jdp_run, start_method, option, num_told):
    script = SCRIPT.replace("exec(sys.argv[1])", f'text = "{option}"\nexec(sys.argv[1])')
    run = jdp_run("--nproc-per-node=2", f"--start-method={start_method}", script=script)
    assert run.finish(0, 2) == 0
    assert run.output.count("reads --local-rank, which jdp run does not set") == num_told


@pytest.mark.parametrize("phase, call", [("TRAIN_STEP", "a step"), ("WAITING", "ckpt.step")])
def test_an_early_end_of_one_process_that_another_waits_for_is_a_failure(jdp_run, phase, call):
    run = jdp_run(
        "--nproc-per-node=2",
        "--max-restarts=1",
        "--shutdown-timeout-s=0.5",
        after=f"""{BEGINS}
if a.process_id and not a.generation: sys.exit(0)
progress.{phase}.__enter__()
""",
    )
    run.pids(1, 2)
    words = "process 0 waited for it for 0.5 s in a"
    run.until_true(lambda: words in run.output, words)
    assert run.finish() == 0 and call in run.output


# They still run their last step.
CALLED = f"{BEGINS}\nwith progress.TRAIN_STEP: pass\nprogress.own.num_running = lambda: 1"


@pytest.mark.parametrize(("begins", "seconds"), [("", 0.8), (BEGINS, 0.8), (CALLED, 3.0)])
def test_a_process_may_work_alone_or_end_a_called_step_at_the_end(jdp_run, begins, seconds):
    run = jdp_run(
        "--nproc-per-node=2",
        "--max-restarts=0",
        "--shutdown-timeout-s=0.3",
        after=f"{begins}\nif not a.process_id: time.sleep({seconds})\nsys.exit()",
    )
    assert run.wait() == 0, run.output


def test_a_process_whose_script_has_ended_counts_before_it_exits(jdp_run):
    run = jdp_run(
        "--nproc-per-node=2",
        "--max-restarts=0",
        "--shutdown-timeout-s=0.5",
        before="import atexit; atexit.register(time.sleep, 60)",
        after=f"{BEGINS}\nif a.process_id: sys.exit()\nprogress.TRAIN_STEP.__enter__()",
    )
    assert run.wait() == 1
    assert "process 1 " in run.output and "JDP304" in run.output


def test_the_watch_ends_scripts_that_have_ended_and_do_not_exit(jdp_run):
    run = jdp_run(
        "--nproc-per-node=2",
        "--max-restarts=0",
        "--timeout-s=0.2",
        before="import atexit; atexit.register(time.sleep, 60)",
        after=f"{BEGINS}\nsys.exit()",
    )
    assert run.wait() == 124
    assert "JDP303" in run.output and "atexit" in run.output


def test_who_has_saved_and_ended_ends_the_run(jdp_run):
    run = jdp_run("--nproc-per-node=2", after="time.sleep(0.2 * a.process_id); sys.exit(75)")
    assert run.wait() == 75
    assert [e["returncode"] for e in run.events("exited")] == [75, 75]


def test_a_run_that_has_saved_prints_the_step(jdp_run):
    after = "launcher.tell('closed', step=4711); sys.exit(75)"
    run = jdp_run("--nproc-per-node=2", after=after)
    assert run.wait() == 75
    assert " 4711 " in run.output.splitlines()[-1] and "--resume" in run.output.splitlines()[-1]


def test_who_crashes_after_another_has_saved_is_no_failure(jdp_run):
    run = jdp_run(
        "--nproc-per-node=2", after="time.sleep(0.2 * a.process_id); sys.exit(75 + a.process_id)"
    )
    assert run.wait() == 75


@pytest.mark.all_sets
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_ends_the_processes_by_sigterm(jdp_run, number):
    run = jdp_run(
        "--nproc-per-node=2",
        after="signal.signal(signal.SIGTERM, lambda n, frame: (print('got', n), sys.exit()))",
    )
    run.until("running", 2)
    run.standbys(0, 2)
    run.process.send_signal(number)
    assert run.wait() == 128 + number
    assert run.output.count(f"got {int(signal.SIGTERM)}") == 2


def test_a_hangup_that_is_ignored_at_the_start_stays_ignored(jdp_run):
    run = jdp_run("--nproc-per-node=2", within=["nohup"])
    run.signal(signal.SIGHUP)
    assert run.finish() == 0


def test_who_saves_at_a_signal_sets_the_exit_code(jdp_run):
    run = jdp_run(
        "--nproc-per-node=2",
        after="signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), sys.exit(75)))",
    )
    run.signal(signal.SIGTERM)
    assert run.wait() == 75


@pytest.mark.parametrize(
    "finishes",
    [
        "launcher.tell('closed', step=7); signal.signal(signal.SIGTERM, lambda *_: sys.exit())",
        "launcher.tell_end(steps=7); launcher.tell('running'); time.sleep(1); sys.exit()",
    ],
)
def test_a_signal_to_a_run_that_has_finished_changes_nothing(jdp_run, finishes):
    run = jdp_run("--nproc-per-node=2", after=finishes)
    run.signal(signal.SIGTERM)
    assert run.wait() == 0


IGNORES = "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGINT)]"


def test_who_ignores_a_signal_is_killed_after_the_grace(jdp_run):
    run = jdp_run("--nproc-per-node=2", "--shutdown-timeout-s=0.3", after=IGNORES)
    run.signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM
    assert "--shutdown-timeout-s" in run.output


def test_a_process_that_evaluates_for_too_long_after_a_signal_is_named(jdp_run):
    evaluates = f"""{BEGINS}
signal.signal(signal.SIGTERM, lambda *_: None)
progress.EVALUATING.__enter__()
"""
    run = jdp_run("--nproc-per-node=2", "--shutdown-timeout-s=0.5", after=evaluates)
    run.signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM
    assert re.search(r"process 0 .*evaluating .* \d\.\d s", run.output)


@pytest.mark.parametrize(("seconds", "code"), [(1.5, 75), (99.0, 128 + signal.SIGTERM)])
def test_who_saves_has_the_time_of_its_phase_and_then_the_grace(jdp_run, seconds, code):
    saves = f"""{BEGINS}
def save(*_):
    with progress.Phase("saving", 4.0): time.sleep({seconds})
    time.sleep(0.5)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
"""
    run = jdp_run("--nproc-per-node=2", "--shutdown-timeout-s=1", after=saves)
    run.signal(signal.SIGTERM)
    assert run.wait() == code


def test_a_second_interrupt_kills_at_once(jdp_run):
    run = jdp_run("--nproc-per-node=2", "--shutdown-timeout-s=600", after=IGNORES)
    run.signal(signal.SIGINT)
    time.sleep(0.1)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 128 + signal.SIGINT


def test_nothing_outlives_a_killed_launcher(jdp_run):
    run = jdp_run("--nproc-per-node=2", after="os.fork()")
    run.pids(0, 2)
    run.until_true(lambda: len(run.alive()) == 6, "two standbys, two children")
    run.process.kill()
    run.close()


def test_nothing_that_a_process_started_outlives_it(jdp_run):
    run = jdp_run("--nproc-per-node=2", after="if not a.generation: os.fork()")
    pids = run.pids(0, 2)
    run.until_true(lambda: len(run.alive()) == 6, "two standbys, two children")
    os.kill(pids[0], signal.SIGKILL)
    run.pids(1, 2)
    run.until_true(lambda: len(run.alive()) == 4, "end of the children")
    assert run.finish() == 0


# In a session of its own, and without the variable by which the guardian finds what is left.
DETACHES = """
import subprocess
def detach(*command):
    return subprocess.Popen(["setsid", "--fork", *command], env={}, stdout=subprocess.DEVNULL)
if a.process_id == 0:
    detach("sleep", "4321.5").wait()
    detach("true").wait()
"""


def pids_of(*command):
    """Return the numbers of the processes that run this, while others may end."""
    found, wanted = [], b"\0".join(word.encode() for word in command) + b"\0"
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes() == wanted:
                found.append(int(path.parent.name))
    return found


def test_a_helper_that_left_its_group_session_and_environment_ends_with_the_run(jdp_run):
    run = jdp_run("--nproc-per-node=2", after=DETACHES)
    pids = run.pids(0, 2)
    run.until_true(lambda: pids_of("sleep", "4321.5"), "helper")
    os.kill(pids[1], signal.SIGKILL)
    run.pids(1, 2)
    tasks = Path(f"/proc/{run.process.pid}/task")

    def is_a_zombie(pid):
        with contextlib.suppress(OSError):  # it was waited for just now
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

    def children():
        return " ".join(path.read_text() for path in tasks.glob("*/children")).split()

    run.until_true(lambda: not any(map(is_a_zombie, children())), "end of the helper")
    assert run.finish() == 0
    assert not pids_of("sleep", "4321.5")


def test_a_launcher_that_has_other_children_leaves_their_helpers_alone(jdp_run):
    start = "(setsid --fork sleep 4321.25 >/dev/null 2>&1); sleep 4321.75 >/dev/null 2>&1 & "
    run = jdp_run(within=("sh", "-c", start + 'exec "$@"', "sh"))
    try:
        assert run.finish() == 0
        assert pids_of("sleep", "4321.75") and pids_of("sleep", "4321.25")
    finally:
        for pid in pids_of("sleep", "4321.75") + pids_of("sleep", "4321.25"):
            os.kill(pid, signal.SIGKILL)


HANGS = """
from jdp.worker import progress, watching
watching.begin_watching(1.0, a.process_id, a.num_processes)
for step in range(30 if a.process_id == a.generation == 0 else 10**9):
    with progress.TRAIN_STEP: time.sleep(0.01)
    if (folder / "done").exists(): sys.exit()
def stuck(): time.sleep(99)
stuck()
"""


def test_the_watch_ends_a_generation_that_makes_no_step(jdp_run):
    run = jdp_run("--nproc-per-node=2", "--timeout-s=1", after=HANGS)
    run.until("stalled", is_over=True, process_ids=[0])
    assert run.finish(1, 2) == 0
    assert "process 0 (pid " in run.output and "in stuck" in run.output


def test_a_hang_that_may_not_be_restarted_has_its_own_exit_code(jdp_run):
    run = jdp_run("--nproc-per-node=2", "--timeout-s=1", "--max-restarts=0", after=HANGS)
    assert run.wait() == 124


def test_a_process_that_never_comes_to_init_is_named_and_not_waited_for(jdp_run):
    run = jdp_run(
        "--nproc-per-node=2",
        "--timeout-s=0.5",
        "--start-method=spawn",
        before="time.sleep(99 if os.environ['RANK'] == '1' else 0)",
        init="from jdp.worker import watching; watching.record_joining(); time.sleep(99)",
    )
    assert run.wait() == 124
    assert BEFORE in run.output
    assert re.search(r"process 1 \(pid .*\n +process 0 \(pid ", run.output)
    assert "in <module>" in run.output


def test_the_commit_memory_outlives_the_processes(jdp_run):
    run = jdp_run(
        "--nproc-per-node=2",
        init="print('found', os.pread(launcher.commit_file, 99, 0))",
        after="""
if a.process_id == 0 and a.generation == 0:
    os.pwrite(launcher.commit_file, b"a commit", 0); (folder / "written").touch()
""",
    )
    pids = run.pids(0, 2)
    run.until_true((run.folder / "written").exists, "commit")
    os.kill(pids[0], signal.SIGKILL)
    assert run.finish(1, 2) == 0
    assert run.output.count("found b''") == 2
    assert run.output.count("found b'a commit'") == 2


def test_the_port_of_the_coordinator_is_free_and_another_one_each_time(jdp_run):
    listens = """
import socket
if a.process_id == 0:
    port = int(os.environ["MASTER_PORT"])
    listener = socket.create_server(("127.0.0.1", port)); print("port", port)
"""
    run = jdp_run("--nproc-per-node=2", init=listens)
    os.kill(run.pids(0, 2)[1], signal.SIGKILL)
    assert run.finish(1, 2) == 0
    ports = [line.split()[-1] for line in run.output.splitlines() if " port " in line]
    assert len(set(ports)) == 2


SHORT_REST = "from jdp.launch.leader import remote_host; remote_host.REST_S = 1.0"


def test_a_slot_that_fails_twice_rests_and_the_run_grows_back(jdp_run):
    run = jdp_run("--nproc-per-node=1:3", "--max-restarts=9", changes=SHORT_REST)
    os.kill(run.pids(0, 3)[1], signal.SIGKILL)
    os.kill(run.pids(1, 3)[1], signal.SIGKILL)
    run.pids(2, 2)
    assert run.finish(3, 3) == 0
    assert [e["num_processes"] for e in run.events("formed")] == [3, 3, 2, 3]
    assert run.events("recovered")[-1]["cause"] == failure.growth().text


JAX_SCRIPT = """
import os, time
import jax, jax.numpy as jnp, numpy as np, optax
import jdp
jdp.init()
num_steps = 50 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" else 100_000

@jdp.train_step
def step(state, rows):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((rows @ w - 1) ** 2))(state.params)
    return state.apply_gradients(grads), jdp.mean_over_ranks(loss)

state = jdp.TrainState.create(jnp.zeros(4), jdp.replicated(optax.sgd(0.1)))
for rows in jdp.batches(np.ones((6, 4), np.float32), 6, num_steps=num_steps):
    state, loss = step(state, rows)
    time.sleep(0.01)
print("processes", jax.process_count(), "ranks", jax.device_count())
"""


@pytest.mark.xdist_group("processes")
def test_training_with_jax_goes_on_when_process_0_is_killed(jdp_run):
    run = jdp_run("--nproc-per-node=2", script=JAX_SCRIPT, XLA_FLAGS="", JAX_NUM_CPU_DEVICES="1")
    pids = run.pids(0, 2)
    standbys = run.standbys(0, 2)
    os.kill(pids[0], signal.SIGKILL)
    assert len({*run.pids(1, 2)} & {*standbys}) == 1
    assert run.wait() == 0
    assert run.output.count("processes 2 ranks 2") == 2
    assert "imports its modules itself" not in run.output


@pytest.mark.xdist_group("processes")
def test_an_error_of_init_is_the_cause_and_not_an_end_of_the_script(jdp_run):
    script = "import jax, jdp\nkey = jax.random.key(0)\njdp.init()"
    run = jdp_run("--nproc-per-node=2", script=script, XLA_FLAGS="", JAX_NUM_CPU_DEVICES="1")
    assert run.wait() == 1
    assert "reached the end of the script" not in run.output
    assert "Move jdp.init() to the top of the program." in run.output.split("the cause: ")[1]


OWN_LOOP = """
import os, time
from pathlib import Path
import jax, jax.numpy as jnp
import jdp
jdp.init()
num_steps = 30 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" else 100_000
own_step = jax.jit(lambda w: w + 1)
with jdp.Checkpointer(Path(__file__).parent / "checkpoints", commit_every=1) as checkpointer:
    w = checkpointer.restore(jnp.zeros(4))
    began = checkpointer.steps
    while checkpointer.steps < began + num_steps:
        w = own_step(w)
        checkpointer.step(w)
        if checkpointer.steps == 20: print("twenty steps")
        time.sleep(0.01)
    print("began", began > 0, "right", float(w[0]) == checkpointer.steps)
"""


@pytest.mark.xdist_group("processes")
def test_a_loop_of_ones_own_with_a_checkpointer_is_recovered(jdp_run):
    run = jdp_run("--nproc-per-node=2", script=OWN_LOOP, XLA_FLAGS="", JAX_NUM_CPU_DEVICES="1")
    pids = run.pids(0, 2)
    run.standbys(0, 2)
    run.until_true(lambda: "twenty steps" in run.output, "steps")
    os.kill(pids[0], signal.SIGKILL)
    run.deadline_s = 120.0
    assert run.wait() == 0
    assert run.output.count("began True right True") == 2


WITHOUT_STEPS = """
import os, time
import jax, jax.numpy as jnp
import jdp
jdp.init(timeout_s=1.0)
with jdp.phase("loading"):
    pass
for _ in range(80):
    jax.jit(lambda x: x + 1)(jnp.zeros(4)).block_until_ready()
    time.sleep(0.1)
# All leave together: process 0 holds JAX's store, and JAX aborts the others if it goes first.
jax.distributed.shutdown()
os._exit(0)  # a busy machine takes long to end
"""


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("num", [1, 2])
def test_a_run_that_makes_no_step_of_jdp_is_not_ended(jdp_run, num):
    run = jdp_run(
        f"--nproc-per-node={num}", script=WITHOUT_STEPS, XLA_FLAGS="", JAX_NUM_CPU_DEVICES="1"
    )
    run.deadline_s = 120.0
    assert run.wait() == 0
    assert "JDP303" not in run.output


GIVES_UP = (
    OWN_LOOP.replace("own_step(w)", "own_step(w); act(checkpointer.steps)")
    + """
print("resumed", began)
"""
)
RAISES = """
def act(step):
    if step == 7: raise ValueError("a bug of the author")
"""
ENDS_AT_SIGTERM = """
import signal
def act(step):
    if step == 7:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(99)
"""


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    ("act", "code"),
    [(RAISES, 1), (ENDS_AT_SIGTERM, 128 + signal.SIGTERM)],
    ids=["failure", "signal"],
)
def test_a_run_that_gives_up_saves_its_latest_commit_and_prints_the_step(jdp_run, act, code):
    script = GIVES_UP.replace("100_000", "20")
    run = jdp_run("--max-restarts=0", script=act + script, XLA_FLAGS="", JAX_NUM_CPU_DEVICES="1")
    run.deadline_s = 120.0
    assert run.wait() == code
    last = run.output.splitlines()[-1]
    assert "--resume" in last and " 7, in " in last and str(run.folder / "checkpoints") in last
    again = jdp_run(
        "--resume", script="act = print" + script, XLA_FLAGS="", JAX_NUM_CPU_DEVICES="1"
    )
    again.deadline_s = 120.0
    assert again.wait() == 0
    assert "resumed 7" in again.output


@pytest.mark.xdist_group("processes")
def test_hosts_that_give_up_save_the_latest_commit_of_all_of_them(jdp_run):
    if reason := why_no_namespaces():
        pytest.skip(reason)
    script = GIVES_UP.replace("100_000", "20")
    flags = "--nnodes=2", f"--rdzv-endpoint=10.83.0.1:{free_port()}", "--max-restarts=0"
    with two_hosts() as hosts:
        for act, code, last in (RAISES, 1, " --resume .*step 7, "), ("act = print", 0, ""):
            runs = [
                jdp_run(
                    *(*flags, f"--node-rank={rank}", *["--resume"] * (act != RAISES)),
                    within=hosts[rank],
                    **{"script": act + script, "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"},
                    JDP_TOKEN="a secret",
                )
                for rank in (0, 1)
            ]
            for run in runs:
                run.deadline_s = 180.0
                assert run.wait() == code, [each.output for each in runs]
                assert re.search(last, run.output.splitlines()[-1]), run.output
            if act == RAISES:
                saved = [path.name for path in (runs[0].folder / "checkpoints").glob("7-*")]
                assert len(saved) == 1
            else:
                assert "resumed 7" in runs[0].output and "resumed 7" in runs[1].output


@pytest.mark.xdist_group("processes")
def test_an_error_that_comes_again_after_a_restart_ends_the_run_with_its_traceback(jdp_run):
    script = RAISES + GIVES_UP.replace("num_steps = 30", "num_steps = 99")
    run = jdp_run("--max-restarts=9", script=script, XLA_FLAGS="", JAX_NUM_CPU_DEVICES="1")
    run.deadline_s = 120.0
    assert run.wait() == 1
    assert len(run.events("formed")) == 2
    *_, error, reason, resume = run.output.splitlines()
    assert "a bug of the author" in error and " 7" in reason and " 7, in " in resume
