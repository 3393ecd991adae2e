"""The contestants of `make compare` train like one device, and a wrong one gets no row."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.all_reduce import peers
from benchmarks.compare import changed_lines, measure, rank_jax, tables, task
from benchmarks.compare.checked import ExpectedRun
from benchmarks.compare.contestants import CONTESTANTS, JAX, TORCH, taking_part
from benchmarks.compare.measure import Measured, Run
from benchmarks.compare.programs import no_reduction, shard_map
from benchmarks.compare.task import NUM_STEPS
from benchmarks.compare.worker import Worker

ROOT = Path(__file__).parents[2]
# JAX fails to compile explicit sharding with a shard_map of one rank in the convolutions.
# Each model, each number of ranks and of micro-batches.
SETUPS = [("mlp", 4, 1), ("conv", 1, 2), ("transformer", 4, 3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The expected results of the tiny models, in float64."""
    folder = tmp_path_factory.mktemp("tasks")
    command = [sys.executable, "-m", "benchmarks.compare.write_tasks", str(folder), "--tiny"]
    environment = {**os.environ, "JAX_ENABLE_X64": "1", "JAX_NUM_CPU_DEVICES": "1"}
    subprocess.run(
        [*command, "--ranks", "2", "3"], check=True, cwd=ROOT, env=environment, timeout=120
    )
    return folder


@pytest.mark.parametrize(("model", "k", "num_ranks"), SETUPS)
def test_every_jax_program_ends_with_the_parameters_of_one_device(folder, model, k, num_ranks):
    worker = rank_jax.worker_of(folder, is_tiny=True)
    for name in taking_part(JAX, k, num_ranks):
        found = worker.prepare(name, name, model, k, num_ranks)
        assert "error" not in found, (name, found)
        assert found["difference"] < 1e-4, name


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_torch_program_ends_with_the_parameters_of_one_device(folder, num_ranks):
    python = peers.find(None, None).torch
    if python is None:
        pytest.skip(f"PyTorch is not installed: {peers.INSTALL_TORCH}")
    with measure.torch_team(python, folder, num_processes=num_ranks) as team:
        models = {1: ["mlp"], 2: ["conv"], 3: ["mlp", "conv", "transformer"]}[num_ranks]
        for model in models:
            k = 4 if num_ranks == 3 else 1
            for name in taking_part(TORCH, k, num_ranks):
                for found in team.ask("prepare", name, name, model, k, num_ranks):
                    assert "error" not in found, (name, model, found)
                    assert found["difference"] < 1e-4, (name, model)


def test_a_program_with_a_wrong_gradient_gets_no_row(folder, monkeypatch):
    right = shard_map.program

    def wrong(given):
        return right(given._replace(loss_fn=lambda *args: 1.01 * given.loss_fn(*args)))

    monkeypatch.setattr(shard_map, "program", wrong)
    found = rank_jax.worker_of(folder, is_tiny=True).prepare("it", "shard_map", "mlp", 1, 2)
    assert "'shard_map' computed a wrong result on rank 0" in found["error"]


def test_a_rank_that_differs_is_found(folder, monkeypatch):
    right = no_reduction.program

    def wrong(given):
        step, start, batch = right(given)
        return step, start, {**batch, "x": batch["x"].at[-1].multiply(1.5)}

    monkeypatch.setattr(no_reduction, "program", wrong)
    worker = rank_jax.worker_of(folder, is_tiny=True)
    found = worker.prepare("it", "JAX, no reduction", "mlp", 1, 3)
    assert "wrong result on rank 2" in found["error"]


