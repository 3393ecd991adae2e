"""jdp on one GPU: a step equals that of a CPU, and the tools see what ran."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from support import profiled
from support import sharded_training as model
from support.training import assert_close, fetched

import jdp
from benchmarks.harness import models
from jdp.tools.profiling import trace_file
from jdp.tools.profiling.summary import summarize

pytestmark = pytest.mark.gpu


def trained(platform, stage, program=model.differentiated, num_steps=3):
    """Train on one device, and return parameters and optimizer state."""
    jdp.init(devices=jax.devices(platform)[:1])
    step, state = jdp.train_step(program), model.make_state(stage)
    with jax.default_matmul_precision("highest"):
        for i in range(num_steps):
            state, _ = step(state, model.batch(i))
    assert {d.platform for leaf in jax.tree.leaves(state.params) for d in leaf.devices()} == {
        platform
    }
    return fetched((state.params, state.opt_state))


def accumulated(state, rows):
    loss, grads = jdp.value_and_grad(model.loss_fn, accumulate=3)(state.params, rows)
    return state.apply_gradients(grads), {"loss": loss}


@pytest.mark.parametrize("program", [model.differentiated, accumulated], ids=["whole", "parts"])
@pytest.mark.parametrize("stage", range(4))
def test_a_step_equals_that_of_a_cpu(stage, program):
    assert_close(trained("gpu", stage, program), trained("cpu", stage, program), 2e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_of_a_gpu_is_restored_with_equal_bits_on_gpu_and_cpu(stage, tmp_path):
    jdp.init(devices=jax.devices("gpu")[:1])
    step, state = jdp.train_step(model.differentiated), model.make_state(stage)
    for i in range(2):
        state, _ = step(state, model.batch(i))
    with jdp.Checkpointer(tmp_path, save_every=1) as checkpointer:
        checkpointer.restore(model.make_state(stage))
        checkpointer.step(state)
    want = fetched((state.params, state.opt_state))
    for platform in ("gpu", "cpu"):
        jdp.init(devices=jax.devices(platform)[:1])
        with jdp.Checkpointer(tmp_path, resume=True) as checkpointer:
            found = checkpointer.restore(model.make_state(stage))
        jax.tree.map(np.testing.assert_array_equal, fetched((found.params, found.opt_state)), want)


PROBLEM = models.mlp(width=2048, num_layers=4, num_rows=4096)


@jdp.train_step
def step(state, batch):
    loss, grads = jdp.value_and_grad(PROBLEM.loss_fn)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


def test_a_profile_has_each_step_and_its_kernels(tmp_path):
    jdp.init(devices=jax.devices("gpu")[:1])
    state = jdp.TrainState.create(PROBLEM.params, jdp.replicated(optax.adam(1e-3)))
    with jdp.profile(tmp_path, steps=range(3, 6)):
        for batch in jdp.batches(PROBLEM.batch, 4096, num_steps=8):
            state, _ = step(state, batch)
    trace = profiled.read(tmp_path)
    steps = profiled.of_rank(trace, 0, trace_file.STEP)
    assert [each.facts["step"] for each in steps] == [3, 4, 5]
    kernels = profiled.of_rank(trace, 0, trace_file.COMPUTATION)
    # Not the name of the CUDA graph that they are a part of.
    assert not any(kernel.name.startswith("command_buffer") for kernel in kernels)
    for each in steps:
        inside = [k for k in kernels if each.begin <= k.begin and k.end <= each.end]
        # Three matmuls of each layer but the first, which needs no gradient of its input.
        assert len(inside) >= 11
    assert summarize(tmp_path)


_PEAK = """
import json
import jax, optax
import jdp
from benchmarks.harness import models

made = models.transformer(dim=1024, num_layers=6, num_rows=16, length=1024)
jdp.init(devices=jax.devices("gpu")[:1])

@jdp.train_step
def step(state, batch):
    loss, grads = jdp.value_and_grad(made.loss_fn)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}

state = jdp.TrainState.create(made.params, jdp.replicated(optax.adam(1e-3)))
batch = jax.device_put(made.batch)
report = jdp.explain(step, state, batch)
jax.block_until_ready(step(state, batch))
peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
print(json.dumps({"peak": peak, "stated": report.memory.total}))
"""


def test_the_memory_that_explain_states_is_the_peak_of_the_allocator():
    done = subprocess.run(
        [sys.executable, "-c", _PEAK],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["stated"] == pytest.approx(found["peak"], rel=0.1), found


def test_doctor_finds_the_gpu_and_adds_up_on_it():
    done = subprocess.run(
        [sys.executable, "-m", "jdp", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpu" in json.dumps(json.loads(done.stdout)).lower()
