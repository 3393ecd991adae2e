"""The batch that is found fits, and the next larger one does not, by what XLA allocates."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.training import step_of

import jdp
from jdp.tools import batch_size
from jdp.tools.batch_size import Search
from jdp.tools.compiled import TooLargeError

DIM = 32


def loss_fn(params, batch):
    return jnp.mean(jnp.square(jnp.tanh(batch["x"] @ params["w"]) - batch["y"]))


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
    step, limit = step_of(loss_fn), 400_000
    found = jdp.find_batch_size(
        step, state, rows(first), limit_bytes=limit, granularity=granularity
    )
    assert found.rows % granularity == 0 and found.next_rows == found.rows + granularity
    assert allocated(step, state, found.rows) == found.num_bytes <= limit
    assert allocated(step, state, found.next_rows) == found.next_bytes > limit
    assert found.num_compiled <= 10


def test_the_rows_of_a_micro_batch_fit_and_the_next_that_divide_do_not(state):
    make = lambda rows: step_of(loss_fn, micro_batch_rows=rows)  # noqa: E731
    # A rank has 1024 rows; with 96 of them in a micro-batch, which do not divide it, the step would
    # take more than with 128.
    limit = allocated(make(128), state, 2048)
    found = jdp.find_batch_size(make, state, rows(2048), limit_bytes=limit, granularity=32)
    assert (found.rows, found.next_rows, found.num_bytes) == (128, 256, limit)
    assert allocated(make(256), state, 2048) == found.next_bytes > limit


def test_what_fits_as_asked_for_has_no_next(state):
    found = jdp.find_batch_size(step_of(loss_fn), state, rows(8), limit_bytes=2**30, max_rows=64)
    assert (found.rows, found.next_rows, found.next_bytes) == (64, None, None)


def test_a_limit_that_not_even_one_row_of_each_rank_fits_is_an_error(state):
    with pytest.raises(ValueError, match="limit is 8.0 KiB"):
        jdp.find_batch_size(step_of(loss_fn), state, rows(8), limit_bytes=2**13)


def test_without_a_limit_it_asks_for_one(state):
    with pytest.raises(ValueError, match="limit_bytes="):
        jdp.find_batch_size(step_of(loss_fn), state, rows(8))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"granularity": 3}, ValueError, "granularity=3.*2 ranks.*granularity=4"),
        ({"granularity": 0}, ValueError, "granularity.*at least 1"),
        ({"granularity": 2**40}, ValueError, "^granularity=1099511627776.*8192 rows"),
        ({"granularity": 4, "max_rows": 2}, ValueError, "max_rows.*at least 4"),
        ({"limit_bytes": 1e6}, TypeError, "limit_bytes.*1000000.0"),
    ],
)
def test_options_that_no_batch_has_are_an_error(options, error, match, state):
    with pytest.raises(error, match=match):
        jdp.find_batch_size(step_of(loss_fn), state, rows(8), **{"limit_bytes": 2**20, **options})


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ({}, "no arrays"),
        ({"x": np.zeros((8, DIM)), "step": np.float32(1)}, r"batch\['step'\] \[\]"),
        ({"x": np.zeros((8, DIM)), "y": np.zeros(4)}, r"\[8, 32\].*batch\['y'\] \[4\]"),
    ],
)
def test_a_batch_whose_arrays_have_no_equal_first_dim_is_an_error(batch, match, state):
    with pytest.raises(ValueError, match=match):
        jdp.find_batch_size(step_of(loss_fn), state, batch, limit_bytes=2**20)


def test_micro_batches_of_which_none_divides_the_rows_are_an_error(state):
    make = lambda rows: step_of(loss_fn, micro_batch_rows=rows)  # noqa: E731
    with pytest.raises(ValueError, match="7 rows.*granularity=3"):
        jdp.find_batch_size(make, state, rows(14), limit_bytes=2**20, granularity=3)


@pytest.mark.parametrize("num", [1, 15])
def test_rows_that_the_ranks_cannot_share_are_an_error_for_micro_batches(num, state):
    asked = []
    make = lambda rows: asked.append(rows) or step_of(loss_fn, micro_batch_rows=rows)  # noqa: E731
    with pytest.raises(ValueError, match=rf"\[{num}, 32\].*by 2 ranks"):
        jdp.find_batch_size(make, state, rows(num), limit_bytes=2**20)
    assert asked == [1]  # no step was compiled


def test_one_row_is_tried_for_each_of_many_ranks():
    assert [*batch_size._of_batch(1, 3000, None, None)] == [3000]


@pytest.mark.parametrize("step", [lambda state, batch: (state, {}), lambda rows: None, 3])
def test_a_function_that_is_neither_a_step_nor_makes_one_is_refused(step, state):
    with pytest.raises(TypeError, match=r"jdp\.train_step"):
        jdp.find_batch_size(step, state, rows(8), limit_bytes=2**20)


@pytest.mark.parametrize("first", [8, 1024])
def test_rows_that_xla_does_not_compile_do_not_fit(first, state, monkeypatch):
    # As for TPUs: XLA says itself that more than 100 rows take too much memory.
    original = batch_size.compile_step

    def compile_step(step, args, *others):
        if args[1]["x"].shape[0] > 100:
            raise TooLargeError
        return original(step, args, *others)

    monkeypatch.setattr(batch_size, "compile_step", compile_step)
    found = jdp.find_batch_size(step_of(loss_fn), state, rows(first), limit_bytes=2**40)
    assert (found.rows, found.next_rows, found.next_bytes) == (100, 102, None)
    assert found.num_bytes == allocated(step_of(loss_fn), state, 100) and found.num_compiled <= 16


def test_state_of_rows_has_as_many_as_the_batch_that_is_tried(state):
    @jdp.train_step
    def step(state, batch):
        hidden = jnp.tanh(state.model_state["hidden"].value + batch["x"])
        own = jdp.per_rank(state.model_state["own"].value + hidden.sum())
        return state.replace(model_state={"hidden": jdp.per_rank(hidden), "own": own}), {}

    kept = {"hidden": np.zeros((8, DIM), np.float32), "own": np.zeros((2, DIM), np.float32)}
    state = state.replace(model_state=jax.tree.map(jdp.per_rank, kept))
    found = jdp.find_batch_size(step, state, rows(8), limit_bytes=2**20, max_rows=64)
    kept["hidden"] = np.zeros((64, DIM), np.float32)
    state = state.replace(model_state=jax.tree.map(jdp.per_rank, kept))
    assert (found.rows, found.num_bytes) == (64, allocated(step, state, 64))


@pytest.mark.parametrize("limit", [0, 1, 37, 998, 999, 5000])
@pytest.mark.parametrize("known", [0, 500, 999])
def test_the_search_ends_at_the_last_number_that_fits(limit, known):
    asked = []

    def bytes_of(rows):
        asked.append(rows)
        return math.inf if rows > 700 else rows

    search = Search(bytes_of, limit, range(1000))
    search.fits(known)
    assert search.last_that_fits() == min(limit, 700)
    assert len(asked) == len({*asked}) <= 20
