"""A step at stage 2, compiled for 8 x H200 that are not there, sends while it computes."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.in_flight import bytes_in_flight
from support.training import step_of

import jdp

DIM, NUM_LAYERS, NUM_ROWS = 1024, 12, 8 * 64
LAYER = 4 * DIM * DIM  # bytes; a group of gradients holds one layer


def listed(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.square(x).mean()


def scanned(params, x):
    x, _ = jdp.scan_layers(lambda x, w: (jnp.tanh(x @ w), None), x, params)
    return jnp.square(x).mean()


def compiled(mesh, loss_fn, stage, k):
    """The step of an MLP in k micro-batches, compiled."""

    def shape(sizes, *spec, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, P(*spec)))

    step = step_of(loss_fn, accumulate=k)

    tx = jdp.sharded(optax.sgd(0.1), stage=stage, bucket_bytes=LAYER)
    each = [shape((DIM, DIM)) for _ in range(NUM_LAYERS)]
    params = shape((NUM_LAYERS, DIM, DIM)) if loss_fn is scanned else each
    state = jdp.TrainState(
        step=shape((), dtype=jnp.int32),
        params=params,
        opt_state=tx.init(params),
        model_state=None,
        seed=shape((), dtype=jnp.uint32),
        tx=tx,
        trainable=(True,) * len(jax.tree.leaves(params)),
    )
    return step.lower(state, shape((NUM_ROWS * k, DIM), "data")).compile()


@pytest.mark.parametrize("k", [1, 4])
def test_all_gradients_but_the_last_are_sent_while_matmuls_run(mesh, k):
    program = compiled(mesh, listed, 2, k)
    hidden, total = bytes_in_flight(program.as_text())
    # New parameters are gathered behind the update.
    assert total == (k + 1) * NUM_LAYERS * LAYER
    assert hidden == k * (NUM_LAYERS - 1) * LAYER
    # Two gradients, activations, and in micro-batches the parts of all gradients, twice.
    most = 4 * LAYER if k == 1 else 8 * LAYER
    assert program.memory_analysis().temp_size_in_bytes < most


def test_stage_1_adds_up_the_gradients_of_all_layers(mesh):
    temporary = compiled(mesh, listed, 1, 4).memory_analysis().temp_size_in_bytes
    assert temporary > NUM_LAYERS * LAYER


def test_gradients_of_scanned_layers_are_sent_in_each_loop_but_for_the_last(mesh):
    k = 4
    hidden, total = bytes_in_flight(compiled(mesh, scanned, 2, k).as_text())
    # Each loop has one round more than it needs.
    assert total == (k * (NUM_LAYERS + 1) + NUM_LAYERS) * LAYER
    assert hidden == k * NUM_LAYERS * LAYER
