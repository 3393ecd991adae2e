"""Micro-batches give what one go gives, and a global mean every rank the same gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import training
from support.per_rank import assert_equal_bits, per_rank
from support.ranks_rows import batch, count_rows, masked_loss, whole
from support.training import assert_close, loss_fn, predict

import jdp
from jdp import jax_compat
from jdp.reduction import step_context

both_types = pytest.mark.parametrize("check_vma", [True, False])


# Accumulation equals one go


@pytest.mark.parametrize("k", [1, 2, 3, 8, 24])
def test_micro_batches_equal_one_go(k):
    got = jax.jit(jdp.value_and_grad(loss_fn, accumulate=k))(training.params(), batch())
    assert_close(got, jax.value_and_grad(loss_fn)(training.params(), batch()))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("k", [1, 2, 3, 8, 24])
def test_micro_batches_of_unequal_weight_equal_one_go(monkeypatch, k, platform):
    monkeypatch.setattr(step_context, "platform", lambda: platform)
    rows = batch(masked=True)
    assert k == 1 or len({m.sum() for m in np.split(rows["mask"], k)}) > 1
    fn = jdp.value_and_grad(masked_loss, accumulate=k, weight=count_rows)
    want = jax.value_and_grad(masked_loss)(training.params(), rows)
    assert_close(jax.jit(fn)(training.params(), rows), want)


# 24 rows by at most r: k = 24 / r rounded up, all equal but perhaps the last.
@pytest.mark.parametrize(
    "r, sizes",
    [
        (25, [24]),
        (24, [24]),
        (23, [12, 12]),
        (12, [12, 12]),
        (10, [8, 8, 8]),
        (7, [6, 6, 6, 6]),
        (5, [5, 5, 5, 5, 4]),
        (1, [1] * 24),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_at_most_so_many_rows_at_once_equal_one_go(r, sizes, masked):
    seen = []

    def loss_with_rows(p, batch):
        seen.append(len(batch["x"]))
        ids = jnp.zeros(len(batch["x"])) + batch["x"][:, 0]
        return (masked_loss if masked else loss_fn)(p, batch), jdp.rows(ids)

    weight = count_rows if masked else None
    fn = jdp.value_and_grad(loss_with_rows, micro_batch_rows=r, has_aux=True, weight=weight)
    rows = batch(masked=masked)
    (loss, ids), grads = jax.jit(fn)(training.params(), rows)
    want = jax.value_and_grad(masked_loss if masked else loss_fn)(training.params(), rows)
    assert_close((loss, grads), want)
    np.testing.assert_array_equal(ids.values, rows["x"][:, 0])
    assert set(seen) == set(sizes) and sum(sizes) == 24


@pytest.mark.parametrize("r, k", [(24, 1), (12, 2), (7, 4), (1, 24)])
def test_rows_that_divide_are_split_as_by_accumulate(r, k):
    rows, p = batch(), training.params()
    got = jax.jit(jdp.value_and_grad(loss_fn, micro_batch_rows=r))(p, rows)
    want = jax.jit(jdp.value_and_grad(loss_fn, accumulate=k))(p, rows)
    assert_close(got, want, tolerance=0)


@settings(deadline=None, max_examples=30)
@given(num_rows=st.integers(1, 12), r=st.integers(1, 13))
def test_any_rows_in_micro_batches_of_any_size_have_the_mean_of_all(num_rows, r):
    x = np.arange(num_rows, dtype=np.float32)
    seen = []

    def mean(w, x):
        seen.append(len(x))
        return jnp.mean(w * x)

    loss, grad = jdp.value_and_grad(mean, micro_batch_rows=r)(jnp.float32(2), x)
    np.testing.assert_allclose([loss, grad], [2 * x.mean(), x.mean()], rtol=1e-6)
    assert 1 <= min(seen) and max(seen) <= r


def test_an_aux_that_changes_its_shape_with_the_rows_has_no_mean():
    def loss_with_errors(p, batch):
        return loss_fn(p, batch), {"errors": (predict(p, batch["x"]) - batch["y"])[:, 0]}

    fn = jdp.value_and_grad(loss_with_errors, micro_batch_rows=5, has_aux=True)
    with pytest.raises(ValueError, match=r"float32\[5\] at .*errors.* float32\[4\] .*jdp.rows"):
        fn(training.params(), batch())


@pytest.mark.parametrize("last", [True, False])
def test_a_micro_batch_of_weight_0_contributes_nothing_even_nan(last):
    rows = batch(masked=True)
    rows["mask"] = np.arange(24) < 12 if last else np.arange(24) >= 12
    rows["x"][~rows["mask"]] = np.nan
    fn = jdp.value_and_grad(masked_loss, accumulate=4, weight=count_rows)
    counted = jax.tree.map(lambda x: x[rows["mask"]], rows)
    want = jax.value_and_grad(masked_loss)(training.params(), counted)
    assert_close(jax.jit(fn)(training.params(), rows), want)


def test_where_no_row_counts_loss_and_gradient_are_zero():
    rows = {**batch(masked=True), "mask": np.zeros(24, bool)}
    fn = jdp.value_and_grad(masked_loss, accumulate=3, weight=count_rows)
    for leaf in jax.tree.leaves(jax.jit(fn)(training.params(), rows)):
        np.testing.assert_array_equal(leaf, 0)


@pytest.mark.parametrize("num_ranks, k", [(2, 3), (3, 8), (8, 2)])
def test_ranks_and_micro_batches_equal_one_rank_in_one_go(make_mesh, num_ranks, k):
    rows = batch(num_ranks, masked=True)

    def fn(rows, p):
        with step_context.entered("data", rows, count_rows):  # said once, as by train_step(weight=)
            loss, grads = jdp.value_and_grad(masked_loss, accumulate=k)(p, rows)
            return jdp.mean_over_ranks(loss), jdp.sync_gradients(grads)

    got = per_rank(make_mesh(num_ranks), fn, rows, replicated=(training.params(),))
    assert_equal_bits(got)
    want = jax.value_and_grad(masked_loss)(training.params(), whole(rows))
    assert_close(jax.tree.map(lambda x: x[0], got), want)


def test_the_gradient_is_local_until_it_is_synced(make_mesh):
    rows = batch(2)

    def fn(rows, p):
        return jdp.value_and_grad(loss_fn, accumulate=2)(p, rows)

    got = per_rank(make_mesh(2), fn, rows, replicated=(training.params(),))
    for rank in range(2):
        mine = jax.tree.map(lambda x, r=rank: x[r], (got, rows))
        assert_close(mine[0], jax.value_and_grad(loss_fn)(training.params(), mine[1]))


def test_the_weight_of_a_micro_batch_counts_inside_of_the_loss(make_mesh):
    # Statistics over all ranks, of one micro-batch at a time.
    x = np.array([[1, 2, 4, 8], [16, 32, 64, 128]], np.float32)
    mask = np.array([[1, 0, 1, 1], [1, 1, 0, 1]], np.float32)

    def fn(batch):
        def loss_fn(w, b):
            mine = jnp.sum(b["x"] * b["mask"]) / jnp.sum(b["mask"])
            return w * jdp.mean_over_ranks(mine)

        with step_context.entered("data", batch, count_rows):
            return jdp.value_and_grad(loss_fn, accumulate=2)(jnp.float32(1), batch)

    loss, _ = per_rank(make_mesh(2), fn, {"x": x, "mask": mask})
    means = [(1 + 16 + 32) / 3, (4 + 8 + 128) / 3]  # of the first two columns, of the last two
    want = [(1 * means[0] + 2 * means[1]) / 3, (2 * means[0] + 1 * means[1]) / 3]
    np.testing.assert_allclose(loss, want, rtol=1e-6)


def test_dtypes_are_kept_and_bfloat16_is_summed_in_float32():
    # 257 needs 9 bits: in bfloat16 the sum of 256 and ones stays 256.
    x = np.array([256, 1, 1, 1, 1, 1, 1, 2], jnp.bfloat16)
    p = {"h": jnp.bfloat16(1), "f": jnp.float32(1)}
    fn = jdp.value_and_grad(lambda p, x: jnp.mean(p["h"] * x) * p["f"], accumulate=8)
    loss, grads = fn(p, x)
    assert (loss.dtype, grads["h"].dtype, grads["f"].dtype) == (
        jnp.float32,
        jnp.bfloat16,
        jnp.float32,
    )
    assert (float(loss), float(grads["h"]), float(grads["f"])) == (33, 33, 33)


def test_float64_keeps_its_digits():
    x = np.random.default_rng(0).normal(size=24)
    w = np.random.default_rng(1).uniform(size=24)
    with jax.enable_x64(True):
        fn = jdp.value_and_grad(
            lambda p, b: jnp.sum(p * b["x"] * b["w"]) / jnp.sum(b["w"]),
            accumulate=3,
            weight=lambda b: b["w"].sum(),
        )
        loss, grad = jax.device_get(fn(jnp.float64(2), {"x": x, "w": w}))
    np.testing.assert_allclose([loss, grad], [2 * x @ w / w.sum(), x @ w / w.sum()], rtol=1e-13)


def test_members_of_an_ensemble_accumulate_side_by_side():
    members = jax.tree.map(lambda x: np.stack([x, 2 * x, -x]), training.params())
    fn = jdp.value_and_grad(loss_fn, accumulate=4)
    got = jax.jit(jax.vmap(fn, in_axes=(0, None)))(members, batch())
    assert_close(got, jax.vmap(jax.value_and_grad(loss_fn), (0, None))(members, batch()))


# Aux


def aux_loss(p, batch):
    prediction = predict(p, batch["x"])
    errors = (prediction - batch["y"])[:, 0] ** 2
    aux = {
        "mean": errors.mean(),
        "vector": prediction.mean(axis=0),
        "rows": jdp.rows({"prediction": prediction, "positive": prediction[:, 0] > 0}),
        "none": None,
        "number": 2.0,
    }
    return errors.mean(), aux


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("k", [1, 2, 8])
def test_aux_is_averaged_and_rows_are_joined_in_order(monkeypatch, k, platform):
    monkeypatch.setattr(step_context, "platform", lambda: platform)
    fn = jdp.value_and_grad(aux_loss, accumulate=k, has_aux=True)
    got = jax.jit(fn)(training.params(), batch())
    want = jax.value_and_grad(aux_loss, has_aux=True)(training.params(), batch())
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for mine, expected in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)


def test_aux_is_weighed_like_the_loss():
    def loss_with_aux(p, batch):
        loss = masked_loss(p, batch)
        return loss, {"loss": loss}

    fn = jdp.value_and_grad(loss_with_aux, accumulate=4, has_aux=True, weight=count_rows)
    (loss, aux), _ = fn(training.params(), batch(masked=True))
    assert np.isfinite(loss) and loss == aux["loss"]


@pytest.mark.parametrize(
    "wrong, found",
    [(3, r"int32\[\]"), (np.ones(2, bool), r"bool\[2\]"), (jax.random.key(0), "key")],
)
def test_aux_of_which_no_mean_is_defined_is_refused_by_path(wrong, found):
    def loss_with_aux(p, batch):
        return loss_fn(p, batch), {"fine": 1.0, "wrong": [wrong]}

    fn = jdp.value_and_grad(loss_with_aux, accumulate=2, has_aux=True)
    with pytest.raises(TypeError, match=rf"aux\['wrong'\]\[0\] is {found}.*jdp.rows\(x\)"):
        fn(training.params(), batch())
    jdp.value_and_grad(loss_with_aux, has_aux=True)(training.params(), batch())  # one go: no mean


def test_rows_of_another_number_than_the_micro_batch_are_refused():
    def loss_with_rows(p, batch):
        return loss_fn(p, batch), jdp.rows(jnp.ones(24))

    with pytest.raises(ValueError, match=r"jdp\.rows\(x\) .*float32\[24\].* 12 "):
        jdp.value_and_grad(loss_with_rows, accumulate=2, has_aux=True)(training.params(), batch())


# Random keys and what else is passed


def draws(k, *rest):
    """What each micro-batch draws, one after the other, from keys among `rest`."""

    def loss_with_draws(p, batch, *rest):
        keys = [leaf for leaf in jax.tree.leaves(rest) if leaf.dtype != jnp.float32]
        drawn = jnp.stack([jax.random.uniform(key) for key in keys])
        return p * 1.0, jdp.rows(jnp.broadcast_to(drawn, (len(batch), len(keys))))

    fn = jdp.value_and_grad(loss_with_draws, accumulate=k, has_aux=True)
    (_, rows), _ = jax.jit(fn)(jnp.float32(0), np.zeros(k), *rest)
    return np.asarray(rows.values)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_each_micro_batch_gets_a_key_of_its_own(monkeypatch, platform):
    monkeypatch.setattr(step_context, "platform", lambda: platform)
    key = jax.random.key(0)
    drawn = draws(4, {"params": jnp.float32(3), "dropout": key})[:, 0]
    np.testing.assert_array_equal(
        drawn, [jax.random.uniform(one) for one in jax.random.split(key, 4)]
    )


def test_keys_are_split_apart_from_each_other():
    keys = [jax.random.key(0), {"dropout": jax.random.key(1)}]
    assert len(np.unique(draws(4, *keys))) == 8


def test_an_array_of_keys_is_split_key_by_key():
    keys = jax.random.split(jax.random.key(0), (2, 3))

    def loss_with_draws(p, batch, keys):
        assert keys.shape == (2, 3)
        drawn = jax.vmap(jax.vmap(jax.random.uniform))(keys)
        return p * 1.0, jdp.rows(drawn[None])

    fn = jdp.value_and_grad(loss_with_draws, accumulate=4, has_aux=True)
    (_, rows), _ = jax.jit(fn)(jnp.float32(0), np.zeros(4), keys)
    assert rows.values.shape == (4, 2, 3) and len(np.unique(rows.values)) == 24


@pytest.mark.parametrize(("generator", "size"), [("threefry2x32", 2), ("rbg", 4)])
def test_a_raw_key_that_the_loss_draws_from_is_refused(generator, size):
    with jax.default_prng_impl(generator):
        key = jax.random.PRNGKey(0)
        text = rf"argument 4 of the loss\['dropout'\] is a raw .*uint32\[{size}\].*wrap_key_data"
        with pytest.raises(TypeError, match=text):
            draws(3, np.float32(0), {"dropout": key})
        assert len(np.unique(draws(1, key))) == 1  # one micro-batch draws as ever
        assert len(np.unique(draws(3, jax.random.wrap_key_data(key)))) == 3


def test_a_raw_key_is_refused_where_a_loss_draws_deep_inside():
    @jax.jit
    def noise(key):
        return jax.lax.cond(key[0] == 0, lambda: jax.random.uniform(key), lambda: 0.0)

    def loss(p, batch, keys):
        return p * jax.vmap(noise)(keys).mean()

    fn = jdp.value_and_grad(loss, accumulate=2)
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    with pytest.raises(TypeError, match=r"argument 3 .*uint32\[3, 2\].*jax\.random\.key"):
        fn(jnp.float32(0), np.zeros(4), keys)


def test_data_of_the_shape_of_a_raw_key_is_data_beside_typed_keys():
    def loss(p, batch, ids, key):
        return p * (ids[1] + jax.random.uniform(key))

    ids, key = np.array([3, 5], np.uint32), jax.random.key(0)
    found, _ = jdp.value_and_grad(loss, accumulate=2)(jnp.float32(1), np.zeros(4), ids, key)
    expected = 5 + jnp.mean(jnp.stack([jax.random.uniform(k) for k in jax.random.split(key)]))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_what_is_no_key_comes_to_every_micro_batch_as_it_is():
    rest = (
        np.arange(2),
        np.arange(2, dtype=np.uint32),  # as a raw key has
        np.uint32(7),
        np.arange(3, dtype=np.uint32),
        [0.5, {"x": np.ones((2, 2))}],
    )

    def same(p, batch, *got):
        assert jax.tree.structure(got) == jax.tree.structure(rest)
        leaves = zip(jax.tree.leaves(got), jax.tree.leaves(rest), strict=True)
        return p * jnp.all(jnp.stack([jnp.all(a == b) for a, b in leaves]))

    loss, _ = jdp.value_and_grad(same, accumulate=3)(jnp.float32(5), np.zeros(6), *rest)
    assert loss == 5


# The program


def loops(jaxpr, inside=()):
    """Every equation of a program with the lengths of the loops around it."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name, inside
        around = (
            (*inside, equation.params["length"]) if equation.primitive.name == "scan" else inside
        )
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from loops(inner, around)


