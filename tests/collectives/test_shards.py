"""Reduce-scatter and all-gather: every rank's slice of the sum, and the whole of all slices."""

import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from support.per_rank import assert_equal_bits, per_rank
from support.transforms import each_transform

from jdp import axis, collectives
from jdp.collectives import native_shards, shards, xla_shards
from jdp.collectives.cpu import runtime as cpu_runtime

NATIVE = [native_shards] if cpu_runtime.why_missing() is None else []
# Sizes of a slice: (shape, dim along which it is cut).
CUTS = [
    [((5,), 0), ((1,), 0), ((3, 7), 0), ((3, 7), 1), ((97, 1), 1)],
    [((2, 3, 5), 0), ((2, 3, 5), 1), ((2, 3, 5), 2), ((11, 13), 1)],
    [((1, 1, 17), 2)],
]
DIMS = [[dim for _, dim in bucket] for bucket in CUTS]
# Leaves of a reduce-scatter, some of which stay whole.
KEPT = [
    [((5,), None), ((3, 7), 1), ((), None), ((0, 3), None), ((97, 1), 0), ((1_009,), None)],
    [((2, 3), None)],
]
KEPT_DIMS = [[dim for _, dim in bucket] for bucket in KEPT]
# The wholes of six ranks have so many bytes.
LARGE = {
    "0.1 MB": [((3_001,), 0), ((401, 3), 1)],
    "5 MB": [((503, 101, 3), 1), ((211, 269), 0)],
    "30 MB": [((700_001,), 0), ((1_009, 499), 1), ((11, 4_001), 0)],
}
LARGE_KEPT = [((1,), None), ((50_021, 3), 1), ((300_007,), None), ((7, 31), 0), ((499,), None)]


def exchange(*args, **options):
    """What `xla_shards` does between CPU processes."""
    with mock.patch.object(axis, "is_between_processes", lambda mesh: True):
        return xla_shards.reduce_scatter(*args, **options)


def gather(*args, **options):
    with mock.patch.object(axis, "is_between_processes", lambda mesh: True):
        return xla_shards.all_gather(*args, **options)


EXCHANGE = types.SimpleNamespace(__name__="exchange", reduce_scatter=exchange, all_gather=gather)

each = pytest.mark.parametrize(
    "algorithm", [xla_shards, EXCHANGE, shards, *NATIVE], ids=lambda m: m.__name__.split(".")[-1]
)
needs_library = pytest.mark.skipif(not NATIVE, reason=f"{cpu_runtime.why_missing()}")


def whole_shape(shape, dim, num_ranks):
    if dim is None:
        return shape
    return (*shape[:dim], shape[dim] * num_ranks, *shape[dim + 1 :])


def numbers(num_ranks, shape, dtype="float32"):
    """Small whole numbers, whose sums are exact in every dtype: `[rank, *shape]`."""
    draw = np.random.default_rng(sum(shape)).integers(0, 16, (num_ranks, *shape))
    return draw.astype(jnp.dtype(dtype))


def wholes(num_ranks, cuts=CUTS, dtype="float32"):
    return [
        [numbers(num_ranks, whole_shape(shape, dim, num_ranks), dtype) for shape, dim in bucket]
        for bucket in cuts
    ]


def slices(num_ranks, cuts=CUTS, dtype="float32"):
    return [[numbers(num_ranks, shape, dtype) for shape, _ in bucket] for bucket in cuts]


def assert_slices_of_sum(got, given, cuts=CUTS, scale=1.0):
    """`got[bucket][leaf][rank]` is the rank's slice of the sum of `given`, or all of it."""
    for parts, leaves, bucket in zip(got, given, cuts, strict=True):
        for part, leaf, (shape, dim) in zip(parts, leaves, bucket, strict=True):
            total = leaf.astype(np.float64).sum(axis=0) * scale
            n = len(leaf)
            want = [total] * n if dim is None else np.split(total, n, axis=dim)
            assert part.dtype == leaf.dtype and part.shape[1:] == shape
            for rank in range(len(leaf)):
                np.testing.assert_array_equal(part[rank].astype(np.float64), want[rank])


