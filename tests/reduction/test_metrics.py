"""What a step reports: means, sums and rows of all ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.per_rank import assert_equal_bits, per_rank

import jdp
from jdp import pytrees
from jdp.analysis import jaxprs
from jdp.reduction import step_context, step_metrics

both_types = pytest.mark.parametrize("check_vma", [True, False])


# Means


def test_averages_a_tree_over_ranks(mesh):
    n = mesh.size
    x = {
        "loss": np.arange(n, dtype=np.float32),
        "stats": [np.arange(6 * n, dtype=np.float32).reshape(n, 2, 3)],
    }
    got = per_rank(mesh, jdp.mean_over_ranks, x)
    assert_equal_bits(got)
    np.testing.assert_array_equal(got["loss"][0], (n - 1) / 2)
    np.testing.assert_allclose(got["stats"][0][0], x["stats"][0].mean(axis=0), rtol=1e-6)


def test_keeps_the_dtype_and_sums_small_ones_in_float32(make_mesh):
    # 257 needs 9 bits: in bfloat16 the sum of 256 and ones stays 256.
    x = {
        "bfloat16": np.array([256, 1, 1, 1, 1, 1, 1, 2], jnp.bfloat16),
        "float16": np.full(8, 60_000, np.float16),
        "float32": np.arange(8, dtype=np.float32),
    }
    got = per_rank(make_mesh(8), jdp.mean_over_ranks, x)
    for dtype, want in (("bfloat16", 33), ("float16", 60_000), ("float32", 3.5)):
        assert got[dtype].dtype == dtype
        np.testing.assert_array_equal(got[dtype].astype(np.float32), [want] * 8)


@pytest.mark.parametrize("weighted", [False, True])
def test_small_means_of_a_dtype_are_one_sum_with_the_bits_of_several(mesh, weighted):
    draw = np.random.default_rng(0).normal
    shapes = [(), (3, 5), (2000,), (0,), (7,)]
    x = [draw(size=(mesh.size, *shape)).astype("f") for shape in shapes]
    x.append(x[1].astype(np.complex64))

    def means(x, fn):
        return fn(x, weight=x[0] ** 2 if weighted else None)

    def one_by_one(x, weight):
        return [jdp.mean_over_ranks(leaf, weight=weight) for leaf in x]

    got = per_rank(mesh, lambda x: means(x, jdp.mean_over_ranks), x)
    want = per_rank(mesh, lambda x: means(x, one_by_one), x)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
    program = jax.make_jaxpr(lambda x: per_rank(mesh, lambda x: means(x, jdp.mean_over_ranks), x))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_get", lambda results: results)
        equations = [*jaxprs.equations(program(x))]
    sums = [each for each in equations if each.primitive.name == "psum"]
    # Small ones, the large one and the complex one; with a weight also the weight.
    assert sum(len(each.invars) for each in sums) == 3 + weighted


reductions = pytest.mark.parametrize("reduce", [jdp.mean_over_ranks, jdp.max_over_ranks])


@reductions
def test_leaves_that_vary_over_other_axes_are_not_packed(reduce):
    axes = {"axis_types": (AxisType.Auto,) * 2, "devices": jax.devices()[:4]}
    both = jax.make_mesh((2, 2), ("data", "model"), **axes)
    a, b = np.arange(2.0, dtype=np.float32), np.arange(4.0, dtype=np.float32).reshape(2, 2)
    specs = P("data"), P("data", "model")
    f = jax.shard_map(
        lambda *x: reduce(x), mesh=both, in_specs=specs, out_specs=(P(), P(None, "model"))
    )
    found = jax.jit(f)(a, b)
    of_numpy = np.mean if reduce is jdp.mean_over_ranks else np.max
    np.testing.assert_array_equal(found[0], of_numpy(a, keepdims=True))
    np.testing.assert_array_equal(found[1], of_numpy(b, 0, keepdims=True))


@reductions
@pytest.mark.parametrize("slopes", [False, True])
def test_a_leaf_that_vmap_does_not_map_stays_without_its_dim(make_mesh, reduce, slopes):
    n = 3

    def of_rank(x):
        def each(row):
            def both(x, row):
                return reduce({"a": x.sum(), "b": row})

            return jax.jvp(both, (x, row), (x, row))[1] if slopes else both(x, row)

        return jax.vmap(each, out_axes={"a": None, "b": 0})(x.reshape(2, 1))

    x = np.arange(2.0 * n, dtype=np.float32).reshape(n, 2)
    found = per_rank(make_mesh(n), of_rank, x)
    of_numpy = np.mean if reduce is jdp.mean_over_ranks else np.max
    assert found["a"].shape == (n,)
    np.testing.assert_allclose(found["a"], of_numpy(x.sum(1)), rtol=1e-6)
    np.testing.assert_allclose(found["b"][0][:, 0], of_numpy(x, 0), rtol=1e-6)


def test_a_mean_may_be_complex(make_mesh):
    got = per_rank(make_mesh(2), jdp.mean_over_ranks, np.array([1 + 2j, 3], np.complex64))
    np.testing.assert_array_equal(got, [2 + 1j] * 2)


def test_the_mean_of_booleans_is_a_share_of_the_ranks(make_mesh):
    x = {"flag": np.array([True, False, False, True]), "all": np.ones((4, 2), bool)}
    got = per_rank(make_mesh(4), jdp.mean_over_ranks, x)
    np.testing.assert_array_equal(got["flag"], [0.5] * 4)
    np.testing.assert_array_equal(got["all"], np.ones((4, 2)))
    assert got["flag"].dtype == jdp.mean_over_ranks(x)["all"].dtype == np.float32


@both_types
def test_weighs_each_rank(make_mesh, check_vma):
    x, w = np.array([2, np.nan, 6], np.float32), np.array([3, 0, 1])

    def fn(x, w):
        with step_context.entered("data", w[None], lambda w: w.sum()):
            return [
                jdp.mean_over_ranks(x, weight=w),
                jdp.mean_over_ranks(x),
                jdp.mean_over_ranks(jnp.nan_to_num(x, nan=1), weight=1),
            ]

    got = per_rank(make_mesh(3), fn, x, w, check_vma=check_vma)
    np.testing.assert_array_equal(got, [[3] * 3] * 3)


def test_a_mean_of_which_nothing_counts_is_zero(make_mesh):
    got = per_rank(make_mesh(2), lambda x: jdp.mean_over_ranks(x, weight=0), np.full(2, np.nan))
    np.testing.assert_array_equal(got, [0, 0])


@both_types
def test_is_usable_at_once_and_is_the_same_everywhere(make_mesh, check_vma):
    def fn(x):
        mean = jdp.mean_over_ranks(jnp.mean(x))
        return lax.cond(mean < 3, lambda: mean, lambda: -mean)

    mapped = jax.shard_map(
        fn, mesh=make_mesh(3), in_specs=P("data"), out_specs=P(), check_vma=check_vma
    )
    assert jax.jit(mapped)(np.array([1, 2, 6], np.float32)) == -3


@both_types
def test_the_mean_of_what_is_the_same_is_itself(make_mesh, check_vma):
    got = per_rank(
        make_mesh(3), lambda x: jdp.mean_over_ranks(jnp.float32(5)), np.ones(3), check_vma=check_vma
    )
    np.testing.assert_array_equal(got, [5] * 3)


def test_where_nothing_is_bound_there_is_one_rank():
    tree = {"a": jnp.float32(2), "b": jnp.arange(3)}
    assert jdp.mean_over_ranks(2.5, weight=0) == 2.5
    jax.tree.map(np.testing.assert_array_equal, jdp.sum_over_ranks(tree), tree)


def test_the_axis_may_have_another_name_or_two():
    names = ("replica", "fsdp")
    mesh = jax.make_mesh((2, 3), names, (AxisType.Auto,) * 2, devices=jax.devices()[:6])

    def fn(x):
        return [
            f(x, axis_name=a)
            for a in (names, "fsdp")
            for f in (jdp.mean_over_ranks, jdp.sum_over_ranks)
        ]

    means, sums, row_means, row_sums = per_rank(mesh, fn, np.arange(6, dtype=np.float32))
    assert (set(means), set(sums)) == ({2.5}, {15})
    assert (row_means.tolist(), row_sums.tolist()) == ([1] * 3 + [4] * 3, [3] * 3 + [12] * 3)


def test_pmap_over_another_axis_is_refused():
    for fn in (jdp.mean_over_ranks, jdp.sum_over_ranks):
        with pytest.raises(ValueError, match="'data' .* axis_name='batch'"):
            jax.pmap(fn, axis_name="batch", devices=jax.devices()[:2])(np.ones(2, np.float32))


@pytest.mark.parametrize("wrong", [3, np.ones(2, int), np.ones(2, np.uint8)])
def test_a_mean_of_whole_numbers_is_refused(wrong):
    with pytest.raises(TypeError, match="mean_over_ranks .*int.* jdp.sum_over_ranks"):
        jdp.mean_over_ranks({"loss": 1.0, "count": wrong})


# Sums


@both_types
def test_sums_counts_histograms_and_flags(make_mesh, check_vma):
    x = {
        "count": np.arange(3),
        "histogram": np.arange(12).reshape(3, 4),
        "flag": np.array([True, False, True]),
        "value": np.array([0.5, 1, 2], np.float32),
    }
    got = per_rank(make_mesh(3), jdp.sum_over_ranks, x, check_vma=check_vma)
    for name, leaf in x.items():
        np.testing.assert_array_equal(got[name], np.stack([leaf.sum(axis=0)] * 3))
    assert (got["count"].dtype, got["flag"].dtype) == (np.int32, np.int32)


@pytest.mark.parametrize("dtype", ["int2", "int4", "uint4", "int8", "uint8", "int16", "uint16"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_integers_of_few_bits_are_summed_in_32(make_mesh, num_ranks, dtype):
    for extreme in (jnp.iinfo(dtype).max, jnp.iinfo(dtype).min):
        x = jnp.full((num_ranks, 2), extreme).astype(dtype)
        got = per_rank(make_mesh(num_ranks), jdp.sum_over_ranks, x)
        np.testing.assert_array_equal(got, np.full((num_ranks, 2), num_ranks * int(extreme)))
        wide = jnp.uint32 if dtype.startswith("u") else jnp.int32
        assert got.dtype == jdp.sum_over_ranks(x).dtype == wide


@pytest.mark.parametrize("dtype, large", [("bfloat16", 256), ("float16", 2048)])
def test_floats_of_16_bits_are_rounded_once(make_mesh, dtype, large):
    x = jnp.array([large] + 7 * [1]).astype(dtype)
    got = per_rank(make_mesh(8), jdp.sum_over_ranks, x)
    np.testing.assert_array_equal(got, jnp.full(8, large + 7).astype(dtype))
    assert got.dtype == dtype


@both_types
def test_a_sum_counts_every_rank_also_of_what_is_the_same(make_mesh, check_vma):
    def fn(x):
        return jdp.sum_over_ranks(3), jdp.sum_over_ranks(jnp.int32(3))

    for got in per_rank(make_mesh(4), fn, np.ones(4), check_vma=check_vma):
        np.testing.assert_array_equal(got, [12] * 4)


# Scalars of a step


def test_the_float_scalars_of_a_step_are_averaged_and_the_rest_is_kept(make_mesh):
    def fn(x):
        return step_metrics.averaged(
            {
                "loss": x,
                "half": x.astype(jnp.bfloat16),
                "number": 1.0,
                "count": jnp.int32(x),
                "vector": x[None],
            },
            "data",
        )[0]

    got = per_rank(make_mesh(3), fn, np.array([1, 2, 6], np.float32))
    want = {"loss": 3, "half": 3, "number": 1, "count": [1, 2, 6], "vector": [[1], [2], [6]]}
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], np.broadcast_to(value, got[name].shape))
    assert (got["half"].dtype, got["number"].dtype) == (jnp.bfloat16, np.float32)


def test_all_float_scalars_share_one_reduction(make_mesh):
    mapped = jax.shard_map(
        lambda x: step_metrics.averaged([x.sum(), x.max(), jnp.bfloat16(x[0])], "data")[0],
        mesh=make_mesh(2),
        in_specs=P("data"),
        out_specs=P(),
        check_vma=False,
    )
    text = jax.jit(mapped).lower(np.ones(4, np.float32)).as_text()
    assert text.count("stablehlo.all_reduce") == 1


def test_without_float_scalars_nothing_is_reduced():
    tree = {"count": 3, "none": None}
    assert step_metrics.averaged(tree, "data") == (tree, None)


# Rows


def test_rows_are_taken_out_and_put_back_in_place():
    tree = {"a": 1.0, "b": [jdp.rows(np.arange(3)), jdp.rows({"c": np.arange(4)})], "d": None}
    rest, values = step_metrics.take_rows(tree)
    assert jax.tree.leaves(rest) == [1.0]
    assert [len(v) for v in values] == [3, 4]
    plain = step_metrics.unmarked(pytrees.put_nodes(rest, [v * 2 for v in values]))
    np.testing.assert_array_equal(plain["b"][0], [0, 2, 4])
    np.testing.assert_array_equal(plain["b"][1]["c"], [0, 2, 4, 6])
    again = pytrees.put_nodes(rest, values)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    np.testing.assert_array_equal(step_metrics.unmarked(tree)["b"][0], np.arange(3))


@pytest.mark.parametrize("wrong", [1.0, np.ones((3, 2)), [np.ones(4), np.ones(3)]])
def test_rows_of_another_number_than_the_batch_are_refused(wrong):
    with step_context.entered("data", {"x": np.ones((4, 2))}, None):
        jdp.rows(np.ones((4, 1)))
        with pytest.raises(ValueError, match=r"jdp\.rows\(x\) .*float\d\d\[.* 4 "):
            jdp.rows(wrong)


def test_rows_of_a_scalar_are_refused_also_outside_of_a_step():
    with pytest.raises(ValueError, match=r"jdp\.rows\(x\) .*float32\[\]"):
        jdp.rows(jnp.float32(1))


# Weights


def test_a_weight_that_is_not_one_number_is_refused():
    batch = {"mask": np.ones(4)}
    for weight, found in ((lambda b: b["mask"], r"float32\[4\]"), (lambda b: 1j, r"complex64\[\]")):
        with pytest.raises(ValueError, match=f"{found}.*JDP126"):
            with step_context.entered("data", batch, weight):
                pass


def test_the_weight_of_a_step_over_another_axis_does_not_count(make_mesh):
    def fn(x):
        with step_context.entered("other", x[None], lambda x: x.sum(), nested=True):
            return jdp.mean_over_ranks(x)

    got = per_rank(make_mesh(2), fn, np.arange(2, dtype=np.float32))
    np.testing.assert_array_equal(got, [0.5, 0.5])


def test_a_scope_ends_where_it_ends():
    with pytest.raises(ZeroDivisionError):
        with step_context.entered("data", np.ones(3), None) as outer:
            with step_context.entered("data", np.ones(2), None, nested=True) as inner:
                assert (
                    step_context.current("data") is inner and step_context.current("model") is None
                )
            assert step_context.innermost() is outer
            raise ZeroDivisionError
    assert step_context.current("data") is None


# Metrics that every rank has the same


NOT_EXACT = np.array([0.1, 1 / 3, 1e-20, 3e38], np.float32)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("weighed", [False, True])
def test_a_metric_that_every_rank_has_the_same_is_not_touched(num_ranks, weighed):
    jdp.init(devices=jax.devices()[:num_ranks])
    traces = []
    weight = {"weight": lambda batch: batch.sum()} if weighed else {}

    def report(rates, batch):
        traces.append(1)
        return {
            "rates": [rates[i] for i in range(4)],
            "loss": batch.mean(),
            "constant": 0.1,
            "half": rates[0].astype(jnp.bfloat16),
            "vector": rates,
            "mean": jdp.mean_over_ranks(batch.mean()),
        }

    def train(state, batch):
        return state, report(state, batch)

    batch = np.arange(num_ranks, dtype=np.float32) * 3 + 1
    _, trained = jdp.train_step(train, donate=False, **weight)(NOT_EXACT, batch)
    measured = jdp.eval_step(report, **weight)(NOT_EXACT, batch)
    for got in (trained, measured):
        np.testing.assert_array_equal([float(x) for x in got["rates"]], NOT_EXACT)
        assert float(got["constant"]) == np.float32(0.1)
        assert got["half"] == jnp.bfloat16(0.1)
        mean = np.average(batch, weights=batch if weighed else None)
        np.testing.assert_allclose([got["loss"], got["mean"]], mean, rtol=1e-6)
    assert len(traces) == 2  # one for each step


def test_a_metric_of_one_rank_alone_is_averaged(make_mesh):
    jdp.init(devices=jax.devices()[:4])

    @jdp.eval_step
    def report(rate, batch):
        mine = lax.cond(batch[0] > 2, lambda: rate, lambda: 2 * rate)
        return {"mine": mine, "rate": rate, "rank": lax.axis_index("data") * 1.0}

    got = report(np.float32(0.1), np.arange(4, dtype=np.float32))
    assert float(got["rate"]) == np.float32(0.1)
    np.testing.assert_allclose([got["mine"], got["rank"]], [0.175, 1.5], rtol=1e-6)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_metric_that_is_no_number_is_refused_by_path(num_ranks):
    jdp.init(devices=jax.devices()[:num_ranks])
    step = jdp.train_step(lambda state, batch: (state, {"note": {"text": "hello"}}))
    with pytest.raises(TypeError, match=r"`metrics\['note'\]\['text'\]` .*'hello'.* str"):
        step({"w": jnp.zeros(2)}, jnp.zeros(4))
