"""`eval_step` gathers the parameters of a state that is split where it reads them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import sharded_training as model
from support.training import ranks

import jdp

DIM = 256
LAYER = 4 * DIM * DIM  # bytes; a group of parameters holds one layer


def temporary(num_layers, **options):
    """Temporary bytes of a rank, in layers, of an evaluation of equal layers."""
    layers = [np.full((DIM, DIM), 0.01, np.float32)] * num_layers
    tx = jdp.sharded(optax.sgd(0.1), stage=3, bucket_bytes=LAYER, **options)
    step = jdp.eval_step(lambda state, x: {"loss": model.of_layers(state.params, x)})
    lowered = step.lower(jdp.TrainState.create(layers, tx), np.zeros((64, DIM), np.float32))
    return lowered.compile().memory_analysis().temp_size_in_bytes / LAYER


@pytest.mark.optimized
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_twelve_layers_take_the_memory_of_two(num_ranks):
    ranks(num_ranks)
    assert temporary(12) < 3


def test_with_keep_gathered_all_parameters_are_there_at_once():
    ranks(2)
    assert temporary(12, keep_gathered=True) > 11


def metrics(state, rows):
    losses = model.losses(state.params, rows)
    return {
        "loss": losses.mean(),
        "sum": jdp.sum_over_ranks(losses.sum()),
        "rows": jdp.rows(losses),
        "largest": jnp.max(state.params["w"]),
        "parameter": state.params["v"],
        "number": 2.0,
        "average": jax.tree.map(jnp.sum, state.model_state),
    }


@pytest.mark.parametrize("weight", [None, lambda rows: rows["counts"].sum()])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_every_metric_is_that_of_a_state_that_is_whole(num_ranks, weight):
    ranks(num_ranks)
    step = jdp.eval_step(metrics, weight=weight)
    params = model.params()
    found = [
        jax.device_get(
            step(
                jdp.TrainState.create(params, model.optimizer(stage), model_state=params),
                model.batch(),
            )
        )
        for stage in (0, 3)
    ]
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-6), *found)


def test_scanned_layers_gather_a_layer_at_a_time():
    ranks(4)
    layers = np.random.default_rng(0).normal(size=(12, DIM, DIM)).astype("f") / 16
    x = np.ones((8, DIM), np.float32)

    def loss(params, x):
        return jnp.mean(jdp.scan_layers(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0] ** 2)

    step = jdp.eval_step(lambda state, x: {"loss": loss(state.params, x)})
    state = jdp.TrainState.create(layers, jdp.sharded(optax.sgd(0.1), stage=3))
    np.testing.assert_allclose(step(state, x)["loss"], loss(layers, x), rtol=1e-5)
    memory = step.lower(state, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 5 * LAYER


def test_a_parameter_whose_value_is_asked_for_is_named():
    ranks(2)
    step = jdp.eval_step(lambda state, x: {"x": x.sum() if state.params["w"].sum() > 0 else 0.0})
    with pytest.raises(TypeError, match=r"(?s)`state\.params\['w'\]` at test_sharded_eval.*JDP127"):
        step(jdp.TrainState.create(model.params(), model.optimizer(3)), np.ones((6, 2)))


def test_a_metric_that_differs_from_rank_to_rank_is_refused_by_its_line():
    ranks(2)
    step = jdp.eval_step(lambda state, x: {"x": state.params["w"] * jax.lax.axis_index("data")})
    with pytest.raises(ValueError, match=r"`metrics\['x'\]`.*test_sharded_evaluation\.py.*JDP102"):
        step(jdp.TrainState.create(model.params(), model.optimizer(3)), np.ones((6, 2)))