def assert_wholes(got, given, cuts=CUTS):
    for parts, leaves, bucket in zip(got, given, cuts, strict=True):
        for part, leaf, (_, dim) in zip(parts, leaves, bucket, strict=True):
            want = np.concatenate([*leaf], axis=dim)
            assert part.dtype == leaf.dtype
            for rank in range(len(leaf)):
                np.testing.assert_array_equal(part[rank], want)


@each
def test_every_rank_gets_its_slice_of_the_sum(mesh, algorithm):
    given = wholes(mesh.size)
    got = per_rank(mesh, lambda x: algorithm.reduce_scatter(x, DIMS, "data", scale=0.5), given)
    assert_slices_of_sum(got, given, scale=0.5)


@each
def test_every_rank_gets_all_of_the_sum_of_a_leaf_without_a_dim(mesh, algorithm):
    given = wholes(mesh.size, KEPT)
    got = per_rank(mesh, lambda x: algorithm.reduce_scatter(x, KEPT_DIMS, "data", scale=2), given)
    assert_slices_of_sum(got, given, KEPT, scale=2)


@each
def test_every_rank_gets_the_whole_of_all_slices(mesh, algorithm):
    given = slices(mesh.size)
    got = per_rank(mesh, lambda x: algorithm.all_gather(x, DIMS, "data"), given)
    assert_wholes(got, given)


@each
def test_every_dtype_stays_as_it_is(make_mesh, algorithm):
    summed = ["float32", "bfloat16", "float16", "int32", "int8", "uint8", "float64"]
    # XLA copies the second ones. Beside native calls, outside of a step, ranks might run its
    # collectives in different orders, and wait for each other.
    copied = [[*summed, "bool", "complex64"], ["uint16", "float8_e4m3fn"]]
    cuts = [[((7, 5), 1), ((3,), 0)]]

    def fn(to_sum, to_copy):
        sums = [algorithm.reduce_scatter([x], [[1, 0]], "data")[0] for x in to_sum]
        return sums, [algorithm.all_gather([x], [[1, 0]], "data")[0] for x in to_copy]

    for of_sums, dtypes in zip([summed, []], copied, strict=True):
        with jax.enable_x64(True):
            to_sum = [wholes(3, cuts, dtype)[0] for dtype in of_sums]
            to_copy = [slices(3, cuts, dtype)[0] for dtype in dtypes]
            sums, joined = per_rank(make_mesh(3), fn, to_sum, to_copy)
        assert_slices_of_sum(sums, to_sum, cuts * len(of_sums))
        assert_wholes(joined, to_copy, cuts * len(dtypes))


def test_the_exchange_compiles_to_no_reduce_scatter(make_mesh):
    fn = lambda x: exchange([[x]], [[0]], "data")  # noqa: E731
    mapped = jax.shard_map(
        fn, mesh=make_mesh(2), in_specs=P(), out_specs=P("data"), check_vma=False
    )
    text = jax.jit(mapped).lower(jnp.ones(4)).as_text()
    assert "reduce_scatter" not in text and "all_to_all" in text


@needs_library
@pytest.mark.parametrize("size", LARGE)
def test_large_leaves_are_exact_on_every_rank(make_mesh, size):
    cuts = [LARGE[size]]
    dims = [[dim for _, dim in cuts[0]]]

    def fn(x):
        parts = native_shards.reduce_scatter(x, dims, "data")
        return parts, native_shards.all_gather(parts, dims, "data")

    given = wholes(3, cuts)
    parts, joined = per_rank(make_mesh(3), fn, given)
    assert_slices_of_sum(parts, given, cuts)
    assert_wholes(joined, parts, cuts)


