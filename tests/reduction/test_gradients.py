"""Local gradients in, their mean over ranks out, wherever an axis is bound."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.per_rank import assert_equal_bits, per_rank

import jdp
from jdp.collectives import ring, xla
from jdp.reduction import step_context

pytestmark = pytest.mark.optimized

every_algorithm = pytest.mark.parametrize("all_reduce", [xla, ring], ids=lambda f: f.__name__)


def grads(num_ranks, seed=0):
    """Each rank's own, `[rank, ...]`: whole numbers, of which sums are exact."""
    draw = np.random.default_rng(seed).integers
    return {
        "w": draw(-9, 9, (num_ranks, 5, 3)).astype(np.float32),
        "b": [draw(-9, 9, (num_ranks, size)).astype(np.float32) for size in (1, 17)],
        "s": draw(-9, 9, num_ranks).astype(np.float32),
        "h": draw(-9, 9, (num_ranks, 7)).astype(jnp.bfloat16),
    }


def mean_of(tree):
    return jax.tree.map(lambda x: x.astype(np.float64).mean(axis=0).astype(x.dtype), tree)


def assert_every_rank_has(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert_equal_bits(got)
    for mine, expected in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert mine.dtype == np.asarray(expected).dtype
        np.testing.assert_allclose(
            mine[0].astype(np.float64), np.asarray(expected, np.float64), rtol=1e-6, atol=1e-6
        )


def count(primitive, jaxpr):
    """How often a primitive stands in a program."""
    total = 0
    for equation in jaxpr.eqns:
        total += equation.primitive.name.startswith(primitive)
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            total += count(primitive, inner) if hasattr(inner, "eqns") else 0
    return total


@every_algorithm
@pytest.mark.parametrize("bucket_bytes", [1, 64, 2**20])
def test_is_the_mean_over_ranks_in_buckets_of_any_size(make_mesh, all_reduce, bucket_bytes):
    x = grads(3)

    def fn(x):
        return jdp.sync_gradients(x, all_reduce=all_reduce, bucket_bytes=bucket_bytes)

    assert_every_rank_has(per_rank(make_mesh(3), fn, x), mean_of(x))


@every_algorithm
def test_is_the_mean_over_any_number_of_ranks(mesh, all_reduce):
    x = grads(mesh.size)
    got = per_rank(mesh, lambda x: jdp.sync_gradients(x, all_reduce=all_reduce), x)
    assert_every_rank_has(got, mean_of(x))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_the_mean_of_rank_r_contributing_r_is_exact(make_mesh, num_ranks):
    rank = np.arange(num_ranks, dtype=np.float32)
    got = per_rank(make_mesh(num_ranks), jdp.sync_gradients, rank)
    np.testing.assert_array_equal(got, [sum(range(num_ranks)) / num_ranks] * num_ranks)


def test_mean_false_gives_the_sum(mesh):
    x = grads(mesh.size)
    got = per_rank(mesh, lambda x: jdp.sync_gradients(x, mean=False), x)
    assert_every_rank_has(got, jax.tree.map(lambda leaf: leaf.sum(axis=0), x))


def test_an_algorithm_gets_every_leaf_once_with_one_scale(make_mesh):
    calls = []

    def all_reduce(buckets, axis_name, *, scale, mesh):
        calls.append(([[leaf.shape for leaf in bucket] for bucket in buckets], axis_name, scale))
        return xla(buckets, axis_name, scale=scale)

    x = {"a": np.ones((4, 3), np.float32), "b": np.ones((4, 2), np.float32)}
    per_rank(
        make_mesh(4), lambda x: jdp.sync_gradients(x, all_reduce=all_reduce, bucket_bytes=12), x
    )
    assert calls == [([[(2,)], [(3,)]], ("data",), 0.25)]


def test_float64_keeps_its_digits(make_mesh):
    x = np.random.default_rng(0).normal(size=(3, 5))
    w = np.array([0.1, 0.2, 0.4])
    with jax.enable_x64(True):
        plain = per_rank(make_mesh(3), jdp.sync_gradients, x)
        weighted = per_rank(make_mesh(3), lambda x, w: jdp.sync_gradients(x, weight=w), x, w)
    np.testing.assert_allclose(plain[0], x.mean(axis=0), rtol=1e-14)
    np.testing.assert_allclose(weighted[0], w @ x / w.sum(), rtol=1e-14)


@every_algorithm
def test_a_float16_mean_is_finite_where_the_sum_is_not(make_mesh, all_reduce):
    x = np.full((2, 3), 60_000, np.float16)
    fn = functools.partial(jdp.sync_gradients, all_reduce=all_reduce)
    np.testing.assert_array_equal(per_rank(make_mesh(2), fn, x), x)


def test_an_empty_tree_needs_no_reduction(make_mesh):
    empty = {"a": [], "b": None}
    assert per_rank(make_mesh(2), lambda x: jdp.sync_gradients(empty), np.ones(2)) == empty


@pytest.mark.parametrize("check_vma", [True, False])
def test_works_in_a_shard_map_with_types_and_without(make_mesh, check_vma):
    x = grads(3)
    got = per_rank(make_mesh(3), jdp.sync_gradients, x, check_vma=check_vma)
    assert_every_rank_has(got, mean_of(x))


@every_algorithm
def test_works_in_pmap(all_reduce):
    x = grads(2)
    mapped = jax.pmap(
        lambda x: jdp.sync_gradients(x, axis_name="batch", all_reduce=all_reduce),
        axis_name="batch",
        devices=jax.devices()[:2],
    )
    assert_every_rank_has(jax.device_get(mapped(x)), mean_of(x))


def test_pmap_over_another_axis_is_refused():
    mapped = jax.pmap(jdp.sync_gradients, axis_name="batch", devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="'data' .* axis_name='batch'"):
        mapped(np.ones(2))


def test_works_in_a_named_vmap_and_under_a_nameless_one(make_mesh):
    x = grads(3)
    mapped = jax.jit(jax.vmap(jdp.sync_gradients, axis_name="data"))
    assert_every_rank_has(jax.device_get(mapped(x)), mean_of(x))
    # Ensembles: each member's gradients are averaged over ranks, never with another's.
    members = np.arange(12, dtype=np.float32).reshape(3, 4)
    got = per_rank(make_mesh(3), jax.vmap(jdp.sync_gradients), members)
    assert_every_rank_has(got, members.mean(axis=0))


def test_where_nothing_is_bound_the_only_rank_keeps_its_gradients():
    x = grads(1)
    for bucket_bytes in (1, 2**20):
        got = jdp.sync_gradients(x, bucket_bytes=bucket_bytes)
        jax.tree.map(np.testing.assert_array_equal, got, x)
    np.testing.assert_array_equal(jdp.sync_gradients(x["w"], weight=5), x["w"])
    np.testing.assert_array_equal(jdp.sync_gradients(x["w"], weight=3, mean=False), 3 * x["w"])


@every_algorithm
def test_two_axes_may_form_the_data_axis(all_reduce):
    names = ("replica", "fsdp")
    mesh = jax.make_mesh((2, 3), names, (AxisType.Auto,) * 2, devices=jax.devices()[:6])
    x = grads(6)

    def fn(x):
        return jdp.sync_gradients(x, axis_name=names, all_reduce=all_reduce)

    assert_every_rank_has(per_rank(mesh, fn, x), mean_of(x))


@pytest.mark.parametrize("check_vma", [True, False])
def test_on_a_mesh_with_a_model_axis_only_the_data_axis_is_averaged(check_vma):
    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    x = np.arange(4, dtype=np.float32)  # rank (data, model): 2 * data + model
    got = per_rank(mesh, jdp.sync_gradients, x, check_vma=check_vma)
    np.testing.assert_array_equal(got, [1, 2, 1, 2])


@every_algorithm
def test_weights_that_the_compiler_splits_stay_split(all_reduce):
    mesh = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices())
    x = np.random.default_rng(0).integers(-9, 9, (2, 8, 4)).astype(np.float32)
    mapped = jax.jit(
        jax.shard_map(
            lambda x: jdp.sync_gradients({"w": x[0], "b": x[0, 0, 0]}, all_reduce=all_reduce),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P(),
            axis_names={"data"},
            check_vma=False,
        )
    )
    got = mapped(jax.device_put(x, NamedSharding(mesh, P("data", "model"))))
    np.testing.assert_array_equal(got["w"], x.mean(axis=0))
    np.testing.assert_array_equal(got["b"], x.mean(axis=0)[0, 0])
    if all_reduce is xla:  # a ring lays leaves end to end
        assert got["w"].sharding.spec[0] == "model"


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_weighs_each_rank_and_divides_by_all_weights(make_mesh, num_ranks):
    x, w = grads(num_ranks), np.arange(1, num_ranks + 1).astype(np.float32)

    def fn(x, w):
        return [jdp.sync_gradients(x, weight=w, mean=mean) for mean in (True, False)]

    means, sums = per_rank(make_mesh(num_ranks), fn, x, w)
    for tree in (x, means, sums):
        del tree["h"]  # bfloat16 has too few digits
    want = jax.tree.map(lambda leaf: np.tensordot(w, leaf, 1), x)
    assert_every_rank_has(sums, want)
    assert_every_rank_has(means, jax.tree.map(lambda leaf: leaf / w.sum(), want))


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_any_split_of_the_rows_equals_one_rank(data):
    # Each rank has 6 places, some of them padding; its gradient is a mean over its own rows.
    rows = np.array(data.draw(st.lists(st.integers(-99, 99), min_size=24, max_size=24)))
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=24, max_size=24)))
    got = _mean_of_masked_rows(rows.reshape(4, 6).astype(np.float32), mask.reshape(4, 6))
    want = rows[mask].mean() if mask.any() else 0
    np.testing.assert_allclose(got, [want] * 4, rtol=1e-5, atol=1e-5)


