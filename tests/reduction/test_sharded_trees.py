"""Gradients and states in `jdp.sharded` that are not built like the parameters."""

import jax
import optax
import pytest
from support import sharded_training as training
from support.training import assert_close, fetched, ranks

import jdp
from jdp.reduction import sharded_update
from jdp.reduction.sharded_update import TreeArrays


def _lookahead(stage):
    """A state whose gradients are those of half of its parameters."""
    tx = training.optimizer(stage, optax.lookahead(optax.sgd(0.1, momentum=0.9), 2, 0.5))
    params = optax.LookaheadParams.init_synced(training.params())
    return jdp.TrainState.create(params, tx)


def _of_fast(state, rows):
    loss, grads = jdp.value_and_grad(training.loss_fn)(state.params.fast, rows)
    return state.apply_gradients(grads), {"loss": loss}


@pytest.mark.parametrize(("n", "stage"), [(2, 1), (3, 3), (8, 2)])
def test_gradients_of_half_of_the_parameters_update_slices(n, stage, monkeypatch):
    found = []

    def partitioned(function, args, axes, want):
        found.append([piece.dim for piece in args])
        return original(function, args, axes, want)

    original = sharded_update.partitioned
    monkeypatch.setattr(sharded_update, "partitioned", partitioned)
    got, state = training.train(n, stage, _of_fast, state=_lookahead)
    num_leaves = len(training.params())
    # Gradients, momentum, and both copies of the parameters; and the number of steps.
    assert all(len(dims) == 4 * num_leaves + 1 for dims in found) and found
    assert all(dims[:num_leaves] == dims[-num_leaves:] for dims in found)
    monkeypatch.undo()
    want, _ = training.train(n, 0, _of_fast, state=lambda _: _lookahead(0))
    assert_close(got, want)


def test_a_gradient_may_be_a_number():
    def program(state, rows):
        loss, grads = jdp.value_and_grad(training.loss_fn)(state.params, rows)
        grads = jax.tree.map(lambda x: jax.lax.pmean(x, "data"), grads)
        return state.apply_gradients({**grads, "scale": 0.5}, synced=True), {}

    ranks(3)
    state = training.make_state(1, optax.sgd(0.1))
    state, _ = jdp.train_step(program)(state, training.batch())
    assert fetched(state.params)["scale"] == pytest.approx(1.0 - 0.1 * 0.5)


def test_leaves_of_a_state_that_are_not_arrays_stay_as_they_are():
    found = TreeArrays({"a": jax.numpy.ones(2), "kind": "sgd", "none": None})
    assert found.tree([3]) == {"a": 3, "kind": "sgd", "none": None}


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((1024, 4096), 0),  # 128 rows each, whole tiles of 8
        ((1000, 4096), 1),  # 125 rows each
        ((64, 4096), 1),  # perhaps vectors of 64 stacked layers
        ((16, 128, 512), 1),
        ((4096, 1024), 0),
        ((50257, 768), 1),
        ((65536,), 0),
        ((3, 5), None),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_a_leaf_is_split_along_rows_that_fill_tiles(shape, dim, dtype):
    sharding = jdp.sharded(optax.sgd(0.1), min_size=1).sharding
    assert sharding.dim(jax.ShapeDtypeStruct(shape, dtype), 8) == dim
