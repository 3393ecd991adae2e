"""A launcher is killed or told to stop: the same command with --resume goes on."""

import os
import signal
import time

import harness
import lineage
import pytest
from victim import SAVE_EVERY

pytestmark = pytest.mark.xdist_group("processes")

FLAGS = "--nproc-per-node=3", "--standbys=1"


@pytest.mark.slow
def test_a_killed_launcher_and_a_preempted_process_cost_no_bits(trainings, oracle):
    training = trainings(leash=50)
    launcher = training.start(*FLAGS)
    launcher.until_ready()
    training.until_step(launcher, 50)

    # One that is slow is no fault.
    training.order(70, ("slow", 1, 60))
    training.until_step(launcher, 70)
    assert len(launcher.events("formed")) == 1

    began = time.monotonic()
    launcher.process.kill()
    launcher.close()  # asserts that it leaves nothing behind
    training.order(120)
    again = training.launch_again(*FLAGS)
    again.until("first_step", 3)
    print(f"killed launcher: {time.monotonic() - began:.3f} s until the next one trains")
    assert {e["tier"] for e in again.events("restored")} == {"checkpoint"}
    assert training.lost_steps()[-1] <= 2 * SAVE_EVERY

    training.until_step(again, 120)
    os.kill(again.pids(0, 3)[1], signal.SIGTERM)
    # A process looks once a second whether it was told to stop.
    while again.process.poll() is None and training.step() < training.num_steps - 1:
        training.order(training.step() + 1)
        time.sleep(0.05)
    assert again.wait() == 75
    last = {e["rank"]: e["step"] for e in lineage.read(training.folder) if e.get("step", 0) > 70}
    assert len(set(last.values())) == 1
    assert [e["returncode"] for e in again.events("exited")] == [75] * 3

    training.order(None)
    last_one = training.launch_again(*FLAGS)
    assert last_one.wait() == 0, last_one.output
    assert {e["step"] for e in last_one.events("restored")} == set(last.values())
    assert training.lost_steps()[-1] == 0
    training.close()
    assert not harness.wrong_bits(training, oracle)
    assert not training.miscounted()


@pytest.mark.slow
def test_an_error_before_the_first_step_is_shown_and_not_tried_again(trainings):
    training = trainings()
    training.order(None, ("fail", 1, None))
    launcher = training.start("--nproc-per-node=2")
    assert launcher.wait() == 1
    assert len(launcher.events("formed")) == 1
    assert "process 1" in launcher.output
    assert "a bug of the author" in launcher.output
    assert "--max-restarts" not in launcher.output
    training.close()


@pytest.mark.slow
def test_a_kill_before_the_first_step_costs_nothing(trainings, oracle):
    training = trainings()
    training.order(None, ("kill", 1, None))
    launcher = training.start(*FLAGS)
    assert launcher.wait() == 0, launcher.output
    assert len(launcher.events("formed")) == 2 and "SIGKILL" in launcher.output
    training.close()
    assert not harness.wrong_bits(training, oracle)
    assert not training.miscounted()


# The one that runs on the oldest JAX, too.
def test_a_killed_process_costs_no_bits(trainings):
    whole, broken = trainings(num_steps=32), trainings(num_steps=32, leash=4)
    launcher = whole.start("--nproc-per-node=2", "--standbys=0")
    assert launcher.wait() == 0, launcher.output
    launcher = broken.start("--nproc-per-node=2")
    launcher.until_ready()
    broken.order(None, ("kill", 0, 7))
    assert launcher.wait() == 0, launcher.output
    assert len(launcher.events("recovered")) == 1
    for training in (whole, broken):
        assert not training.miscounted()
        training.close()
    assert not harness.wrong_bits(broken, whole, num_processes=2)
