"""A bool, a float or a text in the place of an integer is refused by every public option."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp

SGD = optax.sgd(0.1)
GRADS = {"w": jnp.ones(2)}


def step(state, batch):
    return state, {}


# Option -> what takes it.
TAKES = {
    "stage": lambda x: jdp.sharded(SGD, stage=x),
    "min_size": lambda x: jdp.sharded(SGD, min_size=x),
    "bucket_bytes": lambda x: jdp.sharded(SGD, bucket_bytes=x),
    "bucket_bytes of replicated": lambda x: jdp.replicated(SGD, bucket_bytes=x),
    "bucket_bytes of sync_gradients": lambda x: jdp.sync_gradients(GRADS, bucket_bytes=x),
    "accumulate": lambda x: jdp.value_and_grad(sum, accumulate=x),
    "micro_batch_rows": lambda x: jdp.value_and_grad(sum, micro_batch_rows=x),
    "every": lambda x: jdp.check_replicas({}, every=x),
    "cpu_ranks": lambda x: jdp.init(cpu_ranks=x),
    "num_steps": lambda x: jdp.check_step(
        jdp.train_step(step),
        jdp.TrainState.create({"w": np.ones(2)}, jdp.replicated(SGD)),
        np.ones(2),
        num_steps=x,
    ),
    "num_rows": lambda x: jdp.Sampler(num_rows=x, batch_size=1),
}


@pytest.mark.parametrize("option", TAKES)
def test_what_is_not_an_integer_is_refused(option):
    jdp.init(cpu_ranks=2)
    for wrong in (True, 2.0, "2"):
        with pytest.raises(TypeError, match=rf"\b{option.split()[0]}\b.* {wrong!r}\."):
            TAKES[option](wrong)


@pytest.mark.parametrize("option", TAKES)
def test_integers_of_numpy_are_taken(option):
    jdp.init(cpu_ranks=2)
    TAKES[option](np.int64(2))


def test_a_stage_that_does_not_exist_and_sizes_below_one_are_refused_with_their_value():
    for options in ({"stage": 0}, {"stage": 4}, {"min_size": 0}, {"bucket_bytes": -1}):
        (value,) = options.values()
        with pytest.raises(ValueError, match=rf"\b{[*options][0]}\b.* {value}"):
            jdp.sharded(SGD, **options)
