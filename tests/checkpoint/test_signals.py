"""Signals that ask for a save: SIGTERM, and SIGUSR1 and SIGUSR2, which engines hand on."""

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys

import jax.numpy as jnp
import pytest
from support.processes import environment, free_port

import jdp
from jdp.checkpoint.directory import Folder
from jdp.checkpoint.session import Session

USER = [signal.SIGUSR1, signal.SIGUSR2]
DEADLINE_S = 240


@contextlib.contextmanager
def handling(number, handler):
    """Handle a signal in the with block."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def stopped_by(number, folder):
    """Send the signal to this process before step 5, and return the exit code."""
    with pytest.raises(SystemExit) as ended, jdp.Checkpointer(folder) as checkpointer:
        n = checkpointer.restore({"n": jnp.int32(0)})["n"]
        for i in range(1, 9):
            if i == 5:
                os.kill(os.getpid(), number)
            checkpointer.step({"n": n + i})
    return ended.value.code


def saved_in(folder):
    return [key.step for key in Folder(folder).checkpoints()]


@pytest.mark.all_sets
@pytest.mark.parametrize("number", [signal.SIGTERM, *USER])
def test_one_process_saves_at_a_signal_and_gives_the_handler_back(tmp_path, number):
    before = signal.getsignal(number)
    assert stopped_by(number, tmp_path) == 75
    assert signal.getsignal(number) is before
    assert saved_in(tmp_path) == [5]


def interrupted(folder, *, deletes):
    with pytest.raises(KeyboardInterrupt):
        with jdp.Checkpointer(folder, save_every=2) as checkpointer:
            n = checkpointer.restore({"n": jnp.int32(0)})["n"]
            for i in range(1, 9):
                state = {"n": n + i}
                checkpointer.step(state)
                if i == 3:
                    if deletes:
                        state["n"].delete()  # as the next step does
                    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_saves_the_last_step_of_a_process_that_is_alone(tmp_path, caplog):
    interrupted(tmp_path, deletes=False)
    assert saved_in(tmp_path) == [3, 2]
    assert "step 3 is saved" in caplog.text and "JDP_RESUME=1" in caplog.text


def test_what_ctrl_c_loses_is_said(tmp_path, caplog):
    interrupted(tmp_path, deletes=True)
    assert saved_in(tmp_path) == [2]
    assert "step 3 is not saved" in caplog.text and "step 2 (" in caplog.text


def test_a_second_ctrl_c_ends_the_save_and_is_said(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(Session, "save", lambda self: signal.raise_signal(signal.SIGINT))
    interrupted(tmp_path, deletes=False)
    assert "because the save was interrupted, too" in caplog.text


def test_an_earlier_handler_runs_once_after_the_save(tmp_path):
    seen = []
    with handling(signal.SIGUSR2, lambda number, _: seen.append((number, saved_in(tmp_path)))):
        assert stopped_by(signal.SIGUSR2, tmp_path) == 75
    assert seen == [(signal.SIGUSR2, [5])]


# That of submitit raises, or queues the job again and ends the process.
def test_an_earlier_handler_sets_the_exit_code(tmp_path):
    with handling(signal.SIGUSR2, lambda *_: sys.exit(3)):
        assert stopped_by(signal.SIGUSR2, tmp_path) == 3
    assert saved_in(tmp_path) == [5]


def count_at(number, folder, steps=3):
    with jdp.Checkpointer(folder) as checkpointer:
        n = checkpointer.restore({"n": jnp.int32(0)})["n"]
        for i in range(steps):
            os.kill(os.getpid(), number)
            checkpointer.step({"n": n + i})


def test_an_ignored_signal_stays_ignored(tmp_path):
    with handling(signal.SIGUSR1, signal.SIG_IGN):
        count_at(signal.SIGUSR1, tmp_path)
    assert saved_in(tmp_path) == [3]


def test_a_handler_of_faulthandler_stays_in_place(tmp_path):
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        try:
            count_at(signal.SIGUSR1, tmp_path / "run")
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    assert (tmp_path / "stacks").read_text().count("count_at") == 3
    assert saved_in(tmp_path / "run") == [3]


TRAINS = """
import os, signal, sys, threading, time
import jax, jax.numpy as jnp, jdp

