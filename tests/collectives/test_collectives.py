"""What every all-reduce must do, and what is particular to one."""

import itertools
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.per_rank import assert_equal_bits, per_rank

from jdp import axis, collectives
from jdp.collectives.cpu import runtime as cpu_runtime


def packed(*args, **kwargs):
    """What `xla` does between CPU processes."""
    with mock.patch.object(axis, "is_between_processes", lambda mesh: True):
        return collectives.xla(*args, **kwargs)


ANYWHERE = [collectives.xla, packed, collectives.ring, collectives.auto]


def native_ring(*args, **kwargs):
    return collectives.native(*args, algorithm="ring", **kwargs)


NATIVE = [collectives.native, native_ring] if cpu_runtime.why_missing() is None else []
DTYPES = ["float32", "bfloat16", "float16", "int32", "int8", "uint8", "float64"]
# Less than one element for each rank, multiples of the ranks and their neighbours, a prime; and a
# large one that divides by nothing.
SIZES = [1, 2, 15, 16, 17, 97]
LARGE = 2**20 + 3

every_algorithm = pytest.mark.parametrize("all_reduce", ANYWHERE + NATIVE, ids=lambda f: f.__name__)
those_of_anywhere = pytest.mark.parametrize("all_reduce", ANYWHERE, ids=lambda f: f.__name__)


def whole_numbers(num_ranks, *shape, dtype="float32"):
    """Of which every sum over ranks is exact in every dtype: at most 8 * 15."""
    draw = np.random.default_rng(sum(shape)).integers(0, 16, (num_ranks, *shape))
    return draw.astype(jnp.dtype(dtype))


def normal(num_ranks, *shape, dtype="float32"):
    draw = np.random.default_rng(sum(shape)).normal(size=(num_ranks, *shape))
    return draw.astype(jnp.dtype(dtype))


def reduced(mesh, all_reduce, buckets, **kwargs):
    def fn(buckets):
        return all_reduce(buckets, tuple(mesh.axis_names), **kwargs)

    return per_rank(mesh, fn, buckets)


@every_algorithm
def test_sums_over_ranks(mesh, all_reduce):
    x = [[whole_numbers(mesh.size, size)] for size in SIZES]
    got = reduced(mesh, all_reduce, x)
    for [total], [leaf] in zip(got, x, strict=True):
        np.testing.assert_array_equal(total, np.stack([leaf.sum(axis=0)] * mesh.size))


@every_algorithm
def test_sums_every_dtype_as_it_is(make_mesh, all_reduce):
    with jax.enable_x64(True):
        x = [[whole_numbers(3, size, dtype=dtype)] for dtype in DTYPES for size in (1, 16)]
        got = reduced(make_mesh(3), all_reduce, x)
    for [total], [leaf] in zip(got, x, strict=True):
        assert total.dtype == leaf.dtype
        want = leaf.astype(np.float64).sum(axis=0)
        np.testing.assert_array_equal(total.astype(np.float64), np.stack([want] * 3))


@every_algorithm
def test_float64_keeps_its_digits(make_mesh, all_reduce):
    x = normal(3, 5, dtype="float64")
    with jax.enable_x64(True):
        [[got]] = reduced(make_mesh(3), all_reduce, [[x]], scale=1 / 3)
    np.testing.assert_allclose(got, np.stack([x.mean(axis=0)] * 3), rtol=1e-15, atol=1e-16)


@every_algorithm
def test_sums_a_large_leaf_that_divides_by_nothing(mesh, all_reduce):
    x = whole_numbers(mesh.size, LARGE)
    [[got]] = reduced(mesh, all_reduce, [[x]])
    for rank in range(mesh.size):
        np.testing.assert_array_equal(got[rank], x.sum(axis=0))


@every_algorithm
def test_leaves_of_a_bucket_keep_their_places_and_shapes(mesh, all_reduce):
    n = mesh.size
    shapes = [[(3, 5), (), (1, 1, 7), (3, 5)], [(2,)]]
    x = [[whole_numbers(n, *shape) + i for i, shape in enumerate(bucket)] for bucket in shapes]
    x[1] = [x[1][0].astype(np.int32)]
    got = reduced(mesh, all_reduce, x)
    assert jax.tree.structure(got) == jax.tree.structure(x)
    for total, leaf in zip(jax.tree.leaves(got), jax.tree.leaves(x), strict=True):
        assert total.dtype == leaf.dtype
        np.testing.assert_array_equal(total, np.stack([leaf.sum(axis=0)] * n))


@every_algorithm
def test_a_leaf_without_elements_stays_one(make_mesh, all_reduce):
    def fn(x):  # JAX 0.11 dies of an empty argument that is split over devices: made in here
        return all_reduce([[x, x[:0], x], [x[None, :0]]], "data", scale=2)

    x = whole_numbers(3, 5)
    [[one, empty, two], [alone]] = per_rank(make_mesh(3), fn, x)
    assert (empty.shape, alone.shape) == ((3, 0), (3, 1, 0))
    for got in (one, two):
        np.testing.assert_array_equal(got, np.stack([2 * x.sum(axis=0)] * 3))