@jax.jit
def _mean_of_masked_rows(rows, mask):
    def fn(rows, mask):
        local = jnp.where(mask, rows, 0).sum() / mask.sum()  # 0 / 0 where no row counts
        return jdp.sync_gradients(local, weight=mask.sum())

    return jax.vmap(fn, axis_name="data")(rows, mask)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@every_algorithm
def test_a_rank_of_weight_0_contributes_nothing_whatever_it_holds(make_mesh, all_reduce, bad):
    x = np.array([[1, 2], [bad, bad], [5, 6]], np.float32)

    def fn(x, w):
        return [
            jdp.sync_gradients(x, weight=w, mean=mean, all_reduce=all_reduce)
            for mean in (True, False)
        ]

    mean, total = per_rank(make_mesh(3), fn, x, np.array([3, 0, 1]))
    np.testing.assert_array_equal(mean, [[2, 3]] * 3)
    np.testing.assert_array_equal(total, [[8, 12]] * 3)


def test_where_nothing_counts_at_all_the_gradient_is_zero(make_mesh):
    x = np.array([np.nan, 1], np.float32)
    got = per_rank(make_mesh(2), lambda x, w: jdp.sync_gradients(x, weight=w), x, np.zeros(2))
    np.testing.assert_array_equal(got, [0, 0])
    assert jdp.sync_gradients(np.float32(np.nan), weight=0) == 0


