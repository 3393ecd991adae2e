"""A state that holds one variable of nnx twice is refused; split by nnx, it trains right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.training import ranks, sgd

import jdp

LEARNING_RATE = 0.25
ROWS = np.arange(24, dtype=np.float32).reshape(12, 2) / 16


class Tied(nnx.Module):
    """Decodes with the weights that it encodes with."""

    def __init__(self):
        self.encoder = nnx.Param(jnp.asarray([[1.0, 0.5], [0.25, -1.0]]))
        self.decoder = self.encoder

    def __call__(self, x):
        return x @ self.encoder[...] @ self.decoder[...]


class HoldingOptimizer(nnx.Module):
    """Changes the variables of a model in their place."""

    def __init__(self, model):
        self.variables = nnx.data(nnx.variables(model, nnx.Param))

    def update(self, grads):
        def update(variable, grad):
            variable[...] -= LEARNING_RATE * grad[...]

        jax.tree.map(
            update, self.variables, grads, is_leaf=lambda node: isinstance(node, nnx.Variable)
        )


class Plain(nnx.Module):
    def __init__(self):
        self.encoder = nnx.Param(jnp.asarray([[1.0, 0.5], [0.25, -1.0]]))

    def __call__(self, x):
        return x @ self.encoder[...]


def loss_fn(model, x):
    return jnp.mean(jnp.square(model(x) - x))


def trained_on_one_device(model):
    """The model after two steps of gradient descent, in nnx alone."""
    for _ in range(2):
        grads = nnx.grad(loss_fn)(model, ROWS)
        HoldingOptimizer(model).update(grads)
    return np.asarray(model.encoder[...])


def in_place_step(state, x):
    model, optimizer = state
    optimizer.update(jdp.sync_gradients(nnx.grad(loss_fn)(model, x)))
    return state, {}


@pytest.mark.parametrize("make", [Tied, Plain], ids=["tied weights", "in the optimizer"])
def test_a_variable_at_two_places_is_refused_with_both(make):
    ranks(2)
    model = make()
    state = (model, HoldingOptimizer(model)) if make is Plain else model
    with pytest.raises(ValueError, match=r"nnx\.split\(state\)") as caught:
        jdp.train_step(in_place_step)(state, ROWS)
    places = "state.decoder` and `state.encoder" if make is Tied else "state[0].encoder` and `state"
    assert places in str(caught.value)


@pytest.mark.parametrize("name", ["params", "model_state"])
def test_a_new_state_refuses_them_too(name):
    given = {"params": jnp.ones(2), name: Tied()}
    with pytest.raises(ValueError, match=rf"`{name}\.decoder` and `{name}\.encoder`"):
        jdp.TrainState.create(**given, tx=sgd())


@pytest.mark.parametrize("make", [Tied, Plain])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_state_that_nnx_split_trains_as_one_device(make, num_ranks):
    ranks(num_ranks)
    model = make()
    graph, values = nnx.split((model, HoldingOptimizer(model)))

    @jdp.train_step
    def step(values, x):
        state = nnx.merge(graph, values, copy=True)
        state, metrics = in_place_step(state, x)
        return nnx.state(state), metrics

    for _ in range(2):
        values, _ = step(values, ROWS)
    got = nnx.merge(graph, values)[0].encoder[...]
    np.testing.assert_allclose(got, trained_on_one_device(make()), rtol=1e-6)


def test_an_evaluation_may_read_a_variable_at_two_places():
    ranks(2)
    measure = jdp.eval_step(lambda model, x: {"loss": loss_fn(model, x)})
    found = measure(Tied(), ROWS)
    np.testing.assert_allclose(found["loss"], loss_fn(Tied(), ROWS), rtol=1e-6)


def test_a_random_stream_that_modules_share_is_accepted():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.first = self.second = rngs
            self.scale = nnx.Param(jnp.ones(()))

    ranks(2)

    @jdp.train_step
    def step(model, x):
        return model, {"scale": model.scale[...]}

    _, metrics = step(Noisy(nnx.Rngs(0)), ROWS)
    assert metrics["scale"] == 1
