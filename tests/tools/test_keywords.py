"""A step is explained, compared, sized and checked for a call by keyword as for one by position."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp.tools import comparison
from jdp.tools.explain import explain_call

DIM = 16
ROWS = jax.ShapeDtypeStruct((8, DIM), np.float32)


@pytest.fixture
def state():
    jdp.init(devices=jax.devices()[:2])
    params = {"w": np.zeros((DIM, DIM), np.float32)}
    return jdp.TrainState.create(params, jdp.replicated(optax.sgd(0.1)))


def train(state, x, scale=1.0, *, on=None, rates=1.0, step=1.0):
    scale = scale * rates * step * (1.0 if on is None else on)
    grads = jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p["w"]) ** 2) * scale)(state.params)
    return state.apply_gradients(grads), {}


train_step = jdp.train_step(train)


# Of each call: what it takes by position, and by keyword.
def calls(state):
    return [((state,), {"x": ROWS}), ((), {"x": ROWS, "state": state})]


@pytest.mark.parametrize("i", [0, 1])
def test_a_call_by_keyword_is_explained_as_one_by_position(i, state):
    args, keywords = calls(state)[i]
    expected = jdp.explain(train_step, state, ROWS)
    assert str(jdp.explain(train_step, *args, **keywords)) == str(expected)
    plans = comparison.compare(train_step, args, keywords, {"stage": [0, 1]})
    assert sorted(plan.options["stage"] for plan in plans) == [0, 1]


@pytest.mark.parametrize("i", [0, 1])
@pytest.mark.parametrize("make", [lambda: train_step, lambda: lambda rows: train_step])
def test_rows_are_found_for_a_call_by_keyword_as_for_one_by_position(make, i, state):
    args, keywords = calls(state)[i]
    expected = jdp.find_batch_size(make(), state, ROWS, limit_bytes=2**20, max_rows=64)
    found = jdp.find_batch_size(make(), *args, **keywords, limit_bytes=2**20, max_rows=64)
    assert found == expected


@pytest.mark.parametrize("i", [0, 1])
def test_a_call_by_keyword_is_checked(i, state):
    args, keywords = calls(state)[i]
    x = np.ones(ROWS.shape, ROWS.dtype)
    assert jdp.check_step(train_step, *args, **{**keywords, "x": x, "step": 2.0}).cause is None


def test_keywords_named_as_options_of_jdp_reach_the_step(state):
    numbers = {"on": jnp.float32(1), "rates": jnp.float32(1), "step": jnp.float32(1)}
    report = explain_call(train_step, (state, ROWS), numbers, on=None, rates={"matmul_flops": 1e9})
    assert report.memory.other_arguments == 3 * 4
    plans = comparison.compare(train_step, (state, ROWS), numbers, {"stage": [1]}, on="cpu:2")
    assert plans[0].report.memory.other_arguments == 3 * 4
    assert jdp.explain(train_step, state, ROWS, step=numbers["step"]).on
    assert jdp.find_batch_size(train_step, state, ROWS, step=numbers["step"], limit_bytes=2**20)
    bound = jdp.train_step(functools.partial(train, on=2.0))
    assert jdp.explain(bound, state, ROWS).memory.other_arguments == 0


@pytest.mark.parametrize("look", [jdp.explain, jdp.find_batch_size, jdp.check_step])
@pytest.mark.parametrize(
    ("args", "keywords", "text"),
    [
        ((), {}, r"train\(state, x, .*missing a required argument: 'state'"),
        ((1,), {}, r"train\(state, x, .*missing a required argument: 'x'"),
        ((1, ROWS), {"x": ROWS}, r"train\(state, x, .*multiple values for argument 'x'"),
        ((1, ROWS), {"y": 1}, r"train\(state, x, .*unexpected keyword argument 'y'"),
    ],
)
def test_a_call_that_the_step_does_not_take_is_refused_by_its_name(look, args, keywords, text):
    with pytest.raises(TypeError, match=text):
        look(train_step, *args, **keywords)