def test_a_weight_that_is_nan_is_not_swallowed(make_mesh):
    w = np.array([np.nan, 1], np.float32)
    got = per_rank(make_mesh(2), lambda w: jdp.sync_gradients(jnp.ones(2), weight=w), w)
    assert np.isnan(got).all()


@pytest.mark.parametrize("weight", [100_000, np.int32(100_000), np.float32(1e30)])
def test_large_weights_do_not_overflow_float16(make_mesh, weight):
    x = np.array([[40_000, 1], [20_000, 3]], np.float16)
    got = per_rank(make_mesh(2), lambda x: jdp.sync_gradients(x, weight=weight), x)
    np.testing.assert_array_equal(got, np.array([[30_000, 2]] * 2, np.float16))


def test_a_share_is_not_rounded_to_the_dtype_of_the_gradient(make_mesh):
    x = np.array([[10, 13], [0, 0], [0, 0]], jnp.bfloat16)
    got = per_rank(make_mesh(3), lambda x: jdp.sync_gradients(x, weight=1), x)
    np.testing.assert_array_equal(got, np.stack([(np.array([10, 13]) / 3).astype(x.dtype)] * 3))


def test_a_weight_may_be_a_mask_or_a_count(make_mesh):
    x = np.array([1, 5, 9], np.float32)
    for w, want in (([True, False, True], 5), ([1, 0, 3], 7)):
        got = per_rank(make_mesh(3), lambda x, w: jdp.sync_gradients(x, weight=w), x, np.array(w))
        np.testing.assert_array_equal(got, [want] * 3)


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_weight_of_the_step_is_the_default(make_mesh, check_vma):
    x, w = np.array([1, 5, 9], np.float32), np.array([[1], [0], [3]], np.float32)

    def fn(x, w):
        with step_context.entered("data", w, lambda w: w.sum()):
            said_here = jdp.sync_gradients(x, weight=jnp.ones(()))
            return jdp.sync_gradients(x), said_here

    default, said_here = per_rank(make_mesh(3), fn, x, w, check_vma=check_vma)
    np.testing.assert_array_equal(default, [7] * 3)
    np.testing.assert_array_equal(said_here, [5] * 3)