def test_a_process_with_a_wrong_result_trains_as_often_as_the_others():
    class Trained:
        def __init__(self, found):
            self.found, self.num_steps = np.float32([found]), 0

        def start(self):
            pass

        def run(self, num_steps):
            self.num_steps += num_steps  # with the other ranks, which would wait for it

        def gather(self):
            return [("w", self.found, 0)]

        drop = start

    made = {key: Trained(found) for key, found in (("right", 2), ("wrong", 3))}
    expected = {"w": np.float64([1])}, {"w": np.float64([2])}
    worker = Worker(lambda key: (made[key], ExpectedRun(key, *expected)), lambda: None)
    found = {key: worker.prepare(key, key) for key in made}
    assert "error" not in found["right"]
    assert "'wrong' computed a wrong result on rank 0" in found["wrong"]["error"]
    assert made["right"].num_steps == made["wrong"].num_steps == 2 * NUM_STEPS


def test_a_contestant_that_becomes_wrong_in_the_rounds_gets_no_row():
    class Process:
        runs = 0

        def ask(self, what, key="", *_, timeout_s=0):
            self.runs += what == "run"
            if self.runs > 3 and key.startswith("pmap"):
                return [{"error": "element 5 is wrong"}]
            return [{"seconds": 0.5, "difference": 1e-6, "memory_mb": 2.0}]

    started = {(JAX, "2"): Process()}
    found = measure.measure(started, "mlp", 1, ranks=["2"], end=0, min_rounds=3)
    assert found.errors == {Run("pmap", "2"): "element 5 is wrong"}
    lines = dict.fromkeys(CONTESTANTS, 1)
    rows = measure.rows_of(found, "mlp", 1, 32, lines)
    assert {row["contestant"] for row in rows} == set(taking_part(JAX, 1, 2)) - {
        "pmap",
        "JAX, no reduction",
    }
    assert {(row["rows_per_s"], row["over_jdp"], row["sync_ms"]) for row in rows} == {(64, 1, 0)}


def test_the_columns_are_those_of_the_measured_times():
    seconds = {
        Run("jdp.replicated", "1"): np.full(4, 0.5),
        Run("jdp.replicated", "2"): np.full(4, 0.25),
        Run("jit", "1"): np.full(4, 0.75),
        Run("jit", "2"): np.full(4, 0.125),
        Run("JAX, no reduction", "2"): np.full(4, 0.0625),
    }
    facts = {run: {"memory_mb": 8.0, "difference": 0.0} for run in seconds}
    lines = {"jdp.replicated": 3, "jit": 4}
    rows = measure.rows_of(Measured(seconds, facts, {}), "mlp", 1, 8, lines)
    columns = ("contestant", "ranks", "rows_per_s", "over_jdp", "scaling", "sync_ms", "lines")
    assert [tuple(row[name] for name in columns) for row in rows] == [
        ("jdp.replicated", "1", 16, 1, 1, None, 3),
        ("jdp.replicated", "2", 32, 1, 2, 187.5, 3),
        ("jit", "1", 10.666666666666666, 1.5, 1, None, 4),
        ("jit", "2", 64, 0.5, 6, 62.5, 4),
    ]
    assert tables.losses(rows) == [
        "mlp, 1 micro-batch, 2 ranks: jit does 2.00 times the rows of jdp.replicated."
    ]


def test_only_code_counts_as_a_changed_line():
    plain = '"""Plain."""\n\nx = 1\n\n\ndef f(y):\n    # a comment\n    return (\n        y)\n'
    own = '"""Own."""\nimport os\nx = 1\ndef f(y):\n    "doc"\n    return y\n'
    assert changed_lines.difference(plain, own) == 1
    assert changed_lines.difference(own, plain) == 0
    assert changed_lines.of_program("torch, no reduction") == 0


def test_a_task_file_keeps_every_number(tmp_path):
    one = {"a.w": np.arange(3.0), "b": np.float64(0.1)}
    file = task.TaskFile(one, {"x": np.ones((2, 1), np.int32)}, one, {2: one, 3: one})
    task.write(tmp_path / "it.npz", file)
    jax.tree.map(np.testing.assert_array_equal, task.read(tmp_path / "it.npz"), file)
