"""All-to-all: every rank gets its slices of the leaves of all ranks, as from `lax.all_to_all`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from support.per_rank import per_rank

from jdp.collectives import native_shards, shards, xla_shards
from jdp.collectives.cpu import runtime as cpu_runtime

NATIVE = [native_shards] if cpu_runtime.why_missing() is None else []
# (shape of a slice as it is sent, dim that is split, dim along which slices are joined).
CUTS = [
    [((5,), 0, 0), ((3, 7), 0, 0), ((3, 7), 0, 1), ((3, 7), 1, 0), ((97, 1), 1, 0), ((1,), 0, 0)],
    [((2, 3, 5), 0, 2), ((2, 3, 5), 2, 0), ((2, 3, 5), 1, 1), ((2, 3, 5), 1, 2), ((2, 1, 5), 1, 0)],
    [((1, 1, 17), 2, 1)],
]
# The leaves of three ranks have so many bytes each, in float32.
LARGE = {
    "0.1 MB": [((3_001,), 0, 0), ((401, 3), 1, 0), ((401, 3), 0, 1)],
    "5 MB": [((503, 101, 3), 1, 0), ((211, 269), 0, 1), ((269, 211), 1, 1)],
    "30 MB": [((700_001,), 0, 0), ((1_009, 499), 1, 0), ((11, 4_001), 0, 1)],
}

each = pytest.mark.parametrize(
    "algorithm", [xla_shards, shards, *NATIVE], ids=lambda m: m.__name__.split(".")[-1]
)
needs_library = pytest.mark.skipif(not NATIVE, reason=f"{cpu_runtime.why_missing()}")


def dims_of(cuts):
    return [[(split, joined) for _, split, joined in bucket] for bucket in cuts]


def exchange(algorithm, buckets, cuts):
    return algorithm.all_to_all(buckets, dims_of(cuts), "data")


def whole_shape(shape, dim, num_ranks):
    return (*shape[:dim], shape[dim] * num_ranks, *shape[dim + 1 :])


def numbers(shape, rank, dtype="float32", xp=np):
    """Numbers that are exact in every dtype and differ from rank to rank."""
    draw = (xp.arange(np.prod(shape, dtype=int)) * 7 + 3 * rank) % 251 % 101
    return (draw % 2 if dtype == "bool" else draw).astype(dtype).reshape(shape)


def given(num_ranks, cuts, dtype="float32"):
    return [
        [
            np.stack([numbers(whole_shape(s, d, num_ranks), r, dtype) for r in range(num_ranks)])
            for s, d, _ in bucket
        ]
        for bucket in cuts
    ]


def arrived(leaves, rank, split, joined):
    """Return what a rank gets of a leaf of which `leaves` has that of each rank."""
    slices = [np.split(leaf, len(leaves), axis=split)[rank] for leaf in leaves]
    return np.concatenate(slices, axis=joined)


def assert_exchanged(got, sent, cuts):
    for bucket, own, pairs in zip(got, sent, dims_of(cuts), strict=True):
        for x, leaves, (split, joined) in zip(bucket, own, pairs, strict=True):
            assert x.dtype == leaves.dtype
            for rank in range(len(leaves)):
                want = arrived(leaves, rank, split, joined)
                assert x[rank].shape == want.shape and x[rank].tobytes() == want.tobytes()


@each
def test_every_rank_gets_its_slices_of_all_leaves(mesh, algorithm):
    sent = given(mesh.size, CUTS)
    got = per_rank(mesh, lambda x: exchange(algorithm, x, CUTS), sent)
    assert_exchanged(got, sent, CUTS)


@needs_library
@pytest.mark.parametrize("size, num_ranks", [("0.1 MB", 8), ("5 MB", 2), ("30 MB", 3)])
def test_large_leaves_have_the_bits_of_lax(make_mesh, size, num_ranks):
    cuts = [LARGE[size]]
    [pairs] = dims_of(cuts)

    def by_lax(x):
        return [
            lax.all_to_all(leaf, "data", split, joined, tiled=True)
            for leaf, (split, joined) in zip(x, pairs, strict=True)
        ]

    mesh, sent = make_mesh(num_ranks), given(num_ranks, cuts)
    got = per_rank(mesh, lambda x: exchange(native_shards, x, cuts), sent)
    assert_exchanged(got, sent, cuts)
    for mine, wanted in zip(got[0], per_rank(mesh, by_lax, sent[0]), strict=True):
        assert mine.tobytes() == wanted.tobytes()


@each
def test_every_dtype_is_copied_as_it_is(make_mesh, algorithm):
    names = "float32 bfloat16 float16 int32 int8 float64 bool complex64 uint16"
    cuts = [[((7, 5), 1, 0), ((7, 5), 0, 0), ((3, 5), 0, 1)]]
    mixed = [[((7, 5), 1, 0)] * len(names.split())]  # of all dtypes in one call

    with jax.enable_x64(True):
        alone = [given(3, cuts, dtype)[0] for dtype in map(jnp.dtype, names.split())]
        sent, all_cuts = [*alone, [leaves[0] for leaves in alone]], cuts * len(alone) + mixed
        got = per_rank(make_mesh(3), lambda x: exchange(algorithm, x, all_cuts), sent)
    assert_exchanged(got, sent, all_cuts)
    eighths = given(3, cuts, jnp.dtype("float8_e4m3fn"))  # which jdp leaves to XLA
    got = per_rank(make_mesh(3), lambda x: exchange(algorithm, x, cuts), eighths)
    assert_exchanged(got, eighths, cuts)


@each
def test_a_leaf_without_elements_stays_one(make_mesh, algorithm):
    def fn(x):  # JAX 0.11 dies of an empty argument that is split over devices: made in here
        empty = [x[:0].reshape(0, 2), x[:0].reshape(3, 0), x]
        return algorithm.all_to_all(
            [empty, empty[:1]], [[(0, 1), (0, 1), (0, 0)], [(0, 0)]], "data"
        )

    x = numbers((3, 6), 0)
    (a, b, part), [alone] = per_rank(make_mesh(3), fn, x)
    assert (a.shape[1:], b.shape[1:], alone.shape[1:]) == ((0, 6), (1, 0), (0, 2))
    np.testing.assert_array_equal(part, x.reshape(3, 3, 2).swapaxes(0, 1).reshape(3, 6))


@each
@pytest.mark.parametrize("names", [("a",), ("a", "b"), ("b", "a")], ids="".join)
def test_slices_are_in_the_order_of_the_names(algorithm, names):
    mesh = Mesh(np.array(jax.devices()[5::-1]).reshape(2, 3), ("a", "b"), (AxisType.Auto,) * 2)

    def fn(x):
        return algorithm.all_to_all([[x]], [[(1, 0)]], names)[0][0]

    x = np.stack([numbers((5, 6), rank) for rank in range(6)])
    want = per_rank(mesh, lambda x: lax.all_to_all(x, names, 1, 0, tiled=True), x)
    assert per_rank(mesh, fn, x).tobytes() == want.tobytes()


def exchanged(algorithm, x):
    x = x.reshape(3, -1)
    return algorithm.all_to_all([[x, 2 * x]], [[(0, 1), (0, 0)]], "data")[0]


@needs_library
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize(
    "of",
    [
        lambda f: jax.grad(lambda x: sum((y**3).sum() * k for k, y in enumerate(f(x), 2))),
        lambda f: lambda x: jax.jvp(f, (x,), (x * x,))[1],
        lambda f: jax.hessian(lambda x: sum((y**3).sum() for y in f(x))),
        lambda f: lambda x: jax.vmap(f, in_axes=1)(jnp.stack([x, x * x], 1)),
    ],
    ids=["grad", "jvp", "hessian", "vmap"],
)
def test_transforms_as_xla_does(make_mesh, of, check_vma):
    mesh, x = make_mesh(3), np.stack([numbers((6,), rank) % 8 - 4 for rank in range(3)])
    mine, wanted = (
        per_rank(mesh, of(lambda x, a=a: exchanged(a, x)), x, check_vma=check_vma)
        for a in (native_shards, xla_shards)
    )
    jax.tree.map(np.testing.assert_array_equal, mine, wanted)


@needs_library
def test_rows_that_a_vmap_gives_the_name_of_the_axis_are_the_ranks(make_mesh):
    x = np.stack([numbers((3, 6), rank) for rank in range(2)])

    def fn(algorithm, x):
        return jax.vmap(lambda row: exchanged(algorithm, row), axis_name="data")(x)

    mine, wanted = (
        per_rank(make_mesh(2), lambda x, a=a: fn(a, x), x) for a in (native_shards, xla_shards)
    )
    jax.tree.map(np.testing.assert_array_equal, mine, wanted)


@pytest.mark.parametrize(
    "pair, why", [((1, 0), r"\(4, 3\).* 2 .*dim 1"), ((0, 2), r"\(4, 3\).*dim 2")], ids=str
)
def test_dims_that_do_not_fit_are_refused_with_the_numbers(make_mesh, pair, why):
    mapped = jax.shard_map(
        lambda x: shards.all_to_all([[x]], [[pair]], "data"),
        mesh=make_mesh(2),
        in_specs=P(),
        out_specs=P("data"),
        check_vma=False,
    )
    with pytest.raises(ValueError, match=why):
        jax.eval_shape(mapped, np.zeros((4, 3), np.float32))


# Several processes of a host


def exchange_everywhere(cuts):
    """Return what is wrong with the result of each device of this process."""
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))[:4]
    mesh = Mesh(np.array(devices), ("data",))
    sent = given(mesh.size, cuts)

    def fn():
        rank = lax.axis_index("data")
        mine = [[numbers(x.shape[1:], rank, xp=jnp) for x in bucket] for bucket in sent]
        got = native_shards.all_to_all(mine, dims_of(cuts), "data", mesh=mesh)
        return jax.tree.map(lambda x: x[None], got)

    run = jax.shard_map(fn, mesh=mesh, in_specs=(), out_specs=P("data"), check_vma=False)
    found, leaves = [], jax.tree.leaves(jax.jit(run)())
    pairs = sum(dims_of(cuts), [])
    for i, (x, own, pair) in enumerate(zip(leaves, sum(sent, []), pairs, strict=True)):
        for part in x.addressable_shards:
            rank = part.index[0].start
            if np.asarray(part.data[0]).tobytes() != arrived(own, rank, *pair).tobytes():
                found.append(f"leaf {i} of rank {rank}")
    return found


@needs_library
@pytest.mark.parametrize("size", LARGE)
def test_ranks_of_two_processes_exchange_exactly(processes, size):
    cuts = [LARGE[size], *CUTS] if size == "0.1 MB" else [LARGE[size]]
    assert processes(2).run(exchange_everywhere, cuts) == [[]] * 2