def test_the_step_learns_which_gradients_were_reduced():
    with step_context.entered("data", np.ones(2), None) as step:
        jdp.sync_gradients({"w": [1.0, 2.0]})
        jdp.sync_gradients({"b": 1.0})
    assert step.marked == {"['w'][0]", "['w'][1]", "['b']"}


def test_the_weight_of_the_step_is_summed_once(make_mesh):
    def fn(x, w):
        with step_context.entered("data", w, lambda w: w.sum()):
            return jdp.sync_gradients(x), jdp.sync_gradients(2 * x), jdp.mean_over_ranks(x)

    mapped = jax.shard_map(
        fn, mesh=make_mesh(2), in_specs=P("data"), out_specs=P(), check_vma=False
    )
    jaxpr = jax.make_jaxpr(mapped)(np.ones(2, np.float32), np.ones(2, np.float32)).jaxpr
    assert count("psum", jaxpr) == 4


@pytest.mark.parametrize(
    "leaf, name",
    [
        (np.ones(3, np.int32), r"int32\[3\]"),
        (np.ones(3, bool), r"bool\[3\]"),
        (np.zeros((2, 3), jax.dtypes.float0), r"float0\[2, 3\]"),
        (3, r"int32\[\]"),
    ],
)
def test_what_is_no_float_is_refused_by_path(leaf, name):
    with pytest.raises(TypeError, match=rf"`grads\['w'\]\[1\]` is {name}"):
        jdp.sync_gradients({"w": [np.ones(1, np.float32), leaf]})


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_a_gradient_of_8_bits_is_refused_by_its_path(name):
    with pytest.raises(TypeError, match=rf"`grads\['w'\]` is {name}\[3\].*\b16 bits"):
        jdp.sync_gradients({"w": jnp.ones(3, name)})


@pytest.mark.parametrize("algorithm", [jdp.collectives.auto, ring, xla])
def test_a_complex_gradient_is_averaged_by_its_parts(make_mesh, algorithm):
    x = np.array([[1 + 2j, 3e-3j], [2, 5 - 1j], [6 - 5j, 1 - 2e-3j]], np.complex64)
    narrow = {"all_reduce": algorithm, "reduce_dtype": jnp.bfloat16}
    got = per_rank(make_mesh(3), lambda x: jdp.sync_gradients(x, **narrow), x)
    assert got.dtype == np.complex64
    np.testing.assert_allclose(got, np.tile(x.mean(0), (3, 1)), rtol=3e-7)