@every_algorithm
def test_every_rank_ends_with_equal_bits(mesh, all_reduce):
    n, tolerances = mesh.size, {"float32": 1e-6, "bfloat16": 3e-2}
    x = [[normal(n, 97, dtype=dtype), normal(n, 3, 5, dtype=dtype)] for dtype in tolerances]
    got = reduced(mesh, all_reduce, x, scale=1 / 7)
    assert_equal_bits(got)
    for totals, leaves, tolerance in zip(got, x, tolerances.values(), strict=True):
        for total, leaf in zip(totals, leaves, strict=True):
            want = leaf.astype(np.float64).sum(axis=0) / 7
            np.testing.assert_allclose(total[0].astype(np.float64), want, tolerance, tolerance)


@every_algorithm
def test_numbers_that_are_not_finite_reach_every_rank(make_mesh, all_reduce):
    x = normal(3, 9)
    x[2, 2], x[0, 7] = np.nan, np.inf
    [[got]] = reduced(make_mesh(3), all_reduce, [[x]], scale=0.5)
    assert_equal_bits(got)
    np.testing.assert_array_equal(np.isnan(got[0]), np.arange(9) == 2)
    np.testing.assert_array_equal(np.isinf(got[0]), np.arange(9) == 7)


@every_algorithm
def test_scale_multiplies_the_sum(make_mesh, all_reduce):
    x = whole_numbers(3, 5)

    def fn(x, scale):
        return [all_reduce([[x]], "data", scale=s)[0][0] for s in (0.25, 2, scale)]

    for got, scale in zip(
        per_rank(make_mesh(3), fn, x, replicated=(np.float32(1.5),)), (0.25, 2, 1.5), strict=True
    ):
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got[0], x.sum(axis=0) * scale)


@every_algorithm
def test_a_mean_is_rounded_once(make_mesh, all_reduce):
    # 1 / 3 in bfloat16 is 0.2 % too large.
    x = [[whole_numbers(3, 97, dtype=dtype)] for dtype in ("bfloat16", "float32")]
    for [mean], [leaf] in zip(reduced(make_mesh(3), all_reduce, x, scale=1 / 3), x, strict=True):
        want = (leaf.astype(np.float64).sum(axis=0) / 3).astype(leaf.dtype)
        tolerance = 0 if leaf.dtype == jnp.bfloat16 else 2e-7
        np.testing.assert_allclose(mean[0].astype(float), want.astype(float), rtol=tolerance)


@every_algorithm
def test_a_float16_mean_is_finite_where_the_sum_is_not(make_mesh, all_reduce):
    x = np.full((2, 4), 60_000, np.float16)
    [[got]] = reduced(make_mesh(2), all_reduce, [[x]], scale=0.5)
    np.testing.assert_array_equal(got, x)


@every_algorithm
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_the_mean_of_rank_r_contributing_r_is_exact(make_mesh, all_reduce, num_ranks):
    rank = np.arange(num_ranks, dtype=np.float32)
    [[got]] = reduced(make_mesh(num_ranks), all_reduce, [[rank]], scale=1 / num_ranks)
    np.testing.assert_array_equal(got, [sum(range(num_ranks)) / num_ranks] * num_ranks)


@every_algorithm
@pytest.mark.parametrize("shape", [(3, 2), (1, 3)])
def test_two_axes_of_a_mesh_act_as_one(all_reduce, shape):
    devices = jax.devices()[: shape[0] * shape[1]]
    mesh = jax.make_mesh(shape, ("replica", "fsdp"), (AxisType.Auto,) * 2, devices=devices)
    x = whole_numbers(mesh.size, 11)
    [[got]] = reduced(mesh, all_reduce, [[x]])
    np.testing.assert_array_equal(got, np.stack([x.sum(axis=0)] * mesh.size))


@every_algorithm
@pytest.mark.parametrize("axis", ["data", "model"])
def test_one_axis_of_a_mesh_leaves_the_other_alone(all_reduce, axis):
    mesh = jax.make_mesh((2, 3), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:6])
    x = whole_numbers(6, 5)
    [[got]] = per_rank(mesh, lambda x: all_reduce([[x]], axis), x)
    dim = 0 if axis == "data" else 1
    grid = x.reshape(2, 3, 5)
    want = np.broadcast_to(grid.sum(axis=dim, keepdims=True), grid.shape)
    np.testing.assert_array_equal(got.reshape(grid.shape), want)


@those_of_anywhere
def test_another_axis_may_be_left_to_the_compiler(all_reduce):
    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    x = whole_numbers(2, 6, 4)
    mapped = jax.shard_map(
        lambda x: all_reduce([[x]], "data")[0][0],
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
        axis_names={"data"},
        check_vma=False,
    )
    split = jax.device_put(x, jax.NamedSharding(mesh, P("data", None, "model")))
    np.testing.assert_array_equal(jax.jit(mapped)(split), x.sum(axis=0, keepdims=True))


