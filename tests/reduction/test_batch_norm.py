"""Statistics for batch normalisation, and their gradients, are those of the batch in one go."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.per_rank import assert_equal_bits, per_rank

import jdp

ROWS, FEATURES = 6, 5


def drawn(num_ranks, *dims):
    draw = np.random.default_rng(num_ranks)
    x = draw.normal(3, 2, size=(num_ranks, ROWS, *dims, FEATURES)).astype(np.float32)
    mask = draw.uniform(size=(num_ranks, ROWS)) < 0.6
    mask[0, 0] = True
    mask[1:2] = False  # only padding
    x[~mask] = np.nan
    return x, mask


def counted(x, mask):
    """Mean and variance of the rows that count, in float64."""
    rows = x[mask].reshape(-1, FEATURES).astype(np.float64)
    return rows.mean(0), rows.var(0)


@pytest.mark.parametrize("dims", [(), (2,), (3, 2)], ids=str)
def test_statistics_are_those_of_the_concatenated_batch(mesh, dims):
    x, mask = drawn(mesh.size, *dims)
    got = per_rank(mesh, lambda rows: jdp.batch_norm_statistics(*rows), (x, mask))
    assert_equal_bits(got)
    for own, want in zip(got, counted(x, mask), strict=True):
        np.testing.assert_allclose(own[0], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mean, std", [(-1e6, 0.1), (1e4, 0.1), (1e8, 100)])
def test_digits_are_kept_where_the_mean_is_large(mesh, mean, std):
    draw = np.random.default_rng(0)
    x = draw.normal(mean, std, size=(mesh.size, 4099, FEATURES)).astype(np.float32)
    mask = draw.uniform(size=x.shape[:2]) < 0.6
    got = per_rank(mesh, lambda rows: jdp.batch_norm_statistics(*rows), (x, mask))
    assert_equal_bits(got)
    want = counted(x, mask)
    assert np.all(np.abs(got[0][0] - want[0]) <= np.spacing(np.float32(abs(mean))))
    np.testing.assert_allclose(got[1][0], want[1], rtol=1e-5)


def test_equal_values_have_no_variance(mesh):
    x = np.full((mesh.size, 1021, FEATURES), np.float32(1e7 / 3))
    mean, var = per_rank(mesh, jdp.batch_norm_statistics, x)
    assert np.all(mean == x[0, 0]) and np.all((var >= 0) & (var < 1e-6))


def test_without_a_mask_every_row_counts(make_mesh):
    x = np.nan_to_num(drawn(3)[0])
    got = per_rank(make_mesh(3), jdp.batch_norm_statistics, x)
    for own, want in zip(got, counted(x, np.ones((3, ROWS), bool)), strict=True):
        np.testing.assert_allclose(own[0], want, rtol=1e-6, atol=1e-6)


def test_rows_count_by_their_weight():
    x = jnp.array([[1.0], [2.0], [6.0]])
    mean, var = jdp.batch_norm_statistics(x, jnp.array([1.0, 2.0, 0.5]))
    repeated = np.repeat([1.0, 2.0, 6.0], [2, 4, 1])
    np.testing.assert_allclose((mean[0], var[0]), (repeated.mean(), repeated.var()), rtol=1e-6)


def test_positions_may_have_a_mask_of_their_own():
    x = np.arange(24, dtype=np.float32).reshape(3, 4, 2)
    mask = np.arange(12).reshape(3, 4) % 5 < 2
    mean, var = jdp.batch_norm_statistics(np.where(mask[..., None], x, np.inf), mask)
    np.testing.assert_allclose(mean, x[mask].mean(0), rtol=1e-6)
    np.testing.assert_allclose(var, x[mask].var(0), rtol=1e-6)


def test_features_may_be_any_dim():
    x = np.random.default_rng(0).normal(size=(4, 3, 2, 5)).astype(np.float32)
    mask = np.array([True, False, True, True])
    got = jdp.batch_norm_statistics(x, mask, feature_dim=1)
    want = jdp.batch_norm_statistics(np.moveaxis(x, 1, -1), mask)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_few_bits_are_summed_in_float32(dtype):
    x = jnp.full((4096, 1), 100, dtype)
    mean, var = jdp.batch_norm_statistics(x)
    assert (mean.dtype, var.dtype) == (jnp.float32, jnp.float32)
    assert (mean.tolist(), var.tolist()) == ([100.0], [0.0])


def test_a_batch_of_padding_has_finite_statistics_and_gradients():
    def fn(x):
        mean, var = jdp.batch_norm_statistics(x, jnp.zeros(3))
        return (mean + var).sum()

    value, grad = jax.value_and_grad(fn)(jnp.full((3, 2), jnp.nan))
    assert float(value) == 0 and not np.any(grad)


# Training


def normalised(p, x, mask):
    mean, var = jdp.batch_norm_statistics(x @ p["w"], mask)
    return (x @ p["w"] - mean) * jax.lax.rsqrt(var + 1e-3) @ p["v"], (mean, var)


def train(num_ranks):
    jdp.init(devices=jax.devices()[:num_ranks])
    draw = np.random.default_rng(7)
    rows = {
        "x": draw.normal(size=(24, 3)).astype(np.float32),
        "y": draw.normal(size=24).astype(np.float32),
        "mask": np.arange(24) % 24 < 11,  # the last ranks of 3 and 8 have only padding
    }
    params = {
        "w": draw.normal(size=(3, 4)).astype(np.float32),
        "v": draw.normal(size=4).astype(np.float32),
    }

    @jdp.train_step(weight=lambda batch: batch["mask"].sum())
    def step(state, batch):
        def loss_fn(p, batch):
            prediction, statistics = normalised(p, batch["x"], batch["mask"])
            errors = jnp.where(batch["mask"], (prediction - batch["y"]) ** 2, 0)
            return errors.sum() / batch["mask"].sum(), statistics

        differentiate = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (mean, var)), grads = differentiate(state.params, batch)
        kept = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state.model_state, (mean, var))
        return state.apply_gradients(grads).replace(model_state=kept), {"loss": loss}

    zeros = np.zeros(4, np.float32)
    tx = jdp.replicated(optax.sgd(0.1))
    state = jdp.TrainState.create(params, tx, model_state=(zeros, zeros))
    for _ in range(3):
        state, metrics = step(state, rows)
    return jax.device_get((state.params, state.model_state, metrics))


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_a_step_trains_as_one_rank_does_with_padding(num_ranks):
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6),
        train(num_ranks),
        train(1),
    )


def test_what_does_not_fit_is_refused():
    for x, mask, error in (
        (jnp.ones((3, 2), int), None, TypeError),
        (jnp.ones(3), None, ValueError),
        (jnp.ones((3, 2)), jnp.ones(2), ValueError),
        (jnp.ones((3, 2)), jnp.ones((3, 2)), ValueError),
        (jnp.ones((3, 2)), 1.0, ValueError),
    ):
        with pytest.raises(error, match=r"\[3"):
            jdp.batch_norm_statistics(x, mask)