def test_the_gradient_of_an_integer_parameter_is_refused(make_mesh):
    def fn(x):
        loss_fn = lambda p: jnp.sum(p["w"] * x)  # noqa: E731
        p = {"w": jnp.ones(2), "n": jnp.arange(2)}
        return jdp.sync_gradients(jax.grad(loss_fn, allow_int=True)(p))

    with pytest.raises(TypeError, match=r"`grads\['n'\]` is float0\[2\]"):
        per_rank(make_mesh(2), fn, np.ones((2, 2), np.float32))


@pytest.mark.parametrize("fn", [jdp.sync_gradients, jdp.mean_over_ranks])
@pytest.mark.parametrize(
    "weight, found", [(np.ones(3, np.float32), r"float32\[3\]"), (1j, "complex")]
)
def test_a_weight_that_is_not_one_number_is_refused(make_mesh, fn, weight, found):
    with pytest.raises(ValueError, match=f"{found}.*JDP126"):
        per_rank(make_mesh(2), lambda x: fn(x, weight=weight), np.ones((2, 3), np.float32))


def test_a_bucket_without_room_is_refused(make_mesh):
    with pytest.raises(ValueError, match=r"bucket_bytes .*\b0\b"):
        per_rank(make_mesh(2), lambda x: jdp.sync_gradients(x, bucket_bytes=0), np.ones(2))


def test_a_ring_in_a_typed_shard_map_is_refused(make_mesh):
    with pytest.raises(ValueError, match="check_vma=False .*all_reduce=jdp"):
        per_rank(
            make_mesh(2),
            lambda x: jdp.sync_gradients(x, all_reduce=ring),
            np.ones(2),
            check_vma=True,
        )


# The gradient trap: whose gradient does JAX give in a shard_map of the user's? Rows 1 to 8 on
# 4 ranks, loss mean(x @ w): the mean gradient is [4, 5].

ROWS = np.arange(1, 9, dtype=np.float32).reshape(4, 1, 2)
WEIGHTS = np.ones(2, np.float32)


def loss_fn(w, x):
    return jnp.mean(x @ w)


