"""`jdp bench faults` kills processes, and adds up what that costs."""

import json
import os
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from support.processes import environment

from jdp.__main__ import main
from jdp.data.sampler import Sampler
from jdp.tools.bench import faults, faulty_run
from jdp.tools.bench.faults import Fault
from jdp.tools.bench.faulty_run import BATCH_SIZE, NUM_ROWS, TrainingPlan
from jdp.tools.known_values import WrongResultError


# SGD on one device, without jdp: batches in the order of the sampler.
@pytest.mark.parametrize("num_steps", [1, 8, 19])
def test_the_final_state_is_that_of_plain_training(num_steps):
    plan = TrainingPlan(3 * 256 * 4, 0.0)
    sampler, x = Sampler(NUM_ROWS, BATCH_SIZE), faulty_run.data()
    params = {"w": faulty_run.initial(plan)}
    gradient = jax.jit(jax.grad(faulty_run.loss_fn))
    for step in range(num_steps):
        rows = x[sampler.indices(step * BATCH_SIZE, BATCH_SIZE)]
        grads = gradient(params, {"x": rows})
        params = jax.tree.map(np.subtract, params, grads)
    np.testing.assert_array_equal(params["w"], faulty_run.final(plan, num_steps))


def test_a_lost_row_and_a_repeated_row_change_the_final_state():
    x = faulty_run.data()
    assert len(np.unique(x, axis=0)) == NUM_ROWS
    assert (x != 0).any(axis=1).all()


@pytest.mark.parametrize(
    ("finals", "named"),
    [
        ([(0, 0, "a")], r"without a state: \[1\]"),
        ([(0, 0, "a"), (1, 3, "b")], "process 1: 3"),
        ([(0, 0, "a"), (1, 0, "b")], "other bits"),
    ],
)
def test_a_final_state_that_is_missing_wrong_or_different_is_an_error(finals, named, tmp_path):
    for rank, wrong, digest in finals:
        text = json.dumps({"rank": rank, "wrong": wrong, "digest": digest})
        (tmp_path / f"final.{rank}.json").write_text(text)
    with pytest.raises(WrongResultError, match=named):
        faults.require_exact(tmp_path, 2)


def step(number, generation, begin, end, trace_s=0.0, load_s=0.0):
    return {"step": number, "generation": generation, "begin": begin, "end": end} | {
        "trace_s": trace_s,
        "load_s": load_s,
    }


# Steps of 2 s, 0.5 s of commits between two. Killed at 9: step 3 is made again, from 15 on.
STEPS = [
    step(1, 0, 0.0, 4.0, 2.0),
    step(2, 0, 4.5, 6.5),
    step(3, 0, 7.0, 9.0),
    step(3, 1, 15.0, 18.0, 0.5, 0.25),
    step(4, 1, 18.5, 20.5),
]
RECORD = {"at": 18.0, "generation": 1, "end_s": 1.0, "form_s": 2.0, "restore_s": 1.5, "step_s": 4.0}


def test_every_second_of_a_run_is_productive_repeated_committing_or_down():
    found = faults.fault_summary(STEPS, {1: [STEPS[3]]}, [Fault(9.0, RECORD)])
    assert found["wall_s"] == 16.5  # from 4 to 20.5
    assert found["ettr"] == pytest.approx(6 / 16.5)  # steps 2, 3 and 4
    assert found["repeated"] == pytest.approx(2 / 16.5)
    assert found["committing"] == pytest.approx(1.5 / 16.5)
    assert found["down"] == pytest.approx(7 / 16.5)  # 9 to 15, and 1 s of the first step
    assert (found["steps"], found["faults"], found["step_s"]) == (4, 1, 2.0)


def test_the_parts_of_a_recovery_add_up_to_it():
    slower = {**STEPS[3], "trace_s": 0.75}
    found = faults.fault_parts(Fault(9.0, RECORD), [STEPS[3], slower])
    assert found["detection"] == pytest.approx(0.5)  # what the launcher did not see
    assert (found["re_forming"], found["restoring"]) == (3.0, 1.5)
    assert (found["tracing"], found["loading"], found["first_step"]) == (0.75, 0.25, 3.0)
    assert sum(found[name] for name in faults.PARTS) == pytest.approx(found["recovery"])


def test_without_a_fault_there_are_no_parts():
    found = faults.fault_summary(STEPS[:3], {}, [])
    assert found["recovery_s"] is None and found["down"] == pytest.approx(0.0)


def test_wrong_arguments_are_named(capsys):
    assert main(["bench", "faults", "--state", "1M,x"]) == 2
    assert "'x'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_a_killed_process_is_replaced_and_the_bits_are_right(tmp_path, monkeypatch):
    path, folders = tmp_path / "found.json", []
    launch = faults.FaultyLaunch

    def launched(folder, *args):
        folders.append(folder)
        return launch(tmp_path / folder.name, *args)

    monkeypatch.setattr(faults, "FaultyLaunch", launched)
    arguments = ["--mtbf", "2", "--faults", "1", "--state", "8K", "--step-s", "0.01"]
    assert main(["bench", "faults", *arguments, "--commit-every=7", f"--json={path}"]) == 0
    [row] = json.loads(path.read_text())["rows"]
    assert (row["faults"], row["processes"], row["state_bytes"]) == (1, 2, 8192)
    assert row["commit_every"] == 7 and 0 < row["ettr"] < 1
    assert row["recovery_s"] == pytest.approx(sum(row[f"{it}_s"] for it in faults.PARTS))
    events = (tmp_path / folders[0].name / "logs" / "events.jsonl").read_text().splitlines()
    [recovered] = [it for it in map(json.loads, events) if it["event"] == "recovered"]
    assert recovered["restored_step"] % 7 == 0 < recovered["restored_step"]


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_a_killed_benchmark_leaves_no_process(tmp_path):
    command = [sys.executable, "-m", "jdp", "bench", "faults", "--mtbf=600", "--state=8K"]
    variables = environment() | {"TMPDIR": str(tmp_path)}
    benchmark = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL)

    def training():
        pids = [int(path.suffix[1:]) for path in tmp_path.glob("*/run/steps.*")]
        return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]

    def wait_until(num, deadline_s):
        end = time.monotonic() + deadline_s
        while len(training()) != num:
            assert time.monotonic() < end, training()
            time.sleep(0.05)

    try:
        wait_until(2, 120.0)
    finally:
        benchmark.kill()
        benchmark.wait()
    wait_until(0, 30.0)


def test_a_run_that_does_not_start_is_an_error_with_its_last_output(capsys, monkeypatch):
    monkeypatch.setattr(faults, "_PROGRAM", "jdp.tools.no_such_program")
    assert main(["bench", "faults", "--state", "8K"]) == 1
    assert "no_such_program" in capsys.readouterr().err
