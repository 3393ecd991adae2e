"""A collective that XLA has merged names each of its arrays once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp

DIM = 64


def test_parameters_whose_paths_end_alike_are_told_apart():
    def loss_fn(params, x):
        for w in (params["w"], params["a"]["w"], params["b"]["a"]["w"]):
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    @jdp.train_step
    def step(state, x):
        return state.apply_gradients(jax.grad(loss_fn)(state.params, x)), {}

    jdp.init(devices=jax.devices()[:2])
    w = np.ones((DIM, DIM), np.float32)
    tx = jdp.replicated(optax.sgd(0.1), all_reduce=jdp.collectives.xla)
    state = jdp.TrainState.create({"w": w, "a": {"w": w}, "b": {"a": {"w": w}}}, tx)
    report = jdp.explain(step, state, np.ones((4, DIM), np.float32))
    sent = sorted(leaf for bucket in report.buckets for leaf in bucket.leaves)
    assert sent == ["grads['a']['w']", "grads['b']['a']['w']", "grads['w']"]
