"""`jdp.value_and_grad(allow_int=True)`: parameters without a gradient among those that train."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.training import assert_close, fetched, ranks

import jdp


def params():
    return {
        "w": np.arange(12, dtype="f").reshape(4, 3) / 8,
        "number": np.int32(3),
        "ids": np.array([[2, 0], [1, 1]], np.int8),
        "is_on": np.array([True, False, True]),
        "key": jax.random.key(4),
    }


def rows():
    return np.arange(48, dtype="f").reshape(12, 4) / 16


def loss_fn(p, x):
    y = (x @ p["w"])[:, p["ids"][0]] * p["is_on"][:2] * p["number"]
    return jnp.square(y).mean() + jax.random.normal(p["key"]) * 2


def with_aux(p, x):
    return loss_fn(p, x), {"number": p["number"] * x.mean()}


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_are_those_of_jax(accumulate):
    (loss, aux), grads = jdp.value_and_grad(
        with_aux, has_aux=True, allow_int=True, accumulate=accumulate
    )(params(), rows())
    (want, want_aux), want_grads = jax.value_and_grad(with_aux, has_aux=True, allow_int=True)(
        params(), rows()
    )
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    np.testing.assert_allclose(aux["number"], want_aux["number"], rtol=1e-6)
    np.testing.assert_allclose(grads["w"], want_grads["w"], rtol=1e-6)
    assert grads.keys() == want_grads.keys()
    for name in grads.keys() - {"w"}:
        assert grads[name].dtype == want_grads[name].dtype == jax.dtypes.float0
        assert grads[name].shape == want_grads[name].shape


def train(n, stage, accumulate):
    ranks(n)
    tx = optax.sgd(0.125, momentum=0.5)
    tx = jdp.sharded(tx, stage=stage, min_size=1) if stage else jdp.replicated(tx)
    given = {name: leaf for name, leaf in params().items() if name != "key"}
    state = jdp.TrainState.create(given, tx)

    def loss(p, x):
        return loss_fn({**p, "key": jax.random.key(4)}, x)

    @jdp.train_step
    def step(state, x):
        fn = jdp.value_and_grad(loss, allow_int=True, accumulate=accumulate)
        loss_of_rank, grads = fn(state.params, x)
        return state.apply_gradients(grads), {"loss": loss_of_rank}

    for _ in range(2):
        state, metrics = step(state, rows())
    return fetched((state.params, metrics))


@pytest.mark.parametrize("stage, accumulate", [(1, 1), (2, 3), (3, 1), (3, 3)])
def test_sharded_states_with_integers_train_as_replicated_does(stage, accumulate):
    got = train(2, stage, accumulate)
    assert_close(got, train(2, 0, accumulate), 1e-6)
    assert got[0]["number"] == 3 and got[0]["w"][1, 2] != params()["w"][1, 2]


def test_without_it_integers_are_refused():
    with pytest.raises(TypeError, match="allow_int"):
        jdp.value_and_grad(loss_fn)(params(), rows())
