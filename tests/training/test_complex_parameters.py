"""Complex parameters train by conjugated gradients, as on one device, or are carried along."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.training import assert_close, ranks

import jdp

PARAMS = {
    "w": np.linspace(-1, 1, 12, dtype=np.float32),
    "z": np.exp(1j * np.arange(12)).astype(np.complex64),
}
ROWS = {
    "x": np.sin(np.arange(6 * 12, dtype=np.float32)).reshape(6, 12),
    "mask": np.array([1, 1, 1, 0, 1, 1], np.float32),
}
WEIGHT = {"weight": lambda batch: batch["mask"].sum()}


def loss_fn(p, rows):
    found = rows["x"] @ (p["w"] * p["z"]) - 1j
    return (jnp.abs(found) ** 2 * rows["mask"]).sum() / rows["mask"].sum()


def optimizer(stage):
    if not stage:
        return jdp.replicated(optax.adam(0.1))
    return jdp.sharded(optax.adam(0.1), stage=stage, min_size=1)


def alone(trains):
    """The parameters after two steps of plain JAX and Optax on one device."""
    p = {k: jnp.asarray(PARAMS[k]) for k in trains}
    tx = optax.adam(0.1)
    opt_state = tx.init(p)
    for _ in range(2):
        grads = jax.grad(lambda p: loss_fn({**PARAMS, **p}, ROWS))(p)
        updates, opt_state = tx.update(jax.tree.map(jnp.conj, grads), opt_state, p)
        p = optax.apply_updates(p, updates)
    trained: Any = p
    return {**PARAMS, **trained}


@pytest.mark.parametrize("value_and_grad", [jax.value_and_grad, jdp.value_and_grad])
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_trains_as_optax_does_on_one_device(stage, num_ranks, value_and_grad):
    ranks(num_ranks)

    @jdp.train_step(**WEIGHT)
    def step(state, rows):
        loss, grads = value_and_grad(loss_fn)(state.params, rows)
        return state.apply_gradients(jax.tree.map(jnp.conj, grads)), {"loss": loss}

    state = jdp.TrainState.create(PARAMS, optimizer(stage))
    for _ in range(2):
        state, _ = step(state, ROWS)
    assert_close(state.params, alone(["w", "z"]))


@pytest.mark.parametrize("value_and_grad", [jax.value_and_grad, jdp.value_and_grad])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_ones_are_carried_along(stage, value_and_grad):
    ranks(3)

    @jdp.train_step(**WEIGHT)
    def step(state, rows):
        loss, grads = value_and_grad(loss_fn)(state.params, rows)
        return state.apply_gradients(grads), {"loss": loss}

    trainable = {"w": True, "z": False}
    state = jdp.TrainState.create(PARAMS, optimizer(stage), trainable=trainable)
    for _ in range(2):
        state, _ = step(state, ROWS)
    np.testing.assert_array_equal(state.params["z"], PARAMS["z"])
    assert_close(state.params, alone(["w"]))


LAYERS = {
    "w": np.sin(np.arange(3 * 6 * 6, dtype=np.float32)).reshape(3, 6, 6) * np.complex64(1 + 0.5j),
    "b": np.cos(np.arange(3 * 6, dtype=np.float32)).reshape(3, 6),
}


def stack_loss(scan, p, rows):
    def layer(x, p):
        x = x @ p["w"]
        return jnp.tanh(x.real + p["b"]) + 1j * x.imag, None

    x, _ = scan(layer, (rows["x"][:, :6] + 0j).astype(jnp.complex64), p)
    return (jnp.abs(x) ** 2).mean()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_complex_layers_train_in_a_scan_and_with_micro_batches(stage, accumulate):
    ranks(3)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))

    @jdp.train_step
    def step(state, rows):
        loss_fn = partial(stack_loss, jdp.scan_layers)
        loss, grads = jdp.value_and_grad(loss_fn, accumulate=accumulate)(state.params, rows)
        return state.apply_gradients(jax.tree.map(jnp.conj, grads)), {"loss": loss}

    split = jdp.sharded(tx, stage=stage, min_size=1) if stage else jdp.replicated(tx)
    state = jdp.TrainState.create(LAYERS, split)
    p: Any = jax.tree.map(jnp.asarray, LAYERS)
    opt_state = tx.init(p)
    for _ in range(2):
        state, _ = step(state, ROWS)
        grads = jax.grad(partial(stack_loss, jax.lax.scan))(p, ROWS)
        updates, opt_state = tx.update(jax.tree.map(jnp.conj, grads), opt_state, p)
        p = optax.apply_updates(p, updates)
    assert_close(state.params, p)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_complex_parameters_train_beside_those_of_16_bits(stage):
    ranks(2)
    params = {"w": jnp.ones(12, jnp.bfloat16), "z": PARAMS["z"]}

    @jdp.train_step
    def step(state, rows):
        loss = lambda p, x: (jnp.abs(x @ (p["w"] * p["z"])) ** 2).mean()  # noqa: E731
        loss, grads = jdp.value_and_grad(loss)(state.params, rows["x"])
        return state.apply_gradients(jax.tree.map(jnp.conj, grads)), {"loss": loss}

    tx = optax.sgd(0.1, momentum=0.9)
    split = jdp.sharded(tx, stage=stage, min_size=1) if stage else jdp.replicated(tx)
    state, _ = step(jdp.TrainState.create(params, split), ROWS)
    assert state.params["z"].dtype == np.complex64
    assert np.abs(state.params["z"] - PARAMS["z"]).max() > 1e-3
