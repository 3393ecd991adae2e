"""Branches, loops, data of a rank, several axes, and what a partitioned program communicates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.per_rank import assert_equal_bits

from jdp.analysis import jaxprs
from jdp.reduction.partition import Piece, partitioned

SHAPE = (24, 48)


def _x(shape=SHAPE, seed=0):
    return np.random.default_rng(seed).integers(-5, 6, size=shape).astype(np.float32)


def _traced(mesh, function, args, dims, want=None, axes=("data",)):
    """A jitted call of `function` on slices, which returns whole results, and what it gathers."""
    found = []

    def on_rank(*local):
        pieces = [Piece(x, d) for x, d in zip(local, dims, strict=True)]
        outs, gathers, _ = partitioned(
            function, pieces, axes, want or (lambda shapes: [None] * len(shapes))
        )
        found.extend(gathers)
        return [out.value[None] for out in outs]

    specs = tuple(P() if d is None else P(*[None] * d, axes) for d in dims)
    mapped = jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=P(axes), check_vma=False)
    return jax.jit(mapped), found


def _inside(gathers):
    return [each for each in gathers if each.primitive != "output"]


def _check(mesh, function, args, dims):
    run, found = _traced(mesh, function, args, dims)
    outs = jax.device_get(run(*args))
    wants = jax.device_get(jax.jit(function)(*args))
    for out, want in zip(outs, wants, strict=True):
        assert_equal_bits(out)
        np.testing.assert_array_equal(out[0], want)
    return _inside(found)


def _branches(x, y, i):
    return [
        *lax.cond(i > 0, lambda: (x * y, y), lambda: (jnp.zeros_like(x), x)),
        lax.switch(i, [lambda x: x.sum(), lambda x: lax.cond(i > 0, jnp.max, jnp.min, x)], x),
    ]


@pytest.mark.parametrize("i", [0, 1])
def test_branches_return_slices(mesh, i):
    assert not _check(mesh, _branches, [_x(), _x(seed=1), np.int32(i)], [0, 0, None])
    _check(mesh, _branches, [_x(), _x(seed=1), np.int32(i)], [0, 1, None])


def _loops(x, rows):
    def round_(state, row):
        total, scaled = state
        return (total + row, -scaled), row * 2 - scaled

    (total, scaled), stacked = lax.scan(round_, (jnp.zeros(24), x[:, 0]), rows, reverse=True)
    grown = lax.while_loop(
        lambda state: jnp.abs(state[0]).sum() < 500, lambda state: (state[0] * 2, state[1]), (x, 1)
    )[0]
    return [total, scaled, stacked, grown]


def test_loops_carry_slices(mesh):
    rows = _x((5, 24), 1)
    assert not _check(mesh, _loops, [_x() + 1, rows], [0, 1])
    _check(mesh, _loops, [_x() + 1, rows], [1, 1])


def test_a_loop_gathers_once_what_each_round_needs_whole(make_mesh):
    def function(x, index):
        def round_(total, i):
            return total + jnp.sort(x, 0)[i], None

        return [lax.scan(round_, jnp.zeros(48), index)[0]]

    index = np.arange(6, dtype=np.int32)
    (gather,) = _check(make_mesh(3), function, [_x(), index], [0, None])
    assert gather.shape == SHAPE and gather.num_bytes == 24 * 48 * 4


def test_a_loop_runs_on_whole_arrays_if_its_rounds_would_gather_more(make_mesh):
    def function(x):
        return [lax.fori_loop(0, 9, lambda i, x: jnp.sort(x, 0) - i, x)]

    (gather,) = _check(make_mesh(8), function, [_x()], [0])
    assert gather.shape == SHAPE


def test_what_is_used_whole_twice_is_gathered_once(make_mesh):
    def function(x):
        return [jnp.sort(x, 0), jnp.cumsum(x, 0), jnp.flip(x, 0)]

    (gather,) = _check(make_mesh(2), function, [_x()], [0])
    assert gather.line.startswith("test_partition_programs.py:") and gather.primitive == "sort"


def _count(run, args, name):
    return sum(each.primitive.name == name for each in jaxprs.equations(jax.make_jaxpr(run)(*args)))


def test_independent_sums_are_one_collective_and_dependent_ones_two(make_mesh):
    def function(x, y, z):
        norm = jnp.sqrt(sum(jnp.sum(each**2) for each in (x, y, z)))
        y = y / norm
        return [jnp.sum(x * norm), jnp.linalg.norm(y), jnp.linalg.norm(z)]

    args = [_x(), _x(seed=1), _x(seed=2)]
    run, found = _traced(make_mesh(2), function, args, [0, 1, 0])
    assert _count(run, args, "psum") == 2 and not found


def test_nan_of_one_rank_reaches_the_maximum_on_all(mesh):
    x = _x()
    x[5, 7] = np.nan
    _check(mesh, lambda x: [x.max(), x.min(0), jnp.argmax(x, 0)], [x], [0])
    _check(mesh, lambda x: [x.max(), x.min(0), jnp.argmax(x, 0)], [x], [1])


def test_sums_of_bfloat16_are_rounded_once(mesh):
    x = np.asarray(_x(), jnp.bfloat16)
    ones = np.ones((48, 24), jnp.bfloat16)
    _check(mesh, lambda x, y: [x.sum(0), x @ y], [x, ones], [1, 0])


@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a")])
def test_ranks_may_be_on_two_axes(axes):
    mesh = jax.make_mesh(
        (2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:8]
    )

    def function(x, y):
        return [jnp.cumsum(x, 0), x + y + jnp.arange(48.0), x[:, ::-1] + jnp.zeros(SHAPE)]

    args = [_x(), _x(seed=1)]
    run, _ = _traced(mesh, function, args, [0, 1], axes=axes)
    outs = jax.device_get(run(*args))
    for out, want in zip(outs, function(*args), strict=True):
        assert_equal_bits(out)
        np.testing.assert_array_equal(out[0], want)


def test_data_of_a_rank_is_not_mixed_with_slices(mesh):
    # Each rank has rows of its own, and the function takes the mean of all, as a line search does.
    rows, w = _x((8 * mesh.size, 24), 3), _x((24, 48))

    def on_rank(w, rows):
        def function(w):
            return [w - lax.pmean(rows.T @ (rows @ w), "data"), w.sum()]

        (new, total), *_ = partitioned(function, [Piece(w, 0)], ("data",), [0, None])
        return new.value, total.value[None]

    mapped = jax.shard_map(
        on_rank,
        mesh=mesh,
        in_specs=(P("data"), P("data")),
        out_specs=(P("data"), P("data")),
        check_vma=False,
    )
    new, total = jax.device_get(jax.jit(mapped)(w, rows))
    np.testing.assert_allclose(new, w - rows.T @ (rows @ w) / mesh.size, rtol=1e-6)
    assert (total == w.sum()).all()


def test_whole_values_are_not_partitioned(make_mesh):
    def function(x, small):
        return [x * 2, jnp.linalg.norm(small @ small.T)]

    args = [_x(), _x((7, 5))]
    run, found = _traced(make_mesh(2), function, args, [0, None], want=[0, None])
    assert not found and not any(
        _count(run, args, name) for name in ("psum", "all_gather", "dynamic_slice")
    )


def test_dead_code_communicates_nothing(make_mesh):
    def function(x):
        jnp.sort(x, 0), x.sum()
        return [x + 1]

    run, found = _traced(make_mesh(2), function, [_x()], [0], want=[0])
    assert not found and not _count(run, [_x()], "psum")


@pytest.mark.parametrize(
    ("dims", "want", "numbers"),
    [([2], [None], "dim 2"), ([0], [None, None], "2 dims for 1"), ([0], [1], "(48, 7)")],
)
def test_dims_that_do_not_fit_are_refused(make_mesh, dims, want, numbers):
    def on_rank(x):
        pieces = [Piece(x, dims[0])]
        return partitioned(lambda x: [x], pieces, ("data",), want)[0][0].value

    mapped = jax.shard_map(
        on_rank, mesh=make_mesh(2), in_specs=P("data"), out_specs=P(), check_vma=False
    )
    with pytest.raises(ValueError) as error:
        jax.eval_shape(mapped, np.zeros((48, 7), np.float32))
    assert numbers in str(error.value)


def test_a_typed_shard_map_is_refused(make_mesh):
    def on_rank(x):
        return partitioned(lambda x: [x], [Piece(x, 0)], ("data",), [0])[0][0].value

    mapped = jax.shard_map(on_rank, mesh=make_mesh(2), in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(ValueError, match="check_vma=False"):
        jax.eval_shape(mapped, np.zeros(4, np.float32))


def test_unbound_axes_are_one_rank():
    (out,), gathers, _ = partitioned(lambda x: [x.sum()], [Piece(_x(), 0)], ("data",), [None])
    assert out.value == _x().sum() and not gathers
