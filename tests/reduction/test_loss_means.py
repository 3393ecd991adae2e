"""The loss of `jdp.value_and_grad` goes with the gradients, and comes back as the right mean."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.training import ranks

import jdp

# Whole numbers: every mean over 24 rows is exact in float32, in any order.
ROWS = {"x": np.arange(24.0, dtype=np.float32) * 24, "weight": np.arange(24) % 3 > 0}


def params():
    return {"w": jnp.zeros((8, 3)), "b": jnp.float32(1)}


def rows_loss(params, batch):
    return jnp.mean(batch["x"]) * params["b"] + params["w"].sum()


OPTIMIZERS = {
    "replicated": jdp.replicated,
    **{
        f"stage {i}": lambda tx, stage=i: jdp.sharded(tx, stage=stage, min_size=2)
        for i in (1, 2, 3)
    },
}


def new_state(name="replicated", **options):
    return jdp.TrainState.create(params(), OPTIMIZERS[name](optax.sgd(2.0**-10), **options))


def stepping(loss_fn=rows_loss, *, reports=lambda value: {"loss": value}, weight=None, **options):
    """A step that reports what its loss returns."""

    @jdp.train_step(weight=weight)
    def step(state, batch):
        value, grads = jdp.value_and_grad(loss_fn, **options)(state.params, batch)
        return state.apply_gradients(grads), reports(value)

    return step


def num_calls(step, state, operation="all_reduce"):
    return step.lower(state, ROWS).as_text().count(f"stablehlo.custom_call @jdp_{operation}(")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_loss_takes_no_call_of_its_own(name, accumulate):
    ranks(2)
    step, state = stepping(accumulate=accumulate), new_state(name)
    # All gradients are sent together, those that stay whole too, but for those of micro-batches.
    is_together = name == "stage 1" or (name != "replicated" and accumulate == 1)
    assert num_calls(step, state) == (not is_together)
    assert num_calls(step, state, "reduce_scatter") == (name != "replicated")
    assert float(step(state, ROWS)[1]["loss"]) == ROWS["x"].mean()


@pytest.mark.parametrize(
    ("n", "name"), [(1, "replicated"), (2, "stage 3"), (3, "replicated"), (8, "stage 1")]
)
def test_loss_and_aux_are_the_means_over_all_rows(n, name):
    ranks(n)

    def loss_fn(params, batch):
        rows = {"of all": batch["x"].max(), "rows": jdp.rows(batch["x"])}
        return rows_loss(params, batch), {**rows, "vector": jnp.arange(2), "number": 3}

    reports = lambda value: {"loss": value[0], **value[1], "twice": value[0] * 2}  # noqa: E731
    state, metrics = stepping(loss_fn, reports=reports, has_aux=True)(new_state(name), ROWS)
    assert float(metrics["loss"]) == ROWS["x"].mean()
    assert float(metrics["twice"]) == 2 * ROWS["x"].mean()
    np.testing.assert_allclose(metrics["of all"], ROWS["x"].reshape(n, -1).max(1).mean(), 1e-7)
    np.testing.assert_array_equal(metrics["rows"], ROWS["x"])
    assert int(metrics["number"]) == 3
    for shard in metrics["loss"].addressable_shards:
        assert float(shard.data) == ROWS["x"].mean()
    np.testing.assert_array_equal(state.params["w"], np.full((8, 3), -(2.0**-10)))


@pytest.mark.parametrize(
    ("n", "name"), [(1, "stage 2"), (2, "replicated"), (3, "replicated"), (3, "stage 2")]
)
def test_ranks_count_by_their_weights_and_not_at_all_with_a_weight_of_0(n, name):
    ranks(n)
    weight = np.where(np.arange(24) < 8, 0, ROWS["weight"])
    rows = {"x": np.where(weight, ROWS["x"], np.nan), "weight": weight.astype(np.float32)}

    def loss_fn(params, batch):
        kept = jnp.where(batch["weight"] > 0, batch["x"], 0).sum() / batch["weight"].sum()
        return kept * params["b"] + params["w"].sum()  # 0 / 0 on the first of 3 ranks

    step = stepping(loss_fn, weight=lambda batch: batch["weight"].sum())
    _, metrics = step(new_state(name), rows)
    np.testing.assert_allclose(metrics["loss"], ROWS["x"][weight > 0].mean(), 1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("sent", [None, jnp.bfloat16])
def test_a_loss_keeps_its_dtype_and_is_not_rounded_as_gradients_are(dtype, sent):
    ranks(3)

    def loss_fn(params, batch):  # 1000, 1001 and 1008: bfloat16 holds multiples of 4 there
        of_rank = jnp.asarray([1000.0, 1001.0, 1008.0])[jax.lax.axis_index("data")]
        return (of_rank + params["w"].sum() + params["b"] - 1).astype(dtype)

    _, metrics = stepping(loss_fn)(new_state(reduce_dtype=sent), ROWS)
    of_ranks = jnp.asarray([1000.0, 1001.0, 1008.0]).astype(dtype).astype(jnp.float32)
    assert metrics["loss"].dtype == dtype
    assert metrics["loss"] == of_ranks.mean().astype(dtype)


def test_an_algorithm_of_the_authors_does_not_get_the_loss():
    ranks(2)
    seen = []

    def rounding(buckets, axis_name, *, scale=1.0, mesh=None):
        seen.append([leaf.shape for bucket in buckets for leaf in bucket])
        return jdp.collectives.xla(buckets, axis_name, scale=scale, mesh=mesh)

    step = stepping()
    _, metrics = step(new_state(all_reduce=rounding), ROWS)
    assert float(metrics["loss"]) == ROWS["x"].mean()
    assert all(len(shapes) == 2 for shapes in seen)


def test_a_loss_that_is_not_reported_is_not_sent():
    ranks(2)
    step, state = stepping(reports=lambda value: {}), new_state()
    text = step.lower(state, ROWS).as_text()
    (call,) = [line for line in text.splitlines() if "@jdp_all_reduce(" in line]
    results = call.split("->")[-1]
    assert results.count("tensor<") == 3  # the token, `w` and `b`


def test_many_metrics_of_a_loss_are_sent_as_one_array():
    ranks(2)

    def loss_fn(params, batch):
        return rows_loss(params, batch), [batch["x"].mean() + i for i in range(40)]

    step = stepping(loss_fn, reports=lambda value: {"all": value[1]}, has_aux=True)
    text = step.lower(new_state(), ROWS).as_text()
    (call,) = [line for line in text.splitlines() if "@jdp_all_reduce(" in line]
    assert call.split("->")[-1].count("tensor<") == 4
    _, metrics = step(new_state(), ROWS)
    assert [float(x) for x in metrics["all"]] == [ROWS["x"].mean() + i for i in range(40)]


def test_losses_of_two_models_are_each_their_own_mean():
    ranks(3)

    @jdp.train_step
    def step(pair, batch):
        losses = {}
        states = []
        for i, state in enumerate(pair):
            fn = jdp.value_and_grad(lambda p, b, i=i: rows_loss(p, b) * (i + 1))
            losses[str(i)], grads = fn(state.params, batch)
            states.append(state.apply_gradients(grads))
        return tuple(states), losses

    _, metrics = step((new_state(), new_state()), ROWS)
    assert [float(metrics[i]) for i in "01"] == [ROWS["x"].mean(), 2 * ROWS["x"].mean()]


def test_losses_of_a_loop_within_a_step_are_means():
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        def one(state, scale):
            fn = jdp.value_and_grad(lambda p, b: rows_loss(p, b) * scale)
            loss, grads = fn(state.params, batch)
            return state.apply_gradients(grads), loss

        state, losses = jax.lax.scan(one, state, jnp.asarray([1.0, 2.0]))
        return state, {"first": losses[0], "last": losses[1]}

    _, metrics = step(new_state(), ROWS)
    mean, rate = ROWS["x"].mean(), 2.0**-10
    assert float(metrics["first"]) == mean
    last = 2 * (mean * (1 - rate * mean) - 24 * rate)
    np.testing.assert_allclose(metrics["last"], last, 1e-6)


def test_a_loss_under_a_condition_is_a_mean():
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        differentiate = jdp.value_and_grad(rows_loss)
        pair = jax.lax.cond(
            state.step == 0, lambda: differentiate(state.params, batch),
            lambda: differentiate(state.params, batch),
        )  # fmt: skip
        return state.apply_gradients(pair[1]), {"loss": pair[0]}

    _, metrics = step(new_state(), ROWS)
    assert float(metrics["loss"]) == ROWS["x"].mean()