@those_of_anywhere
def test_works_in_pmap_vmap_and_scan(all_reduce):
    x = whole_numbers(2, 2, 5)

    def fn(x):
        each = jax.lax.scan(lambda c, row: (c, all_reduce([[row]], "data")[0][0]), 0, x)[1]
        rows = jax.vmap(lambda row: all_reduce([[row]], "data")[0][0])(x)
        return each, rows

    for mapped in (
        jax.pmap(fn, axis_name="data", devices=jax.devices()[:2]),
        jax.jit(jax.vmap(fn, axis_name="data")),
    ):
        for got in mapped(x):
            np.testing.assert_array_equal(got, np.stack([x.sum(axis=0)] * 2))


# Only xla


def test_xla_gives_a_typed_shard_map_what_does_not_vary(mesh):
    x = whole_numbers(mesh.size, 5)
    mapped = jax.shard_map(
        lambda x: collectives.xla([[x]], "data", scale=0.5)[0][0],
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),  # JAX refuses it for a value that varies
    )
    np.testing.assert_array_equal(jax.jit(mapped)(x), x.sum(axis=0, keepdims=True) / 2)


# Only ring


def messages(jaxpr):
    """Sizes of what a rank sends, in order."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "ppermute":
            yield from (x.aval.size for x in equation.invars)
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                yield from messages(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("size, chunk", [(1, 1), (15, 4), (16, 4), (17, 5)])
def test_a_ring_sends_as_little_as_possible(make_mesh, size, chunk):
    mapped = jax.shard_map(
        lambda x: collectives.ring([[x, x], [x]], "data"),
        mesh=make_mesh(4),
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    sent = list(messages(jax.make_jaxpr(mapped)(np.zeros(size, np.float32)).jaxpr))
    both = -(-2 * size // 4)
    assert sent == [both] * 6 + [chunk] * 6  # 2 (n - 1) messages for each bucket


def test_a_ring_on_one_rank_sends_nothing(make_mesh):
    mapped = jax.shard_map(
        lambda x: collectives.ring([[x]], "data"),
        mesh=make_mesh(1),
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    assert not list(messages(jax.make_jaxpr(mapped)(np.zeros(5, np.float32)).jaxpr))


def test_a_ring_in_a_typed_shard_map_is_refused_with_its_reason(make_mesh):
    mapped = jax.shard_map(
        lambda x: collectives.ring([[x]], "data")[0][0],
        mesh=make_mesh(2),
        in_specs=P("data"),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match=r"check_vma=False.*all_reduce=jdp"):
        jax.eval_shape(mapped, np.zeros(2, np.float32))


@pytest.mark.parametrize("shape", [(2, 3), (2, 2, 2)])
@every_algorithm
def test_the_order_of_the_axes_does_not_count(all_reduce, shape):
    names = ("a", "b", "c")[: len(shape)]
    mesh = jax.make_mesh(
        shape, names, (AxisType.Auto,) * len(shape), devices=jax.devices()[: np.prod(shape)]
    )
    x = np.arange(mesh.size * 10, dtype=np.float32).reshape(mesh.size, 10)
    for axes in itertools.permutations(names):
        got = per_rank(mesh, lambda x, axes=axes: all_reduce([[x]], axes)[0][0], x)
        np.testing.assert_array_equal(got, [x.sum(axis=0)] * mesh.size)


ON_FURTHER_AXES = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
import jdp

jax.config.update("jax_num_cpu_devices", 4)
for size in (1, 2):
    mesh = jax.make_mesh((2, size), ("data", "model"), (AxisType.Auto,) * 2,
                         devices=jax.devices()[: 2 * size])
    x = jax.device_put(jnp.ones((4, 6), "bfloat16"), jax.NamedSharding(mesh, P(None, "model")))

    def summed(x):
        algorithms = jdp.collectives.auto, jdp.collectives.xla, jdp.collectives.ring
        sums = [all_reduce([[x]], "data")[0][0] for all_reduce in algorithms]
        slope = jax.grad(lambda x: jdp.sum_over_ranks(x).astype("float32").sum())(x)
        return [*sums, jdp.sum_over_ranks(x), 2 * jdp.mean_over_ranks(x), slope]

    options = dict(mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=False)
    for got in jax.jit(jax.shard_map(summed, **options))(x):
        assert got.dtype == "bfloat16", got.dtype
        np.testing.assert_array_equal(got.astype("float32"), np.full((4, 6), 2))
"""


def test_bfloat16_beside_an_axis_of_the_compiler_does_not_abort():
    child = subprocess.run(
        [sys.executable, "-c", ON_FURTHER_AXES], capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr[-2000:]
