"""Leaves whose gradient is no gradient: Flax's fp8 statistics, and reductions that are declared."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITTEN
from flax.linen.fp8_ops import Fp8DirectDotGeneralOp
from flax.training.train_state import TrainState as FlaxTrainState
from support.training import ranks

import jdp

SGD = optax.sgd(0.001)
# The first row has the largest entries, so that the ranks' statistics differ.
X = np.random.default_rng(0).normal(size=(12, 16)) * np.linspace(3, 1, 12)[:, None]
X = X.astype(np.float32)
BATCH = {"x": X, "y": np.ones((12, 16), np.float32)}


class Fp8Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(16, dot_general_cls=Fp8DirectDotGeneralOp)(x))
        return nn.Dense(16, dot_general_cls=Fp8DirectDotGeneralOp)(x)


MODEL = Fp8Model()


def loss_fn(variables, batch):
    return 1024 * jnp.mean((MODEL.apply(variables, batch["x"]) - batch["y"]) ** 2)


def variables():
    return MODEL.init(jax.random.key(0), X[:1])


@pytest.fixture(scope="module")
def want():
    """Three steps of Flax's own state on one device."""
    state = FlaxTrainState.create(apply_fn=None, params=variables(), tx=SGD)
    fit = jax.jit(lambda state: state.apply_gradients(grads=jax.grad(loss_fn)(state.params, BATCH)))
    for _ in range(3):
        state = fit(state)
    return state.params


def of_flax(tx):
    return FlaxTrainState.create(apply_fn=MODEL.apply, params=variables(), tx=tx)


def of_jdp(tx):
    return jdp.TrainState.create(variables(), tx)


def fit_flax(state, grads):
    return state.apply_gradients(grads=grads)


def fit_jdp(state, grads):
    return state.apply_gradients(grads)


def optimizer(stage):
    return jdp.sharded(SGD, stage=stage, min_size=1) if stage else jdp.replicated(SGD)


