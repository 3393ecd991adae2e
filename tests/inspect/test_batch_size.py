"""The batch that is found fits, and the next larger one does not, by what XLA allocates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp

DIM = 32


def loss_fn(params, batch):
    return jnp.mean(jnp.square(jnp.tanh(batch["x"] @ params["w"]) - batch["y"]))


def make_step(**options):
    @jdp.train_step
    def step(state, batch):
        _, grads = jdp.value_and_grad(loss_fn, **options)(state.params, batch)
        return state.apply_gradients(grads), {}

    return step


def rows(num):
    return {name: jax.ShapeDtypeStruct((num, DIM), np.float32) for name in "xy"}


@pytest.fixture
def state():
    jdp.init(devices=jax.devices()[:2])
    params = {"w": np.zeros((DIM, DIM), np.float32)}
    return jdp.TrainState.create(params, jdp.replicated(optax.sgd(0.1)))


def allocated(step, state, num):
    batch = {name: np.zeros((num, DIM), np.float32) for name in "xy"}
    found = step.lower(state, batch).compile().memory_analysis()
    arrays = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return arrays + found.temp_size_in_bytes


@pytest.mark.parametrize(("granularity", "first"), [(2, 8), (24, 4096)])
def test_the_batch_fits_and_the_next_does_not(granularity, first, state):
    step, limit = make_step(), 400_000
    found = jdp.find_batch_size(
        step, state, rows(first), limit_bytes=limit, granularity=granularity
    )
    assert found.rows % granularity == 0 and found.next_rows == found.rows + granularity
    assert allocated(step, state, found.rows) == found.num_bytes <= limit
    assert allocated(step, state, found.next_rows) == found.next_bytes > limit
    assert found.num_compiled <= 10


def test_the_rows_of_a_micro_batch_fit_and_the_next_that_divide_do_not(state):
    make = lambda rows: make_step(micro_batch_rows=rows)  # noqa: E731
    # A rank has 1024 rows; with 96 of them in a micro-batch, which do not divide it, the step would
    # take more than with 128.
    limit = allocated(make(128), state, 2048)
    found = jdp.find_batch_size(make, state, rows(2048), limit_bytes=limit, granularity=32)
    assert (found.rows, found.next_rows, found.num_bytes) == (128, 256, limit)
    assert allocated(make(256), state, 2048) == found.next_bytes > limit


def test_what_fits_as_asked_for_has_no_next(state):
    found = jdp.find_batch_size(make_step(), state, rows(8), limit_bytes=2**30, max_rows=64)
    assert (found.rows, found.next_rows, found.next_bytes) == (64, None, None)


def test_a_limit_that_not_even_one_row_of_each_rank_fits_is_an_error(state):
    with pytest.raises(ValueError, match="limit is 8.0 KiB"):
        jdp.find_batch_size(make_step(), state, rows(8), limit_bytes=2**13)


def test_without_a_limit_it_asks_for_one(state):
    with pytest.raises(ValueError, match="limit_bytes="):
        jdp.find_batch_size(make_step(), state, rows(8))
