"""Derivatives of a whole step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.ranks_rows import count_rows as count
from support.training import ranks

import jdp

ROWS = {"x": np.arange(1, 7, dtype=np.float32), "mask": np.float32([1, 1, 0, 1, 0, 0])}


def masked_mean(values, batch):
    return (values * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1)


def evaluation(weight):
    mean = masked_mean if weight else lambda values, batch: values.mean()
    return jdp.eval_step(lambda p, batch: mean(p * batch["x"], batch), weight=weight)


def training(weight):
    mean = masked_mean if weight else lambda values, batch: values.mean()

    def step(p, batch):
        loss = jax.grad(lambda p: mean((p * batch["x"]) ** 2, batch))
        return p - 0.1 * jdp.sync_gradients(loss(p)), {}

    step = jdp.train_step(step, weight=weight, donate=False)
    return lambda p, batch: step(p, batch)[0]


# The derivatives on one device: of p mean(x), and of p - 0.2 p mean(x ** 2).
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["called", "in a jit"])
@pytest.mark.parametrize(
    ("make", "weight", "derivative"),
    [
        (evaluation, None, 3.5),
        (evaluation, count, 7 / 3),
        (training, None, 1 - 0.2 * 91 / 6),
        (training, count, 1 - 0.2 * 7),
    ],
)
def test_a_step_has_its_derivative_or_none(make, weight, derivative, wrap, num_ranks):
    ranks(num_ranks)
    step = wrap(make(weight))
    function = lambda p: step(p, ROWS)  # noqa: E731
    _, tangent = jax.jvp(function, (jnp.float32(1),), (jnp.float32(1),))
    assert float(tangent) == pytest.approx(derivative, rel=1e-5)
    if weight is None:
        assert float(jax.grad(function)(jnp.float32(1))) == pytest.approx(derivative, rel=1e-5)
    else:
        with pytest.raises(ValueError, match="JDP125"):
            jax.grad(function)(jnp.float32(1))
