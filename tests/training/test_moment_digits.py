"""An optimizer whose averages have too few bits to move is refused, and no other one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.optimizers import matrices
from support.training import ranks

import jdp

F16, BF16 = jnp.float16, jnp.bfloat16


def params(dtype=BF16):
    return {"w": np.full((8, 8), 0.5, dtype), "b": np.full(8, 0.5, dtype)}


def adamw(**options):
    return optax.adamw(1e-3, **options)


def injected(optimizer=optax.adamw, **options):
    return optax.inject_hyperparams(optimizer)(learning_rate=1e-3, **options)


def of_nothing_but(update, init=jnp.zeros_like):
    """A transformation whose state is one tree, `mean`."""

    def updated(grads, state, params=None):
        return grads, {"mean": jax.tree.map(update, grads, state["mean"])}

    return optax.GradientTransformation(lambda p: {"mean": jax.tree.map(init, p)}, updated)


def stepwise(decay):
    return of_nothing_but(lambda g, mean: mean + (1 - decay) * (g - mean))


def pulled_to_an_anchor():
    """The parameters at the start, which no update changes."""

    def update(grads, state, params):
        pulled = jax.tree.map(lambda g, p, a: g + 0.1 * p - 0.9999 * a, grads, params, state)
        return pulled, state

    return optax.GradientTransformation(lambda p: jax.tree.map(jnp.copy, p), update)


REFUSED = {
    "adamw": (adamw(), "nu['b']", "0.999"),
    "amsgrad": (optax.amsgrad(1e-3), "nu['b']", "0.999"),
    "adabelief": (optax.adabelief(1e-3), "nu['b']", "0.999"),
    "slow first moment": (adamw(b1=0.9999, b2=0.9), "mu['b']", "0.9999"),
    "in a chain": (optax.chain(optax.clip(1.0), adamw()), "opt_state[1][0].nu", "0.999"),
    "in MultiSteps": (optax.MultiSteps(adamw(), 4).gradient_transformation(), "nu['b']", "0.999"),
    "masked": (optax.masked(adamw(), matrices), "inner_state[0].nu['w']", "0.999"),
    "if finite": (optax.apply_if_finite(adamw(), 3), "inner_state[0].nu", "0.999"),
    "injected, which rounds it": (injected(), "nu['b']", "hyperparam_dtype=jnp.float32"),
    "injected for a mean": (
        injected(optax.adam, b1=0.9999, b2=0.9),
        "mu['b']",
        "hyperparam_dtype=jnp.float32",
    ),
    "injected yogi": (injected(optax.yogi), "nu['b']", "hyperparam_dtype=jnp.float32"),
    "yogi": (optax.yogi(0.1), "nu['b']", "0.999"),
    "by steps to the new value": (stepwise(0.999), "['mean']['b']", "0.999"),
    "sm3": (optax.sm3(0.1), "mu['b'][0]", "256 steps"),
    "adafactor, later": (optax.adafactor(1e-3, min_dim_size_to_factor=4), "v_row['w']", "0.9993"),
    "adagrad": (optax.adagrad(1e-3), "sum_of_squares['b']", "256 steps"),
    "beside one that needs the loss": (
        optax.chain(adamw(), optax.contrib.reduce_on_plateau()),
        "opt_state[0][0].nu",
        "0.999",
    ),
    "muon's adam": (optax.contrib.muon(1e-3), "nu['b']", "0.999"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_average_that_would_not_move_is_refused_by_path_with_its_decay(case):
    ranks(2)
    tx, *texts = REFUSED[case]
    with pytest.raises(ValueError, match="JDP130") as raised:
        jdp.TrainState.create(params(), jdp.sharded(tx, stage=1, min_size=1))
    for text in ("bfloat16[", *texts):
        assert text in str(raised.value)


@pytest.mark.parametrize(
    "tx",
    [adamw(b2=0.99), optax.rmsprop(0.1), optax.adadelta(0.1)],
    ids=["adamw", "rmsprop", "adadelta"],
)
def test_squares_in_float16_are_refused(tx):
    with pytest.raises(ValueError, match=r"float16\[.*below 0.00017.*JDP130"):
        jdp.TrainState.create(params(F16), jdp.replicated(tx))


ACCEPTED = {
    "a decay that bfloat16 has": (adamw(b2=0.99), BF16),
    "a mean of gradients in bfloat16": (adamw(mu_dtype=BF16), np.float32),
    "float32": (adamw(b2=0.99999), np.float32),
    "rmsprop": (optax.rmsprop(0.1), BF16),
    "momentum": (optax.sgd(0.1, momentum=0.99), BF16),
    "momentum in float16": (optax.sgd(0.1, momentum=0.99), F16),
    "lion": (optax.lion(1e-3), BF16),
    "yogi with a decay that bfloat16 has": (optax.yogi(0.1, b2=0.99), BF16),
    "injected, a decay that bfloat16 has": (injected(b2=0.99), BF16),
    "a factor of 1, injected": (optax.inject_hyperparams(optax.scale)(1.0), BF16),
    "by steps to the new value": (stepwise(0.99), BF16),
    "squares that are not a sum": (of_nothing_but(lambda g, mean: g + 0.9 * (mean - g * g)), BF16),
    "an anchor": (pulled_to_an_anchor(), BF16),
    "an anchor in MultiSteps": (
        optax.MultiSteps(pulled_to_an_anchor(), 4).gradient_transformation(),
        BF16,
    ),
    "an optimizer that wants more arguments": (optax.contrib.momo(1e-3), BF16),
    "a schedule": (optax.adamw(optax.cosine_decay_schedule(0.1, 20), b2=0.95), BF16),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_moves_is_accepted(case):
    ranks(2)
    tx, dtype = ACCEPTED[case]
    jdp.TrainState.create(params(dtype), jdp.sharded(tx, stage=3, min_size=1))


@pytest.mark.parametrize("b2, moves", [(0.999, False), (0.99, True)])
def test_the_average_of_optax_falls_exactly_where_it_is_accepted(b2, moves):
    tx = adamw(b2=b2)
    state = tx.init(params())
    large, small = (jax.tree.map(lambda p, v=v: jnp.full_like(p, v), params()) for v in (4, 0.125))
    _, first = tx.update(large, state, params())
    _, later = tx.update(small, first, params())
    assert (later[0].nu["w"] < first[0].nu["w"]).all() == moves


@pytest.mark.parametrize("tx", [adamw(), injected()], ids=["adamw", "injected"])
def test_a_state_that_is_only_described_is_refused_too(tx):
    with pytest.raises(ValueError, match="JDP130"):
        jax.eval_shape(lambda p: jdp.TrainState.create(p, jdp.replicated(tx)), params())


def test_a_decay_that_comes_closer_to_one_is_not_answered_with_another_decay():
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=4)
    with pytest.raises(ValueError, match="after 10,000 steps.*JDP130") as raised:
        jdp.TrainState.create(params(), jdp.replicated(tx))
    assert "b2" not in str(raised.value)
