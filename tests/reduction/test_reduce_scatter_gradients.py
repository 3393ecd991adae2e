"""Gradients that stay whole go along with scattered ones, and come back as right means."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from support.training import ranks, step_of

import jdp
from jdp import collectives
from jdp.collectives.cpu import runtime as cpu_runtime

needs_library = pytest.mark.skipif(
    cpu_runtime.why_missing() is not None, reason=f"{cpu_runtime.why_missing()}"
)
RATE = 2.0**-10
# Row i has the gradient i in every element of every leaf, so that all means are exact.
ROWS = np.arange(24, dtype=np.float32) * 24
# 16,384 numbers stay whole, the most that may go along.
SIZES = {"w": (24, 8), "b": (7,), "c": (), "long": (16_369, 1), "d": (7,), "v": (8, 48)}


def zeros(sizes=SIZES, dtype=jnp.float32):
    return {name: jnp.zeros(shape, dtype) for name, shape in sizes.items()}


def loss_fn(params, rows):
    total = sum(leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(params))
    return rows.mean() * total, jnp.max(rows)


@jdp.train_step
def step(state, rows):
    (loss, largest), grads = jdp.value_and_grad(loss_fn, has_aux=True)(state.params, rows)
    return state.apply_gradients(grads), {"loss": loss, "largest": largest}


def state_of(params, **options):
    options = {"stage": 1, "min_size": 8, **options}
    return jdp.TrainState.create(params, jdp.sharded(optax.sgd(RATE), **options))


def calls(state):
    text = step.lower(state, ROWS).as_text()
    names = "all_reduce", "reduce_scatter", "all_gather"
    return tuple(text.count(f"stablehlo.custom_call @jdp_{name}(") for name in names)


def assert_trained(params, num_steps=1):
    """Every rank has the parameters of one device, after steps on all rows."""
    for leaf in jax.tree.leaves(params):
        for shard in leaf.addressable_shards:
            got = np.asarray(shard.data, np.float32)
            np.testing.assert_array_equal(got, np.full(got.shape, -ROWS.mean() * RATE * num_steps))


@needs_library
@pytest.mark.parametrize("n", [2, 3, 8])
def test_a_step_makes_two_calls_and_every_rank_has_the_means(n):
    ranks(n)
    state = state_of(zeros())
    assert calls(state) == (0, 1, 1)
    for _ in range(3):
        state, metrics = step(state, ROWS)
    assert_trained(state.params, num_steps=3)
    of_ranks = ROWS.reshape(n, -1)
    assert float(metrics["largest"]) == of_ranks.max(1).mean()
    assert float(metrics["loss"]) == pytest.approx(
        -(ROWS.mean() ** 2) * RATE * 2 * sum(np.prod(size) for size in SIZES.values()), rel=1e-5
    )


@needs_library
@pytest.mark.parametrize(
    ("more", "options", "expected"),
    [
        ({"more": (1,)}, {}, (1, 1, 1)),  # a process would read too much from each other one
        ({}, {"bucket_bytes": 1}, (0, 6, 2)),  # a bucket for each leaf
        ({}, {"all_reduce": collectives.xla}, (0, 0, 0)),  # no native call at all
        ({"w": (7,), "v": (5,)}, {}, (1, 0, 0)),  # nothing is scattered
    ],
    ids=["too many", "small buckets", "XLA", "all stay whole"],
)
def test_what_does_not_go_along_is_reduced_in_a_call_of_its_own(more, options, expected):
    ranks(2)
    state = state_of(zeros(SIZES | more), **options)
    assert calls(state) == expected
    new, metrics = step(state, ROWS)
    assert_trained(new.params)
    assert float(metrics["largest"]) == ROWS.reshape(2, -1).max(1).mean()


@needs_library
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("reduce_dtype", [None, jnp.bfloat16])
def test_dtypes_have_buckets_of_their_own(dtype, reduce_dtype):
    ranks(3)
    params = zeros() | {"half": jnp.zeros(5, dtype)}
    new, metrics = step(state_of(params, reduce_dtype=reduce_dtype), ROWS)
    assert new.params["half"].dtype == dtype
    for leaf in jax.tree.leaves(new.params):
        got = np.asarray(leaf, np.float32)
        np.testing.assert_allclose(got, -ROWS.mean() * RATE, rtol=2e-2 if reduce_dtype else 1e-2)
    assert float(metrics["largest"]) == ROWS.reshape(3, -1).max(1).mean()


@needs_library
@pytest.mark.parametrize("over", ["inner", "outer"])
def test_means_are_over_both_axes_where_one_of_them_is_split(over):
    names = "outer", "inner"
    axis_types = (AxisType.Auto,) * 2
    jdp.init(jax.make_mesh((2, 3), names, axis_types, devices=jax.devices()[:6]), axis_name=names)
    tx = jdp.sharded(optax.sgd(RATE), stage=1, min_size=8, axis_name=names, over=over)

    both = step_of(lambda p, x: loss_fn(p, x)[0], axis_name=names)
    new, _ = both(jdp.TrainState.create(zeros(), tx), ROWS)
    assert_trained(new.params)


@needs_library
def test_weighted_means_go_along_too():
    ranks(3)
    weight = np.where(np.arange(24) < 8, 0, 1).astype(np.float32)  # nothing of the first rank

    @jdp.train_step(weight=lambda batch: batch["weight"].sum())
    def weighed(state, batch):
        def mean_loss(params):
            total = sum(leaf.sum() for leaf in jax.tree.leaves(params))
            return (batch["x"] * batch["weight"]).sum() / batch["weight"].sum() * total

        loss, grads = jdp.value_and_grad(mean_loss)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    new, _ = weighed(state_of(zeros()), {"x": ROWS, "weight": weight})
    for leaf in jax.tree.leaves(new.params):
        for shard in leaf.addressable_shards:
            np.testing.assert_allclose(shard.data, -ROWS[8:].mean() * RATE, rtol=1e-6)


@needs_library
@pytest.mark.parametrize("n", [2, 3])
def test_sums_go_along_too(n):
    ranks(n)
    state = state_of(zeros(), mean=False)
    assert calls(state)[1:] == (1, 1)
    new, metrics = step(state, ROWS)
    assert float(metrics["largest"]) == ROWS.reshape(n, -1).max(1).mean()  # a metric is a mean
    for leaf in jax.tree.leaves(new.params):
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(
                shard.data, np.full(shard.data.shape, -ROWS.mean() * n * RATE)
            )
