"""An all-gather whose results take the memory of other arrays: the wholes of one that does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from support.per_rank import per_rank
from support.transforms import each_transform

from jdp.collectives import native_shards
from jdp.collectives.cpu import runtime as cpu_runtime

pytestmark = pytest.mark.skipif(
    cpu_runtime.why_missing() is not None, reason=f"{cpu_runtime.why_missing()}"
)

# Shapes of slices, and the dims along which they are cut: a leaf in one run, and in many.
CUTS = [[((5,), 0), ((3, 7), 1), ((1, 1), 1)], [((2, 3, 5), 1), ((11, 13), 0)]]
# The wholes of six ranks have so many bytes.
LARGE = {
    "0.1 MB": [((3_001,), 0), ((401, 3), 1)],
    "5 MB": [((503, 101, 3), 1), ((211, 269), 0)],
    "30 MB": [((700_001,), 0), ((1_009, 499), 1), ((11, 4_001), 0)],
}


def dims_of(cuts):
    return [[dim for _, dim in bucket] for bucket in cuts]


def pattern(shape, rank, xp=np):
    """Small whole numbers, others for each rank."""
    return (xp.arange(np.prod(shape)) % 1021 * 7 % 17 + 32 * rank).astype("float32").reshape(shape)


def wanted(num_ranks, cuts=CUTS):
    return [
        [np.concatenate([pattern(shape, rank) for rank in range(num_ranks)], dim)]
        for bucket in cuts
        for shape, dim in bucket
    ]


def old_array(shape, dim, num_ranks):
    return jnp.full((*shape[:dim], shape[dim] * num_ranks, *shape[dim + 1 :]), jnp.nan)


def gathered(cuts, num_ranks, chosen, mesh=None):
    """Gather slices, of which those at the `chosen` positions overwrite arrays of NaN."""
    rank = jax.lax.axis_index("data")
    mine = [[pattern(shape, rank, jnp) for shape, _ in bucket] for bucket in cuts]
    count = iter(range(100))
    places = [
        [
            old_array(shape, dim, num_ranks) if next(count) in chosen else None
            for shape, dim in bucket
        ]
        for bucket in cuts
    ]
    return native_shards.all_gather(mine, dims_of(cuts), "data", mesh=mesh, overwrite=places)


@pytest.mark.parametrize("chosen", [range(5), (1, 4), (0,)], ids=str)
def test_every_rank_gets_the_whole_of_all_slices(mesh, chosen):
    got = per_rank(mesh, lambda _: gathered(CUTS, mesh.size, chosen), np.zeros(mesh.size))
    for whole, [want] in zip(sum(got, []), wanted(mesh.size), strict=True):
        for rank in range(mesh.size):
            np.testing.assert_array_equal(whole[rank], want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "int8", "bool", "complex64"])
def test_every_dtype_stays_as_it_is(make_mesh, dtype):
    given = np.arange(3 * 10).reshape(3, 2, 5) % 2 + np.arange(3).reshape(3, 1, 1)

    def fn(x):
        old = jnp.zeros((2, 15), dtype)
        return native_shards.all_gather([[x]], [[1]], "data", overwrite=[[old]])[0][0]

    with jax.enable_x64(True):
        given = given.astype(jnp.dtype(dtype))
        got = per_rank(make_mesh(3), fn, given)
    assert got.dtype == given.dtype
    for rank in range(3):
        np.testing.assert_array_equal(got[rank], np.concatenate([*given], axis=1))


def test_an_array_that_is_read_later_keeps_its_values(make_mesh):
    old = np.arange(6, dtype=np.float32)

    def fn(x, old):
        [[whole]] = native_shards.all_gather([[x]], [[0]], "data", overwrite=[[old]])
        return whole, 2 * old

    x = np.array([[-1, -2], [-3, -4], [-5, -6]], np.float32)
    whole, twice = per_rank(make_mesh(3), fn, x, replicated=(old,))
    for rank in range(3):
        np.testing.assert_array_equal(whole[rank], x.reshape(-1))
        np.testing.assert_array_equal(twice[rank], 2 * old)


def test_one_array_that_two_results_overwrite_gives_two_results(make_mesh):
    def fn(x):
        old = jnp.zeros(6)
        both = [[old, old]]
        return native_shards.all_gather([[x, 3 * x]], [[0, 0]], "data", overwrite=both)[0]

    x = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    once, thrice = per_rank(make_mesh(3), fn, x)
    for rank in range(3):
        np.testing.assert_array_equal(once[rank], x.reshape(-1))
        np.testing.assert_array_equal(thrice[rank], 3 * x.reshape(-1))


@pytest.mark.parametrize("check_vma", [False, True])
@each_transform(
    scan=lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c)[:2], c), x, None, length=3)[0],
    checkpoint=lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).prod()),
)
def test_transforms_as_a_gather_that_overwrites_nothing(make_mesh, of, check_vma):
    def call(x, is_over):
        old = [[jnp.full((6,), 7.0) + 0 * x.sum() if is_over else None]]  # of x: batched, too
        return native_shards.all_gather([[x]], [[0]], "data", overwrite=old)[0][0]

    mesh, x = make_mesh(3), (np.arange(6, dtype=np.float32).reshape(3, 2) - 3)
    mine, plain = (
        per_rank(mesh, of(lambda x, is_over=each: call(x, is_over)), x, check_vma=check_vma)
        for each in (True, False)
    )
    np.testing.assert_array_equal(mine, plain)


def test_the_derivative_by_an_overwritten_array_is_zero(make_mesh):
    def fn(x, old):
        call = lambda old: native_shards.all_gather(  # noqa: E731
            [[x]], [[0]], "data", overwrite=[[old]]
        )[0][0]
        return jax.grad(lambda old: (call(old) ** 2).sum())(old)

    got = per_rank(make_mesh(2), fn, np.ones((2, 3), np.float32), replicated=(np.ones(6, "f"),))
    np.testing.assert_array_equal(got, np.zeros((2, 6)))


def wrong_on_this_process(cuts):
    """Return the wholes that differ from the exact ones, on each device of this process."""
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    mesh = Mesh(np.array(devices), ("data",))
    n = mesh.size

    def fn():
        return jax.tree.map(lambda x: x[None], gathered(cuts, n, range(100), mesh))

    run = jax.shard_map(fn, mesh=mesh, in_specs=(), out_specs=P("data"), check_vma=False)
    return [
        f"whole {i} of rank {shard.index[0].start}"
        for i, (whole, [want]) in enumerate(
            zip(jax.tree.leaves(jax.jit(run)()), wanted(n, cuts), strict=True)
        )
        for shard in whole.addressable_shards
        if not np.array_equal(shard.data[0], want)
    ]


@pytest.mark.parametrize("size, num_processes", [("0.1 MB", 3), ("5 MB", 2), ("30 MB", 2)])
def test_ranks_of_several_processes_get_exact_wholes(processes, size, num_processes):
    cuts = [LARGE[size], *CUTS] if size == "0.1 MB" else [LARGE[size]]
    assert processes(num_processes).run(wrong_on_this_process, cuts) == [[]] * num_processes


@pytest.mark.parametrize("size", LARGE)
def test_large_wholes_are_exact_on_every_rank_of_one_process(make_mesh, size):
    got = per_rank(make_mesh(3), lambda _: gathered([LARGE[size]], 3, range(9)), np.zeros(3))
    for whole, [want] in zip(got[0], wanted(3, [LARGE[size]]), strict=True):
        for rank in range(3):
            np.testing.assert_array_equal(whole[rank], want)
