"""The lines of a program: every program has some, and other numbers give others."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from support.training import ranks

import jdp
from jdp.analysis.program_lines import lines_of


def digest(f, *args):
    return lines_of(jax.make_jaxpr(f)(*args)).digest


# The gradient of an integer has the dtype float0. `jit` takes it as an operand.
def gradient(x, count):
    grads = jax.grad(lambda x, count: jnp.sum(x * count), argnums=(0, 1), allow_int=True)
    return jax.jit(lambda grads: grads[0])(grads(x, count))


@pytest.mark.parametrize("count", [3, np.arange(3)], ids=["scalar", "array"])
def test_a_program_with_gradients_of_integers_has_lines(count):
    assert digest(gradient, np.ones(3), count) == digest(gradient, np.ones(3), count)


def test_a_run_whose_step_differentiates_an_integer_is_saved_and_resumed(tmp_path):
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        return state.apply_gradients({"w": gradient(state.params["w"], 3) * batch.mean()}), {}

    for steps in (1, 2):
        with jdp.Checkpointer(tmp_path, resume=True) as checkpointer:
            state = jdp.TrainState.create({"w": jnp.ones(4)}, jdp.replicated(optax.sgd(0.5)))
            state, _ = step(checkpointer.restore(state), jnp.ones(2))
            checkpointer.step(state)
        np.testing.assert_array_equal(state.params["w"], np.full(4, 1 - 1.5 * steps))


DTYPES = ["bool", "int4", "int8", "uint32", "float8_e4m3fn", "bfloat16", "float16", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,)], ids=["scalar", "array"])
def test_constants_of_all_dtypes_are_told_apart(dtype, shape):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    constants = [np.full(shape, number, dtype) for number in (0, 1)]
    one, other = (digest(lambda x, c=c: jnp.where(x, c, c), True) for c in constants)
    assert one != other


def test_large_seeds_are_told_apart():
    one, other = (digest(lambda x, s=s: x ^ np.uint32(s), 1) for s in (2026112601, 2026112602))
    assert one != other