# A CPU hides no reduction, and a second copy of the step behind the loop would cost memory.
@pytest.mark.parametrize(("platform", "num_behind"), [("cpu", 0), ("gpu", 1)])
@pytest.mark.parametrize("k", [2, 8])
def test_micro_batches_run_in_a_loop_and_one_reduction_follows(
    monkeypatch, make_mesh, k, platform, num_behind
):
    monkeypatch.setattr(step_context, "platform", lambda: platform)

    def fn(w, x):
        _, grads = jdp.value_and_grad(lambda w, x: jnp.mean(x @ w), accumulate=k)(w, x)
        return jdp.sync_gradients(grads, all_reduce=jdp.collectives.xla)

    mapped = jax.shard_map(
        fn, mesh=make_mesh(2), in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    jaxpr = jax.make_jaxpr(mapped)(np.ones(3, np.float32), np.ones((16, 3), np.float32)).jaxpr
    found = list(loops(jaxpr))
    products = [inside for name, inside in found if name == "dot_general"]
    assert products.count((k - num_behind,)) == 2  # forward and backward
    assert products.count(()) == 2 * num_behind
    assert len(products) == 2 + 2 * num_behind
    assert [inside for name, inside in found if name.startswith("psum")] == [()]


# XLA:CPU computes gradients of convolutions in loops 40 times as slowly.
@pytest.mark.optimized
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_micro_batches_of_convolutions_run_without_a_loop_on_cpus(stage):
    training.ranks(2)
    draws = np.random.default_rng(0)
    rows = draws.normal(size=(24, 9, 9, 3)).astype(np.float32)
    kernels = [draws.normal(size=(3, 3, *io)).astype(np.float32) / 5 for io in ((3, 16), (16, 3))]

    def loss_fn(kernels, x):
        y = x
        for kernel in kernels:
            y = jnp.tanh(
                lax.conv_general_dilated(
                    y, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
        return jnp.mean((y - x) ** 2)

    def trained(k):
        tx = optax.sgd(0.5, momentum=0.9)
        wrapped = jdp.sharded(tx, stage=stage, min_size=1) if stage else jdp.replicated(tx)
        state, step = (
            jdp.TrainState.create(kernels, wrapped),
            training.step_of(loss_fn, accumulate=k),
        )
        compiled = step.lower(state, rows).compile()
        for _ in range(3):
            state, _ = step(state, rows)
        memory = compiled.memory_analysis().temp_size_in_bytes
        return training.fetched(state.params), compiled.as_text(), memory

    want, _, memory_of_whole = trained(1)
    got, text, memory = trained(4)
    assert_close(got, want)
    assert memory < 0.6 * memory_of_whole
    assert ("while(" in text) == jax_compat.FUSES_ACROSS_BARRIERS


def test_the_loss_is_traced_once_for_all_micro_batches():
    traces = []

    def counted(p, batch):
        traces.append(None)
        return loss_fn(p, batch)

    jax.jit(jdp.value_and_grad(counted, accumulate=8)).trace(training.params(), batch())
    assert len(traces) == 1


def test_keeps_the_name_of_the_loss():
    assert jdp.value_and_grad(loss_fn).__name__ == "loss_fn"
    assert jdp.global_mean(loss_fn).__name__ == "loss_fn"


# In a typed shard_map of the user's


@both_types
@pytest.mark.parametrize("k", [1, 2, 3])
def test_works_in_a_shard_map_with_types_and_without(make_mesh, check_vma, k):
    rows = batch(2, masked=True)

    def fn(p, rows):
        rows = jax.tree.map(lambda x: x[0], rows)
        weight = count_rows(rows)
        loss, grads = jdp.value_and_grad(masked_loss, accumulate=k, weight=count_rows)(p, rows)
        return (jdp.mean_over_ranks(loss, weight=weight), jdp.sync_gradients(grads, weight=weight))

    mapped = jax.shard_map(
        fn, mesh=make_mesh(2), in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
    )
    want = jax.value_and_grad(masked_loss)(training.params(), whole(rows))
    assert_close(jax.jit(mapped)(training.params(), rows), want)


def test_accumulates_what_varies_over_a_further_axis():
    # Typed: the sums in the loop must vary over "model" from the start, as the gradient does.
    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    w, x = np.arange(4, dtype=np.float32), np.arange(8, dtype=np.float32)

    def loss_fn(w, x):
        return jnp.mean(x) * lax.psum(jnp.sum(w**2), "model")

    def fn(w, x):
        loss, grads = jdp.value_and_grad(loss_fn, accumulate=2)(w, x)
        return jdp.mean_over_ranks(loss), jdp.sync_gradients(grads)

    mapped = jax.shard_map(
        fn, mesh=mesh, in_specs=(P("model"), P("data")), out_specs=(P(), P("model"))
    )
    loss, grads = jax.jit(mapped)(w, x)
    assert loss == 3.5 * 14
    np.testing.assert_array_equal(grads, 3.5 * 2 * w)


# What is refused


@pytest.mark.parametrize("k", [0, -1])
def test_there_is_at_least_one_micro_batch(k):
    with pytest.raises(ValueError, match=rf"accumulate .*{k}\b"):
        jdp.value_and_grad(loss_fn, accumulate=k)


def test_a_micro_batch_has_at_least_one_row():
    with pytest.raises(ValueError, match=r"micro_batch_rows .*\b0\b"):
        jdp.value_and_grad(loss_fn, micro_batch_rows=0)


def test_a_loss_that_closes_over_its_rows_takes_parameters_alone():
    rows = batch()
    got = jdp.value_and_grad(lambda p: loss_fn(p, rows), accumulate=1)(training.params())
    assert_close(got, jax.value_and_grad(loss_fn)(training.params(), rows))


@pytest.mark.parametrize("split", [{"accumulate": 2}, {"micro_batch_rows": 8}], ids=str)
def test_rows_that_a_loss_closes_over_are_not_split(split):
    rows = batch()
    with pytest.raises(TypeError, match=r"loss_fn\(params, batch\)"):
        jdp.value_and_grad(lambda p: loss_fn(p, rows), **split)(training.params())


def test_the_split_is_said_in_one_way():
    with pytest.raises(ValueError, match="accumulate=2 .*micro_batch_rows=4"):
        jdp.value_and_grad(loss_fn, accumulate=2, micro_batch_rows=4)


def test_leaves_of_unequal_rows_have_no_micro_batches_of_some_rows():
    fn = jdp.value_and_grad(loss_fn, micro_batch_rows=5)
    for wrong, found in ((np.ones(12), "12"), (3, "no")):
        message = rf"micro_batch_rows=5, but `batch\['z'\]` has {found} .* 24"
        with pytest.raises(ValueError, match=message):
            fn(training.params(), {**batch(), "z": wrong})


def test_rows_that_do_not_divide_are_refused_with_their_numbers():
    fn = jdp.value_and_grad(loss_fn, accumulate=5)
    with pytest.raises(ValueError, match=r"accumulate=5, but `batch\['x'\]` .* 24 "):
        fn(training.params(), batch())
    with pytest.raises(ValueError, match=r"`batch\['n'\]`"):
        fn(training.params(), {"n": 3})


def test_pmap_over_another_axis_is_refused():
    for fn in (
        jdp.value_and_grad(lambda w, x: w * x.sum()),
        jax.grad(jdp.global_mean(lambda w, x: w * x.sum())),
    ):
        mapped = jax.pmap(fn, "batch", in_axes=(None, 0), devices=jax.devices()[:2])
        with pytest.raises(ValueError, match="'data' .* axis_name='batch'"):
            mapped(1.0, np.ones((2, 3)))