@each
def test_a_leaf_without_elements_stays_one(make_mesh, algorithm):
    def fn(x):  # JAX 0.11 dies of an empty argument that is split over devices: made in here
        empty = [x[:0].reshape(0, 2), x[:0].reshape(3, 0), x]
        parts = algorithm.reduce_scatter([empty, empty[:1]], [[0, 0, 0], [0]], "data")
        return parts, algorithm.all_gather(parts, [[0, 0, 0], [0]], "data")

    given = numbers(3, (6,))
    ((a, b, part), [alone]), ((c, d, whole), _) = per_rank(make_mesh(3), fn, given)
    assert (a.shape[1:], b.shape[1:], alone.shape[1:]) == ((0, 2), (1, 0), (0, 2))
    assert (c.shape[1:], d.shape[1:]) == ((0, 2), (3, 0))
    np.testing.assert_array_equal(part, given.sum(axis=0).reshape(3, 2))
    np.testing.assert_array_equal(whole, [given.sum(axis=0)] * 3)


@each
def test_scale_multiplies_the_sum(make_mesh, algorithm):
    x = numbers(3, (6,))

    def fn(x, scale):
        return [algorithm.reduce_scatter([[x]], [[0]], "data", scale=s)[0] for s in (2, scale)]

    twice, by_array = per_rank(make_mesh(3), fn, x, replicated=(np.float32(1.5),))
    assert_slices_of_sum([twice, by_array], [[2 * x], [1.5 * x]], [[((2,), 0)]] * 2)