_, folder, number, how = sys.argv

def train():
    jdp.init()
    if how == "handled":
        signal.signal(int(number), lambda *_: print("handled", flush=True))
    with jdp.Checkpointer(folder) as checkpointer:
        n = checkpointer.restore({"n": jnp.int32(0)})["n"]
        child = os.fork() if how == "forks" else None
        if child == 0:
            time.sleep(1)
            os._exit(7)
        for i in range(1, 10_000):
            if i == 5 and jax.process_index() == 1:
                os.kill(child or os.getpid(), int(number))
            if child and i > 5:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
                break
            checkpointer.step({"n": n + i})
            time.sleep(0.002)

codes = []

def in_thread():
    try:
        train()
    except SystemExit as end:
        codes.append(end.code)

thread = threading.Thread(target=in_thread)
if how == "thread":
    thread.start()
    thread.join()
    sys.exit(codes[0])  # at the end of Python JAX waits for the other process
else:
    train()
"""


def two_processes(folder, number, how=""):
    """Send the signal to process 1 of two, and return the exit codes and the outputs."""
    place = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    words = [sys.executable, "-W", "ignore", "-c", TRAINS, folder, str(int(number)), how]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    variables = [environment(1) | place | {"JAX_PROCESS_ID": str(i)} for i in range(2)]
    started = [subprocess.Popen(words, env=each, **pipes) for each in variables]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], outputs


@pytest.mark.processes
@pytest.mark.xdist_group("processes")
@pytest.mark.all_sets
@pytest.mark.parametrize(
    ("number", "how"),
    [
        *[(number, "") for number in USER],
        (signal.SIGUSR1, "thread"),  # as Ray trains
        (signal.SIGUSR2, "handled"),
    ],
)
def test_processes_save_after_the_same_step_at_a_signal_to_one(tmp_path, number, how):
    codes, outputs = two_processes(tmp_path / "run", number, how)
    assert codes == [75, 75], outputs
    (step,) = saved_in(tmp_path / "run")
    assert step > 5 and f"step {step} " in outputs[0]
    # An earlier handler of one process runs after the save.
    assert ["handled" in output for output in outputs] == [False, how == "handled"]


LAUNCHED = """
import time
from pathlib import Path
import jax, jax.numpy as jnp, jdp

folder = Path(__file__).parent
jdp.init()
with jdp.Checkpointer(folder / "run") as checkpointer:
    n = checkpointer.restore({"n": jnp.int32(0)})["n"]
    for i in range(1, 10_000):
        checkpointer.step({"n": n + i})
        (folder / f"stepped {jax.process_index()}").touch()
        time.sleep(0.01)
"""


@pytest.mark.processes
@pytest.mark.xdist_group("processes")
@pytest.mark.all_sets
@pytest.mark.parametrize("number", USER)
def test_jdp_run_saves_at_a_signal_to_the_launcher(jdp_run, number):
    variables = {"XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"}
    flags = "--nproc-per-node=2", "--standbys=0", "--shutdown-timeout-s=60"
    run = jdp_run(*flags, script=LAUNCHED, **variables)
    run.until_true(lambda: len([*run.folder.glob("stepped *")]) == 2, "steps")
    run.process.send_signal(number)
    assert run.wait() == 75, run.output
    assert len(saved_in(run.folder / "run")) == 1
    assert "--resume" in run.output.splitlines()[-1]


# A scheduler signals data loaders too, and the step before the save needs them.
@pytest.mark.processes
@pytest.mark.xdist_group("processes")
def test_forked_children_survive_a_signal_that_asks_for_a_save(tmp_path):
    codes, outputs = two_processes(tmp_path / "run", signal.SIGUSR1, "forks")
    assert codes == [0, 0], outputs
