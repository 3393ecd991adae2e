"""A mean over this rank's rows that count is a warning unless the mask weighs the ranks."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp

ROWS = {"x": np.arange(6, dtype=np.float32), "y": np.ones((6, 3), np.float32)}


def losses_of(params, batch):
    return (params * batch["x"] - 1) ** 2


def by_the_sum(params, batch):
    return (losses_of(params, batch) * batch["mask"]).sum() / batch["mask"].sum()


def by_at_least_one(params, batch):
    mask = batch["mask"].astype(jnp.float32)
    return jnp.dot(losses_of(params, batch), mask) / jnp.maximum(jnp.dot(mask, mask), 1)


def by_where(params, batch):
    return jnp.mean(losses_of(params, batch), where=batch["mask"])


def by_average(params, batch):
    return jnp.average(losses_of(params, batch), weights=batch["mask"])


def by_shares(params, batch):
    return (losses_of(params, batch) * (batch["mask"] / batch["mask"].sum())).sum()


@jax.checkpoint
def in_a_remat(params, batch):
    return jax.jit(by_the_sum)(params, batch)


def in_a_branch(params, batch):
    return jax.lax.cond(batch["mask"].sum() > 0, by_the_sum, lambda *_: 0.0, params, batch)


def in_a_loop(params, batch):
    parts = jax.tree.map(lambda x: x[None], batch)
    return jax.lax.map(lambda part: by_the_sum(params, part), parts).sum()


def over_all_ranks(params, batch):
    count = jdp.mean_over_ranks(batch["mask"].mean())
    return (losses_of(params, batch) * batch["mask"]).mean() / count


def both_parts_summed(params, batch):
    total = jdp.sum_over_ranks((losses_of(params, batch) * batch["mask"]).sum())
    return total / jdp.sum_over_ranks(batch["mask"].sum())


def weighed_by_hand(params, batch):
    count = batch["mask"].sum()
    return by_the_sum(params, batch) * count / jdp.mean_over_ranks(count * 1.0)


def over_the_entries_of_a_row(params, batch):
    attention = jnp.where(batch["mask"][:, None], jnp.exp(batch["y"]), 1e-9)
    attention = attention / attention.sum(axis=1, keepdims=True)
    return over_all_ranks(params, batch) + (attention * 0).sum()


LOCAL = [
    by_the_sum, by_at_least_one, by_where, by_average, by_shares, in_a_remat, in_a_branch, in_a_loop
]  # fmt: skip
RIGHT = [over_all_ranks, both_parts_summed, weighed_by_hand, over_the_entries_of_a_row]


# The warnings of a step with a loss, or of one that reports it, over 2 ranks.
def warned(loss_fn, evaluates, **options):
    def train(state, batch):
        loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    def measure(state, batch):
        return {"loss": loss_fn(state.params, batch)}

    jdp.init(devices=jax.devices()[:2])
    state = jdp.TrainState.create(jnp.float32(1), jdp.replicated(optax.sgd(0.1)))
    (batch, _) = jdp.batches(ROWS, 4, epochs=1, shuffle=False)
    step = jdp.eval_step(measure, **options) if evaluates else jdp.train_step(train, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.lower(state, batch)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("evaluates", [True, False], ids=["eval_step", "train_step"])
@pytest.mark.parametrize("loss_fn", LOCAL, ids=lambda fn: fn.__name__)
def test_warns_of_a_mean_over_the_rows_of_one_rank(loss_fn, evaluates):
    (text,) = warned(loss_fn, evaluates)
    assert "JDP129" in text and "test_padding.py:" in text
    assert re.findall("weight=.*?[)]", text) == ["weight=lambda batch: batch['mask'].sum()"]
    assert not warned(loss_fn, evaluates, weight=lambda batch: batch["mask"].sum())


@pytest.mark.parametrize("evaluates", [True, False], ids=["eval_step", "train_step"])
@pytest.mark.parametrize("loss_fn", RIGHT, ids=lambda fn: fn.__name__)
def test_does_not_warn_of_a_mean_over_the_rows_of_all_ranks(loss_fn, evaluates):
    assert not warned(loss_fn, evaluates)


def by_a_branch(batch):
    return jax.lax.cond(batch["mask"].any(), lambda: 1.0, lambda: 0.0)


def by_a_loop(batch):
    count = lambda n, mask: (n + mask, None)  # noqa: E731
    return jax.lax.scan(count, jnp.float32(0), batch["mask"])[0]


def by_a_while_loop(batch):
    is_before_padding = lambda i: (i < 2) & batch["mask"][jnp.minimum(i, 1)]  # noqa: E731
    return jax.lax.while_loop(is_before_padding, lambda i: i + 1, 0)


READS_MASK = [
    lambda batch: batch["mask"].sum(),
    lambda batch: jnp.count_nonzero(jnp.where(batch["mask"], batch["x"] + 1, 0)),
    jax.jit(lambda batch: (batch["y"] * batch["mask"][:, None]).sum()),
    jax.checkpoint(lambda batch: jnp.dot(batch["mask"], batch["mask"]) * 0.5),
    lambda batch: jax.vmap(lambda counts, y: counts * y.sum())(batch["mask"], batch["y"]).sum(),
    by_a_branch,
    by_a_loop,
    by_a_while_loop,
]
IGNORES_MASK = [
    lambda batch: batch["mask"].shape[0],
    lambda batch: jnp.ones_like(batch["mask"], float).sum(),
    lambda batch: (batch["y"] > 0).sum(),
    jax.jit(lambda batch: batch["x"].size * jnp.float32(1)),
]


@pytest.mark.parametrize("evaluates", [True, False], ids=["eval_step", "train_step"])
@pytest.mark.parametrize("weight", IGNORES_MASK, ids=["rows", "ones", "entries", "jit"])
def test_warns_of_a_weight_that_does_not_depend_on_the_mask(weight, evaluates):
    (text,) = warned(by_the_sum, evaluates, weight=weight)
    assert "JDP129" in text and "test_padding.py:" in text
    assert "weight=lambda batch: batch['mask'].sum()" in text and text.count("weight=") == 2


@pytest.mark.parametrize("weight", READS_MASK, ids=range(len(READS_MASK)))
def test_does_not_warn_of_a_weight_that_depends_on_the_mask(weight):
    assert not warned(by_the_sum, False, weight=weight)


@pytest.mark.parametrize("weight", IGNORES_MASK, ids=["rows", "ones", "entries", "jit"])
@pytest.mark.parametrize("loss_fn", RIGHT[:2], ids=lambda fn: fn.__name__)
def test_does_not_warn_of_a_plain_weight_where_the_author_counts_all_ranks(loss_fn, weight):
    assert not warned(loss_fn, True, weight=weight)


def test_does_not_warn_where_a_masked_sum_is_divided_by_a_number_of_rows():
    masked = lambda w, batch: (losses_of(w, batch) * batch["mask"]).sum() / 2  # noqa: E731
    assert not warned(masked, False, weight=lambda batch: 2)


def test_warns_of_a_weight_of_micro_batches_alone():
    def train(state, batch):
        fn = jdp.value_and_grad(by_the_sum, accumulate=2, weight=lambda mb: mb["mask"].sum())
        loss, grads = fn(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    jdp.init(devices=jax.devices()[:1])
    state = jdp.TrainState.create(jnp.float32(1), jdp.replicated(optax.sgd(0.1)))
    (batch, _) = jdp.batches(ROWS, 4, epochs=1, shuffle=False)
    with pytest.warns(UserWarning, match="JDP129"):
        jdp.train_step(train).lower(state, batch)


@pytest.mark.parametrize("weight", [IGNORES_MASK[0], READS_MASK[0]], ids=["rows", "mask"])
def test_the_loss_is_that_of_one_rank_only_where_the_weight_depends_on_the_mask(weight):
    losses = []
    for num_ranks in (1, 2):
        jdp.init(devices=jax.devices()[:num_ranks])
        state = jdp.TrainState.create(jnp.float32(1), jdp.replicated(optax.sgd(0.1)))
        _, batch = jdp.batches(ROWS, 4, epochs=1, shuffle=False)

        @jdp.eval_step(weight=weight)
        def measure(state, batch):
            return {"loss": by_the_sum(state.params, batch)}

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses.append(float(measure(state, batch)["loss"]))
    assert (losses[0] == losses[1]) == (weight is READS_MASK[0])