@needs_library
@pytest.mark.parametrize("algorithm", [native_shards, EXCHANGE], ids=["native", "exchange"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_slice_has_the_bits_of_the_native_all_reduce(mesh, algorithm, dtype):
    n = mesh.size
    draw = np.random.default_rng(0).normal(size=(n, 12 * n, 83)).astype(jnp.dtype(dtype))

    def fn(x):
        [[total, _]] = collectives.native([[x, x.T]], "data", scale=1 / 3)
        dims = [[0, 1, None]]
        return total, algorithm.reduce_scatter([[x, x.T, x]], dims, "data", scale=1 / 3)

    total, [[rows, columns, kept]] = per_rank(mesh, fn, draw)
    assert_equal_bits(total)
    assert kept.tobytes() == total.tobytes()
    for rank, want in enumerate(np.split(total[0], n)):
        assert rows[rank].tobytes() == want.tobytes()
        assert columns[rank].T.tobytes() == want.tobytes()


@each
@pytest.mark.parametrize("names", [("a",), ("b",), ("a", "b"), ("b", "a")], ids="".join)
def test_slices_are_in_the_order_of_the_names(algorithm, names):
    mesh = Mesh(np.array(jax.devices()[5::-1]).reshape(2, 3), ("a", "b"), (AxisType.Auto,) * 2)

    def fn(x):
        place = jax.lax.axis_index(names)
        [[part]] = algorithm.reduce_scatter([[x]], [[1]], names)
        [[whole]] = algorithm.all_gather([[place[None]]], [[0]], names)
        return part, place, whole

    given = numbers(6, (5, 6))
    part, place, whole = per_rank(mesh, fn, given)
    dims = tuple(("a", "b").index(name) for name in names)
    grid = given.reshape(2, 3, 5, 6)
    total = np.broadcast_to(grid.sum(axis=dims, keepdims=True), grid.shape).reshape(6, 5, 6)
    size = np.prod([mesh.shape[name] for name in names])
    for rank in range(6):
        np.testing.assert_array_equal(whole[rank], np.arange(size))
        np.testing.assert_array_equal(part[rank], np.split(total[rank], size, 1)[place[rank]])


def scattered(algorithm, x):
    return algorithm.reduce_scatter([[x]], [[0]], "data", scale=0.5)[0][0]


def gathered(algorithm, x):
    return algorithm.all_gather([[x]], [[0]], "data")[0][0]


def with_whole(algorithm, x):
    part, whole = algorithm.reduce_scatter([[x, 2 * x]], [[0, None]], "data", scale=0.5)[0]
    return jnp.concatenate([part, whole])


def whole_alone(algorithm, x):
    return algorithm.reduce_scatter([[x]], [[None]], "data", scale=0.5)[0][0]


@needs_library
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("call", [scattered, gathered, with_whole, whole_alone])
@each_transform()
def test_transforms_as_xla_does(make_mesh, of, call, check_vma):
    mesh, x = make_mesh(3), numbers(3, (6,)) - 4
    mine = per_rank(mesh, of(lambda x: call(native_shards, x)), x, check_vma=check_vma)
    wanted = per_rank(mesh, of(lambda x: call(xla_shards, x)), x, check_vma=check_vma)
    np.testing.assert_array_equal(mine, wanted)


@needs_library
def test_rows_that_a_vmap_gives_the_name_of_the_axis_are_the_ranks(make_mesh):
    x = numbers(2, (3, 6))

    def fn(algorithm, x):
        calls = scattered, gathered, with_whole
        each = lambda row: [call(algorithm, row) for call in calls]  # noqa: E731
        return jax.vmap(each, axis_name="data")(x)

    mine, wanted = (
        per_rank(make_mesh(2), lambda x, a=a: fn(a, x), x) for a in (native_shards, xla_shards)
    )
    for got, want in zip(mine, wanted, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "dims, why", [([[1]], r"\(4, 3\).* 2 .*dim 1"), ([[0, 0]], r"\[2\].*\[1\]")]
)
def test_a_dim_that_does_not_fit_is_refused_with_the_numbers(make_mesh, dims, why):
    mapped = jax.shard_map(
        lambda x: shards.reduce_scatter([[x]], dims, "data"),
        mesh=make_mesh(2),
        in_specs=P(),
        out_specs=P("data"),
        check_vma=False,
    )
    with pytest.raises(ValueError, match=why):
        jax.eval_shape(mapped, np.zeros((4, 3), np.float32))


# Several processes of a host


def pattern(shape, rank, xp=np):
    """Whole numbers of which every sum is exact; those of a rank are its number more."""
    return (xp.arange(np.prod(shape)) % 1021 * 7 % 17 + rank).astype("float32").reshape(shape)


def scatter_and_gather(cuts):
    """Return what is wrong with the result of each device of this process."""
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    mesh = Mesh(np.array(devices), ("data",))
    n, dims = mesh.size, [[dim for _, dim in bucket] for bucket in cuts]
    shapes = [[whole_shape(shape, dim, n) for shape, dim in bucket] for bucket in cuts]

    def fn():
        rank = jax.lax.axis_index("data")
        mine = [[pattern(shape, rank, jnp) for shape in bucket] for bucket in shapes]
        parts = native_shards.reduce_scatter(mine, dims, "data", mesh=mesh)
        if None in sum(dims, []):
            joined = parts
        else:
            joined = native_shards.all_gather(parts, dims, "data", mesh=mesh)
        return jax.tree.map(lambda x: x[None], (parts, joined))

    run = jax.shard_map(fn, mesh=mesh, in_specs=(), out_specs=P("data"), check_vma=False)
    parts, joined = (jax.tree.leaves(tree) for tree in jax.jit(run)())
    found = []
    for i, (shape, dim) in enumerate(zip(sum(shapes, []), sum(dims, []), strict=True)):
        total = n * pattern(shape, 0) + sum(range(n))
        own = [total] * n if dim is None else np.split(total, n, axis=dim)
        for part, whole in zip(
            parts[i].addressable_shards, joined[i].addressable_shards, strict=True
        ):
            rank = devices.index(part.device)
            if not np.array_equal(part.data[0], own[rank]):
                found.append(f"slice {i} of rank {rank}")
            if None not in sum(dims, []) and not np.array_equal(whole.data[0], total):
                found.append(f"whole {i} of rank {rank}")
    return found


@needs_library
@pytest.mark.parametrize("num_processes", [2, 3])
@pytest.mark.parametrize("size", LARGE)
def test_ranks_of_several_processes_get_exact_slices_and_wholes(processes, size, num_processes):
    cuts = [LARGE[size], *CUTS] if size == "0.1 MB" else [LARGE[size]]
    assert processes(num_processes).run(scatter_and_gather, cuts) == [[]] * num_processes


@needs_library
@pytest.mark.parametrize("num_processes", [2, 3])
def test_ranks_of_several_processes_get_exact_sums_of_leaves_without_a_dim(
    processes, num_processes
):
    cuts = [LARGE_KEPT, *KEPT]
    assert processes(num_processes).run(scatter_and_gather, cuts) == [[]] * num_processes