def trapped(mesh, fn, check_vma):
    mapped = jax.shard_map(
        lambda w, x: fn(w, x[0]),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    return jax.jit(mapped).trace(WEIGHTS, ROWS)


@pytest.mark.parametrize("check_vma", [True, False])
def test_value_and_grad_and_sync_give_the_mean_with_one_reduction_for_each_leaf(
    make_mesh, check_vma
):
    def fn(w, x):
        _, grads = jdp.value_and_grad(loss_fn)(w, x)
        return jdp.sync_gradients(grads)

    traced = trapped(make_mesh(4), fn, check_vma)
    np.testing.assert_array_equal(traced.lower().compile()(WEIGHTS, ROWS), [4, 5])
    assert traced.lower().as_text().count("stablehlo.all_reduce") == 1


def test_a_gradient_that_jax_has_summed_is_refused_in_a_typed_shard_map(make_mesh):
    def fn(w, x):
        return jdp.sync_gradients({"w": jax.grad(loss_fn)(w, x)})

    with pytest.raises(ValueError, match=r"`grads\['w'\]` float32\[2\] .* 4 .*jdp\.value_and_grad"):
        trapped(make_mesh(4), fn, check_vma=True)


def test_a_mean_loss_that_jax_has_averaged_is_refused_in_a_typed_shard_map(make_mesh):
    def fn(w, x):
        return jdp.sync_gradients(jax.grad(lambda w: lax.pmean(loss_fn(w, x), "data"))(w))

    with pytest.raises(ValueError, match=r"'data'.*jdp\.value_and_grad"):
        trapped(make_mesh(4), fn, check_vma=True)


def test_a_gradient_summed_over_one_of_two_axes_is_refused():
    names = ("replica", "fsdp")
    mesh = jax.make_mesh((2, 2), names, (AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def fn(x):
        return jdp.sync_gradients(lax.psum(x, "fsdp"), axis_name=names)

    with pytest.raises(ValueError, match=r"jdp\.value_and_grad"):
        per_rank(mesh, fn, np.ones(4, np.float32), check_vma=True)


@pytest.mark.parametrize(
    "loss",
    [loss_fn, lambda w, x: lax.pmean(loss_fn(w, x), "data")],
    ids=["local loss", "mean loss"],
)
def test_an_untyped_gradient_is_local_also_of_a_mean_loss(make_mesh, loss):
    def fn(w, x):
        return jdp.sync_gradients(jax.grad(loss)(w, x))

    traced = trapped(make_mesh(4), fn, check_vma=False)
    np.testing.assert_array_equal(traced.lower().compile()(WEIGHTS, ROWS), [4, 5])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("k", [1, 2])
def test_a_loss_that_is_a_mean_over_ranks_already_has_the_same_gradient(make_mesh, check_vma, k):
    def loss(w, x):
        return lax.psum(jnp.sum(x @ w), "data") / lax.psum(len(x), "data")

    def fn(w, x):
        _, grads = jdp.value_and_grad(loss, accumulate=k)(w, jnp.concatenate([x] * k))
        return jdp.sync_gradients(grads)

    traced = trapped(make_mesh(4), fn, check_vma)
    np.testing.assert_array_equal(traced.lower().compile()(WEIGHTS, ROWS), [4, 5])


def test_a_mean_is_not_averaged_again_in_a_typed_shard_map(make_mesh):
    def fn(x):
        return jdp.sync_gradients(jdp.sync_gradients(x))

    with pytest.raises(ValueError, match=r"`grads` float32\[\].*jdp\.value_and_grad"):
        per_rank(make_mesh(2), fn, np.ones(2, np.float32), check_vma=True)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_penalty_on_the_weights_is_counted_once(make_mesh, check_vma):
    def fn(w, x):
        _, grads = jdp.value_and_grad(lambda w, x: loss_fn(w, x) + jnp.sum(w**2) / 2)(w, x)
        return jdp.sync_gradients(grads)

    traced = trapped(make_mesh(4), fn, check_vma)
    np.testing.assert_array_equal(traced.lower().compile()(WEIGHTS, ROWS), [5, 6])


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_parameter_that_the_loss_does_not_read_has_gradient_zero(make_mesh, check_vma):
    def fn(x):
        p = {"used": jnp.ones(2), "unused": jnp.ones(3)}
        _, grads = jdp.value_and_grad(lambda p, x: loss_fn(p["used"], x))(p, x)
        return jdp.sync_gradients(grads)

    got = per_rank(make_mesh(4), fn, ROWS, check_vma=check_vma)
    assert_every_rank_has(
        got, {"used": np.array([4, 5], np.float32), "unused": np.zeros(3, np.float32)}
    )


@pytest.mark.parametrize("check_vma", [True, False])
def test_one_reduction_in_the_forward_pass_keeps_the_gradient_right(make_mesh, check_vma):
    # As batch normalisation over all ranks does: the statistics hold every rank's rows.
    def loss(w, x):
        y = x @ w
        return jnp.mean((y - lax.pmean(jnp.mean(y), "data")) ** 2)

    def fn(w, x):
        return jdp.sync_gradients(jdp.value_and_grad(loss)(w, x)[1])

    def whole(w):
        y = ROWS[:, 0] @ w
        return jnp.mean((y - jnp.mean(y)) ** 2)

    got = trapped(make_mesh(4), fn, check_vma).lower().compile()(WEIGHTS, ROWS)
    np.testing.assert_allclose(got, jax.grad(whole)(WEIGHTS), rtol=1e-6)