def assert_equals(got, want, num_parts):
    """Compare with one device; the gradient of each part's mean is num_parts times larger there."""
    got, want = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (got, want))
    for path, leaf in want.items():
        name = jax.tree_util.keystr(path)
        is_of_gradient = "output_grad" in name
        # A scale is that of the statistics before: in the first step it is 1.
        scaled = leaf * num_parts if is_of_gradient else leaf
        np.testing.assert_allclose(got[path], scaled, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("accumulate", [None, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("make", "fit"), [(of_flax, fit_flax), (of_jdp, fit_jdp)])
def test_fp8_layers_of_flax_have_the_statistics_of_one_device(make, fit, stage, accumulate, want):
    @jdp.train_step
    def step(state, batch):
        grads = jdp.value_and_grad(loss_fn, accumulate=accumulate)(state.params, batch)[1]
        return fit(state, grads), {}

    ranks(2)
    state = make(optimizer(stage))
    for _ in range(3):
        state, _ = step(state, BATCH)
    assert_equals(state.params, want, num_parts=2 * (accumulate or 1))


@pytest.mark.parametrize(("make", "fit"), [(of_flax, fit_flax), (of_jdp, fit_jdp)])
def test_statistics_stay_wide_where_parameters_are_gathered_in_fewer_bits(make, fit):
    @jdp.train_step
    def step(state, batch):
        return fit(state, jdp.value_and_grad(loss_fn)(state.params, batch)[1]), {}

    ranks(2)
    tx = jdp.sharded(SGD, stage=3, min_size=1, gather_dtype=jnp.bfloat16)
    start = variables()
    start[OVERWRITTEN] = jax.tree.map(lambda x: x + jnp.float32(1.001), start[OVERWRITTEN])
    state = make(tx).replace(params=start)
    state, _ = step(state, BATCH)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), start["params"])
    parts = [{name: x[rows] for name, x in BATCH.items()} for rows in (slice(6), slice(6, 12))]
    of_ranks = [jax.grad(loss_fn)({**start, "params": narrow}, part) for part in parts]
    want = jax.tree.map(jnp.maximum, *(grads[OVERWRITTEN] for grads in of_ranks))
    got = state.params[OVERWRITTEN]
    assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {np.dtype(np.float32)}
    assert_equals(got, want, num_parts=1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_state_of_jdp_overwrites_statistics_with_gradients_of_jax(stage, want):
    @jdp.train_step
    def step(state, batch):
        return state.apply_gradients(jax.grad(loss_fn)(state.params, batch)), {}

    ranks(2)
    state = of_jdp(optimizer(stage))
    for _ in range(3):
        state, _ = step(state, BATCH)
    assert_equals(state.params, want, num_parts=2)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_sync_gradients_takes_the_maxima_of_statistics(num_ranks, want):
    @jdp.train_step
    def step(state, batch):
        grads = jdp.sync_gradients(jax.grad(loss_fn)(state.params, batch))
        return state.apply_gradients(grads, synced=True), {}

    ranks(num_ranks)
    state = of_jdp(optimizer(0))
    for _ in range(3):
        state, _ = step(state, BATCH)
    assert_equals(state.params, want, num_parts=num_ranks)


def test_a_state_of_flax_with_gradients_of_jax_is_refused_and_the_error_names_what_works():
    @jdp.train_step
    def step(state, batch):
        return state.apply_gradients(grads=jax.grad(loss_fn)(state.params, batch)), {}

    ranks(2)
    with pytest.raises(ValueError, match=r"JDP101(.|\n)*jdp\.value_and_grad"):
        step(of_flax(optimizer(0)), BATCH)


@jax.custom_vjp
def noted(x, statistic):
    return x


noted.defvjp(
    lambda x, statistic: (x, (x, statistic)),
    lambda kept, slope: (
        slope,
        {
            "largest": jnp.abs(kept[0]).max(),
            "least": kept[0].min(),
            "count": (kept[0] > 0).sum().astype(jnp.float32),
        },
    ),
)


@pytest.mark.parametrize("accumulate", [None, 2, 3])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("weight", [None, lambda batch: batch["m"].sum()])
def test_declared_reductions_combine_over_ranks_and_micro_batches(stage, accumulate, weight):
    reductions = {"largest": "max", "least": "min", "count": "sum"}
    statistic = {name: jnp.float32(0) for name in reductions}

    def loss(params, batch):
        x = noted(batch["x"], params["noted"])
        return jnp.mean(x @ params["w"])

    @jdp.train_step(weight=weight)
    def step(state, batch):
        params = {"w": state["train"].params["w"], "noted": state["noted"]}
        gradient = jdp.value_and_grad(loss, accumulate=accumulate, reductions=reductions)
        grads = gradient(params, batch)[1]
        train = state["train"].apply_gradients({"w": grads["w"]})
        return {"train": train, "noted": grads["noted"]}, {}

    ranks(2)
    w = jnp.ones((16, 4))
    train = jdp.TrainState.create({"w": w}, optimizer(stage))
    state, _ = step({"train": train, "noted": statistic}, {"x": X, "m": np.ones(12, np.float32)})
    found = state["noted"]
    assert float(found["largest"]) == np.abs(X).max() and float(found["least"]) == X.min()
    assert float(found["count"]) == (X > 0).sum()
    want = w - 0.001 * jax.grad(lambda w: jnp.mean(X @ w))(w)
    np.testing.assert_allclose(state["train"].params["w"], want, rtol=1e-5)


@pytest.mark.parametrize("reductions", [{"absent": "max"}, {"w": "median"}])
def test_a_declaration_without_effect_is_refused(reductions):
    with pytest.raises(ValueError, match="reductions="):
        jdp.value_and_grad(lambda p, x: (p["w"] * x).mean(), reductions=reductions)(
            {"w": jnp.ones(3)}, jnp.ones((2, 3))
        )


def test_scanned_layers_refuse_statistics_among_their_parameters():
    with pytest.raises(ValueError, match="xs="):
        jdp.scan_layers(lambda x, p: (x, None), jnp.ones(2), {OVERWRITTEN: {"a": jnp.ones((2, 1))}})
