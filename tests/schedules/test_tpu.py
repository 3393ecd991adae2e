"""Steps compiled for 8 TPUs, which are not there, reduce as on other devices. Needs libtpu."""

import functools
import importlib.util
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.training import step_of

import jdp
from benchmarks.harness import models
from jdp.tools.compiled import compile_step

ROOT = Path(__file__).parents[2]
TOPOLOGY = "v5e:2x4"


@pytest.fixture(scope="module")
def mesh():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    # Else libtpu asks the network which TPU this is.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY)
    return topologies.make_mesh(topology, (8,), ("data",))


def compiled(step, state, batch, mesh):
    """The collectives of the compiled step, and its text."""

    def shapes(tree, spec):
        where = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)

    jdp.init(mesh)
    text = step.lower(shapes(state, P()), shapes(batch, P("data"))).compile().as_text()
    names = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    return re.findall(rf" ({names})(?:-start)?\(", text), text


def on_cpu(make_state):
    jdp.init(devices=jax.devices("cpu")[:1])
    return make_state()


def test_the_step_of_the_readme_sends_gradients_and_loss_at_once(mesh):
    block = re.search(
        r"^```python\n(.*?)^for batch in", (ROOT / "README.md").read_text(), re.M | re.S
    )
    names = {}
    exec(block[1].replace("jdp.init()", "jdp.init(cpu_ranks=1)"), names)
    batch = {name: x[:256] for name, x in names["rows"].items()}
    collectives, text = compiled(names["step"], names["state"], batch, mesh)
    assert collectives == ["all-reduce"]
    (line,) = [line for line in text.splitlines() if " all-reduce(" in line]
    # The eight TPUs have two hosts: what these compare, four numbers, goes with the loss.
    assert {"f32[64]", "f32[16,64]", "f32[5]"} <= set(
        re.findall(r"f32\[[\d,]*\]", line.split("=")[1])
    )


@pytest.fixture(scope="module")
def transformer():
    return models.transformer(dim=128, num_layers=2, num_rows=32, length=32, dtype=jnp.bfloat16)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_transformer_is_reduced_outside_of_the_loop_of_micro_batches(
    accumulate, transformer, mesh
):
    # Parameters in bfloat16 keep averages in it, where b2=0.999 would round to 1.
    tx = jdp.replicated(optax.adam(1e-3, b2=0.99))
    state = on_cpu(lambda: jdp.TrainState.create(transformer.params, tx))
    step = step_of(transformer.loss_fn, accumulate=accumulate)
    collectives, text = compiled(step, state, transformer.batch, mesh)
    assert collectives and set(collectives) == {"all-reduce"}
    assert not re.search(r"all-reduce[^\n]*op_name=\"[^\"]*while/body", text)


@pytest.mark.parametrize("late", [False, True])
def test_scanned_layers_are_reduced_in_the_loop_only_where_that_was_asked_for(late, mesh):
    layers = np.full((4, 128, 128), 0.1, np.float32)

    def loss_fn(params, batch):
        f = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        return jnp.mean(jdp.scan_layers(f, batch, params, late=late or None)[0] ** 2)

    state = on_cpu(lambda: jdp.TrainState.create(layers, jdp.replicated(optax.sgd(0.1))))
    step = step_of(loss_fn)
    collectives, text = compiled(step, state, np.ones((64, 128), np.float32), mesh)
    assert set(collectives) == {"all-reduce"}
    in_loop = re.search(r"all-reduce[^\n]*op_name=\"[^\"]*while/body", text)
    assert bool(in_loop) == late


def compiled_for(step, make_state, batch, mesh):
    """The collectives of a step whose state is placed as the step wants it, and its arguments."""
    jdp.init(devices=jax.devices("cpu")[:8])
    state = jax.eval_shape(make_state)
    found = compile_step(step, (state, batch), {}, mesh)
    names = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    collectives = re.findall(rf" ({names})(?:-start)?\(", found.compiled.as_text())
    return set(collectives), found.compiled.memory_analysis().argument_size_in_bytes


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_stage_splits_its_state_and_gathers_parameters(stage, accumulate, transformer, mesh):
    step = step_of(transformer.loss_fn, accumulate=accumulate)
    sizes = {}
    for name, make in (("whole", jdp.replicated), ("split", jdp.sharded)):
        options = {"stage": stage, "min_size": 1024} if name == "split" else {}
        tx = make(optax.sgd(1e-3, momentum=0.9), **options)
        made = functools.partial(jdp.TrainState.create, transformer.params, tx)
        collectives, sizes[name] = compiled_for(step, made, transformer.batch, mesh)
    assert "all-gather" in collectives and collectives & {"reduce-scatter", "all-reduce"}
    # Momentum takes as much as parameters; of what is split, a rank has an eighth.
    expected = 1 / 8 if stage == 3 else (1 + 1 / 8) / 2
    assert sizes["split"] / sizes["whole"] == pytest.approx(expected, rel=0.15)


def test_an_evaluation_averages_over_the_ranks(transformer, mesh):
    @jdp.eval_step
    def measure(state, batch):
        return {"loss": transformer.loss_fn(state.params, batch)}

    def make_state():
        return jdp.TrainState.create(transformer.params, jdp.replicated(optax.sgd(0.1)))

    collectives, _ = compiled_for(measure, make_state, transformer.batch, mesh)
    assert collectives == {"all-reduce"}
