"""Training over gloo, where a bucket is one array."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support import training

import jdp
from jdp.collectives import native

NUM_STEPS = 4
KINDS = {
    "replicated": lambda: jdp.replicated(optax.adam(1e-2)),
    "16 bits": lambda: jdp.replicated(optax.adam(1e-2), reduce_dtype=jnp.bfloat16),
    "stage 1": lambda: jdp.sharded(optax.adam(1e-2), stage=1, min_size=1),
    "stage 2": lambda: jdp.sharded(optax.adam(1e-2), stage=2, min_size=1),
    "stage 3": lambda: jdp.sharded(optax.adam(1e-2), stage=3, min_size=1),
    "stage 3, 16 bits": lambda: jdp.sharded(
        optax.adam(1e-2), stage=3, min_size=1, reduce_dtype=jnp.bfloat16, gather_dtype=jnp.bfloat16
    ),
}


def parameters():
    draw = np.random.default_rng(0)
    shapes = {"w": (12, 300), "odd": (5, 7), "v": (300, 24), "b": (24,), "scale": ()}
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["w"])
    result = hidden @ params["v"] + params["b"] * params["scale"]
    return jnp.mean(result**2) + jnp.sum(params["odd"] ** 2) * jnp.mean(x)


def train(kind, num_ranks):
    """Return the parameters, and the names and kinds of the collectives."""
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))[:num_ranks]
    mesh = jdp.init(devices=devices)

    @jdp.train_step
    def step(state, batch):
        loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch["x"])
        return state.apply_gradients(grads), {"loss": loss}

    state, batch = jdp.TrainState.create(parameters(), KINDS[kind]()), None
    rows = {"x": np.random.default_rng(1).normal(size=(12 * NUM_STEPS, 12)).astype(np.float32)}
    for batch in jdp.batches(rows, 12, num_steps=NUM_STEPS, shuffle=False):
        state, _ = step(state, batch)
    jdp.check_replicas(state)
    plan = step.communication_plan(state, batch)
    sent = [(each.kind, each.dtype, [leaf.path for leaf in each.leaves]) for each in plan]
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(state.params)
    return training.fetched(jax.tree.map(lambda x: x.addressable_data(0), whole)), sent


def train_apart(kind, num_ranks):
    why = "the hosts are apart."
    with mock.patch.object(native.__globals__["shared_memory"], "why_apart", lambda *_: why):
        return train(kind, num_ranks)


@pytest.mark.processes
@pytest.mark.parametrize("num_processes", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_training_apart_equals_training_on_one_host(processes, kind, num_processes):
    num_ranks = 2 * num_processes
    want, _ = train(kind, num_ranks)
    for params, sent in processes(num_processes).run(train_apart, kind, num_ranks):
        training.assert_close(params, want)
        summed = [path for sort, _, paths in sent if sort != "all-gather" for path in paths]
        assert sorted(filter(None, summed)) == sorted(f"grads['{name}']" for name in want)
        assert summed.count("") <= 2  # loss and weight
        assert len(sent) <= 6 < len(params) + 2
        is_short = {"u16", "bf16"} & {dtype for _, dtype, _ in sent}
        assert bool(is_short) == ("16" in kind)
