"""Which leaves a collective of XLA's takes, where several arrays have the same size."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.training import step_of

import jdp
from jdp import collectives

DIM = 128


def normalised_loss(params, x):
    for layer in params:
        x = x @ layer["w"]
        mean, var = jdp.batch_norm_statistics(x)
        x = jnp.tanh((x - mean) * jax.lax.rsqrt(var + 1e-5) * layer["scale"] + layer["bias"])
    return jnp.mean(jnp.square(x))


def test_statistics_of_a_batch_norm_have_no_names_of_gradients():
    jdp.init(devices=jax.devices()[:2])
    one = np.ones(DIM, np.float32)
    params = [{"w": np.eye(DIM, dtype=np.float32), "scale": one, "bias": one} for _ in range(2)]
    tx = jdp.replicated(optax.adam(1e-3), all_reduce=collectives.xla)
    state = jdp.TrainState.create(params, tx)
    rows = jax.ShapeDtypeStruct((16, DIM), jnp.float32)
    found = jdp.explain(step_of(normalised_loss), state, rows)
    named = [name for bucket in found.buckets for name in bucket.leaves if "grads" in name]
    expected = [f"grads[{i}]['{name}']" for i in range(2) for name in ("bias", "scale", "w")]
    assert sorted(named) == expected
