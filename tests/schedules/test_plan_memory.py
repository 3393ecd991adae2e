"""The memory that `jdp plan` predicts is what XLA allocates for 2 x H200, with micro-batches."""

import jax
import jax.numpy as jnp
import optax
import pytest
from support.training import ranks, step_of

import jdp
from jdp.tools.plan.prediction import rank_memory
from jdp.tools.plan.schedule import Deployment, Fabric, Workload, uniform
from jdp.tools.rate import GPUS
from jdp.tools.targets import MissingPluginError, gpu_description

# XLA merges collectives of up to 30 MiB, whose results are in memory together.
DIM, LAYERS, MICRO_BATCHES = 4096, 12, 4
LAYER = 4 * DIM * DIM


@pytest.fixture(scope="module", autouse=True)
def described():
    try:
        gpu_description(GPUS["H200"].xla_name)
    except MissingPluginError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("method", ["replicated", "stage1", "stage2", "stage3"])
def test_sums_of_micro_batches_are_counted_as_xla_allocates_them(method, mesh):
    ranks(2)
    tx = jdp.replicated(optax.adam(0.1), bucket_bytes=LAYER)
    if method != "replicated":
        tx = jdp.sharded(optax.adam(0.1), stage=int(method[-1]), bucket_bytes=LAYER)

    def loss_fn(params, x):
        for p in params:
            x = jnp.tanh(x @ p)
        return jnp.square(x).mean()

    def make_state():
        return jdp.TrainState.create([jnp.zeros((DIM, DIM))] * LAYERS, tx)

    rows = jax.ShapeDtypeStruct((2 * 8 * MICRO_BATCHES, DIM), jnp.float32)
    step = step_of(loss_fn, accumulate=MICRO_BATCHES)
    found = jdp.explain(step, jax.eval_shape(make_state), rows, on="2xH200").memory.total
    load = Workload(
        uniform(LAYERS * DIM * DIM, LAYERS, 1), 1.0, 2.0,
        micro_batches=MICRO_BATCHES, bucket_bytes=LAYER,
    )  # fmt: skip
    predicted = rank_memory(load, Deployment(method, 1, 2, Fabric(1.0, 0.0, 1.0, 0.0))).total
    assert found == pytest.approx(predicted, rel=0.03)
