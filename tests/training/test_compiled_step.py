"""What a call of a compiled step does in Python; behaviour is in `test_step.py`."""

import jax.numpy as jnp
import optax
from support.python_calls import python_calls
from support.training import ranks

import jdp


def test_a_compiled_step_takes_the_fast_path_of_jit():
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        return state.apply_gradients({"w": batch.mean(0)}), {}

    state = jdp.TrainState.create({"w": jnp.zeros(3)}, jdp.replicated(optax.sgd(0.1)))
    batch = jnp.ones((4, 3))
    first, (state, _) = python_calls(step, state, batch)
    later, _ = python_calls(step, state, batch)
    # What JAX calls in Python where its C++ does not know a signature, or has seen it fail once.
    assert "cache_miss" in first
    assert "cache_miss" not in later
