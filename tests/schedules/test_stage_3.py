"""A step at stage 3, compiled for 8 x H200 that are not there, gathers while it computes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from jdp.training import shard_layout

DIM, NUM_LAYERS, NUM_ROWS = 1024, 12, 8 * 64
LAYER = 4 * DIM * DIM  # bytes; a group of parameters holds one layer


def compiled(mesh, **options):
    """The step of an MLP, compiled."""

    def loss_fn(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.square(x).mean()

    @jdp.train_step
    def step(state, x):
        loss, grads = jdp.value_and_grad(loss_fn)(state.params, x)
        return state.replace(params=grads), {"loss": loss}

    tx = jdp.sharded(optax.sgd(0.1), stage=3, bucket_bytes=LAYER, **options)
    jdp.init(devices=jax.devices("cpu")[:1])
    state = jdp.TrainState.create([np.zeros((8, 8), np.float32)] * NUM_LAYERS, tx)
    state = state.replace(params=[jax.ShapeDtypeStruct((DIM, DIM), np.float32)] * NUM_LAYERS)
    jdp.init(mesh)
    leaves, tree = jax.tree.flatten(state)
    specs = shard_layout.partition(state, mesh)
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec or P()))
        for x, spec in zip(leaves, specs, strict=True)
    ]
    where = NamedSharding(mesh, P("data"))
    rows = jax.ShapeDtypeStruct((NUM_ROWS, DIM), np.float32, sharding=where)
    return step.lower(tree.unflatten(shapes), rows).compile()


def hidden(text, collective):
    """How many of some collectives are under way while a matmul runs, and how many there are."""
    entry = text[text.index("\nENTRY") :]
    lines = entry.splitlines()
    spans = []
    for i, line in enumerate(lines):
        if started := re.match(rf"\s*%(\S+) = .* {collective}-start\(", line):
            done = f"{collective}-done(%{started[1]})"
            spans.append(lines[i : next(k for k, other in enumerate(lines) if done in other)])
    alone = len(re.findall(rf" {collective}\(", entry))
    found = [any("gemm" in line or "cublas" in line for line in span) for span in spans]
    return sum(found), len(found) + alone


def test_parameters_are_gathered_and_gradients_sent_while_matmuls_run(mesh):
    program = compiled(mesh)
    gathers, num_gathers = hidden(program.as_text(), "all-gather")
    scatters, num_scatters = hidden(program.as_text(), "reduce-scatter")
    # Each layer on the way there, and on the way back all but the last two and the first.
    assert num_gathers == 2 * NUM_LAYERS - 3 and gathers >= 0.7 * num_gathers
    assert num_scatters == NUM_LAYERS and scatters >= 0.5 * num_scatters
    # Two groups of parameters, two gradients, the shards that are tied, and activations.
    assert program.memory_analysis().temp_size_in_bytes < 6 * LAYER


def test_parameters_that_stay_gathered_take_the_memory_of_all(mesh):
    program = compiled(mesh, keep_gathered=True)
    assert program.memory_analysis().temp_size_in_bytes > NUM_LAYERS * LAYER
