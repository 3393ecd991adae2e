"""`jdp bench step` compares every timed state with that of one device."""

import json

import jax
import numpy as np
import pytest

import jdp
from jdp import collectives
from jdp.__main__ import main
from jdp.tools.bench import step
from jdp.tools.bench.step import StepSetting

# Whole numbers: every gradient is exact, so states on any number of ranks are equal.
SCRIPT = """
import jax.numpy as jnp, numpy as np, optax
import jdp

def make(num_rows, all_reduce):
    @jdp.train_step
    def step(state, batch):
        loss_fn = lambda params, batch: jnp.mean(batch["x"] @ params["w"])
        loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}
    x = np.arange(num_rows * 3, dtype=np.float32).reshape(num_rows, 3)
    tx = jdp.replicated(optax.sgd(1.0), all_reduce=all_reduce)
    return step, jdp.TrainState.create({"w": np.ones(3, np.float32)}, tx), {"x": x}
"""
QUICK = ["--rows", "2", "--steps", "2", "--rounds", "1", "--ranks", "1,3"]


@pytest.fixture(autouse=True)
def process(before_init, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")  # as of these tests


def test_a_step_of_a_script_is_timed_and_equals_one_device(tmp_path, capsys):
    (tmp_path / "train.py").write_text(SCRIPT)
    assert main(["bench", "step", f"{tmp_path}/train.py:make", *QUICK, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["ranks"] for row in rows] == [1, 3]
    for row in rows:
        assert row["difference"] == 0
        assert row["rows_per_s"] == pytest.approx(2 * row["ranks"] / row["step_ms"] * 1e3)
    assert (rows[0]["efficiency"], rows[0]["exposed"]) == (1, 0)
    assert rows[1]["exposed"] < 1


def test_a_built_in_model_is_as_on_one_device_up_to_rounding():
    setting = StepSetting(rows=2, num_steps=1, num_rounds=1)
    [_, row] = step.measure(step.found_model("mlp"), [2], setting)
    assert 0 < row["difference"] < step.TOLERANCE


def test_a_step_that_forgets_to_reduce_ends_the_bench(tmp_path, capsys, monkeypatch):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    monkeypatch.setattr(collectives, "auto", step._none)  # gradients stay local
    assert main(["bench", "step", f"{path}:make", *QUICK]) == 1
    assert "on 3 ranks" in capsys.readouterr().err


# Without the all-reduce a rank trains on its own rows: their state is known.
def test_the_step_without_communication_is_checked_on_every_rank(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    make = step.found_model(f"{path}:make")
    setting = StepSetting(rows=2, num_steps=1, num_rounds=1)
    contestant = step._Contestant(make, 3, setting, all_reduces=False)
    assert contestant.clock() > 0
    # Means of rows 0 and 1, and so on, of x: each rank has its own.
    weights = [
        [leaf for leaf in leaves if leaf.shape == (3,)][0] for leaves in contestant._expected
    ]
    np.testing.assert_array_equal(
        np.array(weights), 1 - np.array([[1.5, 2.5, 3.5], [7.5, 8.5, 9.5], [13.5, 14.5, 15.5]])
    )


# Fusions and copies of the step on two ranks.
def operations(all_reduce):
    jdp.init(devices=jax.devices()[:2])
    train, state, batch = step.found_model("transformer")(8, all_reduce)
    text = train.lower(state, batch).compile().as_text()
    entry = text[text.index("\nENTRY ") :]
    return entry.count(" fusion("), entry.count(" copy(")


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA drops the barrier")
def test_the_step_without_communication_computes_what_the_step_does():
    (fusions, copies), (own, own_copies) = map(operations, (collectives.auto, step._none))
    assert own == fusions > 100
    assert own_copies <= copies


def rows_of_processes(script, forgets):
    setting = StepSetting(rows=2, num_steps=2, num_rounds=1)
    right, collectives.auto = collectives.auto, step._none if forgets else collectives.auto
    try:
        return step.measure(step.found_model(script), [1, 2, 4, 6], setting)
    except step.known_values.WrongResultError as error:
        return str(error)
    finally:
        collectives.auto = right
        jdp.init()


# One rank and two are of process 0 alone; the others wait.
def test_three_processes_time_ranks_of_one_two_and_three(tmp_path, processes):
    (tmp_path / "train.py").write_text(SCRIPT)
    script = f"{tmp_path}/train.py:make"
    first, *others = processes(3).run(rows_of_processes, script, False)
    assert [(row["ranks"], row["processes"]) for row in first] == [(1, 1), (2, 1), (4, 2), (6, 3)]
    assert all(row["difference"] == 0 and row["step_ms"] > 0 for row in first)
    assert all(other == first for other in others)
    first, *others = processes(3).run(rows_of_processes, script, True)
    assert "2 ranks" in first and all(other == first for other in others)


@pytest.mark.parametrize(
    ("text", "num_devices", "num_local", "right"),
    [
        (None, 8, 8, [1, 2, 4, 8]),
        (None, 3, 3, [1, 2, 3]),
        (None, 6, 2, [1, 2, 4, 6]),
        (None, 9, 3, [1, 2, 9]),
        ("3,6", 9, 3, [3, 6]),
        ("4,6", 9, 3, "4 ranks, but this machine has 9 devices. Write at most 3, or 3 for each"),
    ],
)
def test_numbers_of_ranks_are_of_one_process_or_of_whole_ones(text, num_devices, num_local, right):
    if isinstance(right, list):
        assert step._numbers(text, num_devices, num_local) == right
    else:
        with pytest.raises(ValueError, match=right):
            step._numbers(text, num_devices, num_local)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["cnn"], "'cnn'"),
        (["missing.py:make"], "missing.py"),
        (["mlp", "--ranks", "1,9"], "9 ranks, but this machine has 8"),
        (["mlp", "--ranks", ""], "from 1 to 8.\n"),
    ],
)
def test_wrong_arguments_are_named(arguments, named, capsys):
    assert main(["bench", "step", *arguments]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ("None", "a NoneType."),
        ("made[:2]", "a tuple of 2 values."),
        ("(*made, 1)", "a tuple of 4 values."),
        ("dict(zip('abc', made))", "a dict."),
        ("(made[1], made[0], made[2])", "a TrainState first"),
        ("other(num_rows + 1, all_reduce)", "num_rows=2, but batch['x'] has 3"),
        ("(lambda state, batch: state, *made[1:])", "a TrainState, not (state, metrics)"),
    ],
)
def test_what_a_function_must_return_is_said(returned, named, tmp_path, capsys):
    text = "def make(num_rows, all_reduce):\n    made = other(num_rows, all_reduce)\n    return "
    (tmp_path / "train.py").write_text(
        f"{SCRIPT.replace('def make', 'def other')}\n{text}{returned}"
    )
    assert main(["bench", "step", f"{tmp_path}/train.py:make", *QUICK]) == 2
    error = capsys.readouterr().err
    assert named in error and "(state, metrics)" in error


def test_a_function_with_other_arguments_is_refused(tmp_path, capsys):
    (tmp_path / "train.py").write_text("def make(): pass")
    assert main(["bench", "step", f"{tmp_path}/train.py:make"]) == 2
    assert "make(num_rows, all_reduce)" in capsys.readouterr().err
