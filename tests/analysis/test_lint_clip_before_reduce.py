"""Norms of gradients, and clipping by them, before the gradients are averaged: a warning."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp

PARAMS = {"w": np.ones((6, 5), np.float32), "b": np.zeros(5, np.float32)}
BATCH = {"x": np.ones((12, 6), np.float32), "y": np.zeros(12, np.int32)}


def loss_fn(params, batch):
    logits = batch["x"] @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def by_hand(grads):
    factor = jnp.minimum(1, 0.2 / optax.tree.norm(grads))
    return jax.tree.map(lambda g: g * factor, grads)


def by_optax(grads):
    return optax.clip_by_global_norm(0.2).update(grads, optax.EmptyState())[0]


def each_by_its_own(grads):
    return jax.tree.map(lambda g: g / jnp.maximum(1.0, jnp.linalg.norm(g)), grads)


def by_element(grads):
    return jax.tree.map(lambda g: jnp.clip(g, -1, 1), grads)


def in_a_jit(grads):
    return jax.jit(by_hand)(grads)


def with_decay_after_a_loss_scale(grads):
    return by_hand(jax.tree.map(lambda g, p: g / 128 + 1e-4 * p, grads, PARAMS))


def unscaled(grads):
    return jax.tree.map(lambda g: g / 128, grads)


def without_nan(grads):
    return jax.tree.map(jnp.nan_to_num, grads)


def with_decay(grads):
    return jax.tree.map(lambda g, p: g + 1e-4 * p, grads, PARAMS)


def by_the_mean(grads):
    factor = jnp.minimum(1, 0.2 / jdp.mean_over_ranks(optax.tree.norm(grads)))
    return jax.tree.map(lambda g: g * factor, grads)


CLIPPED = [
    by_hand, by_optax, each_by_its_own, by_element, in_a_jit, with_decay_after_a_loss_scale
]  # fmt: skip
LINEAR = [unscaled, without_nan, with_decay, by_the_mean]


def optimizer(stage):
    if not stage:
        return jdp.replicated(optax.sgd(0.1))
    return jdp.sharded(optax.sgd(0.1), stage=stage, min_size=4)


def warned(stage=0, num_ranks=2, *, change=lambda g: g, measure=lambda g: {}, **options):
    """The warnings of a step that changes gradients before the update, and measures them."""

    @jdp.train_step
    def step(state, batch):
        loss, grads = jdp.value_and_grad(loss_fn, **options)(state.params, batch)
        return state.apply_gradients(change(grads)), {"loss": loss, **measure(grads)}

    jdp.init(devices=jax.devices()[:num_ranks])
    state = jdp.TrainState.create(PARAMS, optimizer(stage))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.lower(state, BATCH)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("change", CLIPPED, ids=lambda fn: fn.__name__)
def test_warns_of_gradients_that_are_clipped_before_they_are_averaged(change, num_ranks):
    (text,) = warned(num_ranks=num_ranks, change=change)
    assert "JDP131" in text and "test_lint_clip_before_reduce.py:" in text
    assert "`grads['b']`" in text and "`grads['w']`" in text


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("change", LINEAR, ids=lambda fn: fn.__name__)
def test_does_not_warn_of_gradients_that_are_scaled_alike_on_all_ranks(change, stage):
    assert not warned(stage, change=change)


def norm_of(grads):
    return {"norm": optax.tree.norm(grads)}


def greatest_of(grads):
    return {"norm": jnp.max(jnp.abs(grads["b"]))}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("measure", [norm_of, greatest_of], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("stage", [0, 1])
def test_warns_of_a_norm_of_gradients_that_are_not_averaged(stage, measure, accumulate):
    (text,) = warned(stage, measure=measure, accumulate=accumulate)
    assert "JDP131" in text and "`metrics['norm']`" in text


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("measure", [norm_of, greatest_of], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("stage", [2, 3])
def test_does_not_warn_of_a_norm_of_means(stage, measure, accumulate):
    assert not warned(stage, measure=measure, accumulate=accumulate)


def test_warns_of_a_norm_before_the_gradients_are_scaled():
    (text,) = warned(change=unscaled, measure=norm_of)
    assert "`metrics['norm']`" in text


MEASURED = {
    "of the mean": lambda grads: norm_of(jdp.sync_gradients(grads)),
    "whose mean is asked for": lambda grads: jdp.mean_over_ranks(norm_of(grads)),
    "of the parameters": lambda grads: norm_of(PARAMS),
    "not at all": lambda grads: {"mean": grads["w"].mean() - grads["b"][0]},
}


@pytest.mark.parametrize("measure", MEASURED.values(), ids=MEASURED)
def test_does_not_warn_of_a_norm(measure):
    assert not warned(measure=measure)
