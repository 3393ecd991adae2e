"""Rows of a table that is split over ranks are exchanged exactly, whichever are asked for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jdp.collectives import split_rows
from jdp.collectives.split_rows import add_p, take_rows

NUM_IDS = 211  # a prime; enough for several rounds on 3 and 8 ranks


def table(num_rows, *more, dtype=np.float32):
    """Whole numbers, so that every order of adding gives the same bits."""
    draw = np.random.default_rng(num_rows).integers(-8, 9, (num_rows, *more))
    return draw.astype(jnp.dtype(dtype))


def ids_of(kind, num_ranks, num_rows):
    """Return the ids of each rank: `[ranks, NUM_IDS]`."""
    draw = np.random.default_rng(7)
    per_rank = num_rows // num_ranks
    if kind == "uniform":
        return draw.integers(0, num_rows, (num_ranks, NUM_IDS))
    if kind == "one row":
        return np.full((num_ranks, NUM_IDS), num_rows - 1)
    if kind == "one owner":  # and every row once, which needs the most rounds
        owner = num_ranks // 2 * per_rank
        return owner + np.stack([draw.permutation(per_rank)[:NUM_IDS] for _ in range(num_ranks)])
    if kind == "different loads":  # rank 0 asks for one row, the last rank for all of one owner
        rows = ids_of("one owner", num_ranks, num_rows)
        rows[0] = rows[0, 0]
        return rows
    return (draw.zipf(1.2, (num_ranks, NUM_IDS)) - 1) % num_rows  # skewed


KINDS = ["uniform", "one row", "one owner", "different loads", "skewed"]


@functools.cache
def exchange(mesh, dim, axes=("data",), shape=(-1,)):
    """Return jitted `(table, ids, rows) -> (rows of each rank, sum of `rows` at their ids)`."""

    def on_rank(part, ids, rows):
        ids = ids[0].reshape(shape)
        rows = rows[0].reshape(*ids.shape, *rows.shape[2:])
        num_rows = part.shape[0] * (mesh.size if dim == 0 else 1)
        split = {"dim": dim, "axes": axes, "num_ranks": mesh.size}
        added = add_p.bind(rows, ids, num_rows=num_rows, **split)
        return take_rows(part, ids, dim, axes)[None], added

    split = P(*[None] * dim, axes)
    mapped = jax.shard_map(
        on_rank,
        mesh=mesh,
        in_specs=(split, P(axes), P(axes)),
        out_specs=(P(axes), split),
        check_vma=False,
    )
    return jax.jit(mapped)


def assert_exact(got, whole, ids, rows):
    taken, total = map(np.asarray, got)
    np.testing.assert_array_equal(taken.reshape(rows.shape), whole[ids])
    want = np.zeros(whole.shape, np.float64)
    np.add.at(want, ids.reshape(-1), rows.reshape(-1, *rows.shape[2:]).astype(np.float64))
    np.testing.assert_array_equal(total.astype(np.float64), want)


def case(kind, num_ranks, num_rows, *more, dtype=np.float32):
    whole = table(num_rows, *more, dtype=dtype)
    ids = ids_of(kind, num_ranks, num_rows).astype(np.int32)
    rows = whole[ids[:, ::-1]]
    return whole, ids, rows


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_split_are_exchanged_exactly(mesh, kind):
    whole, ids, rows = case(kind, mesh.size, mesh.size * 257, 5)
    assert_exact(exchange(mesh, 0)(whole, ids, rows), whole, ids, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_are_split_are_exchanged_exactly(mesh, kind):
    whole, ids, rows = case(kind, mesh.size, 257 * mesh.size, 24)
    assert_exact(exchange(mesh, 1)(whole, ids, rows), whole, ids, rows)


def test_one_owner_needs_several_rounds():
    assert split_rows.round_size(NUM_IDS, 257, 8) * 3 < NUM_IDS


@pytest.mark.parametrize("num_ranks", [3, 8])
def test_fewer_rows_than_ids(make_mesh, num_ranks):
    whole, ids, rows = case("uniform", num_ranks, 2 * num_ranks, 3)
    assert_exact(exchange(make_mesh(num_ranks), 0)(whole, ids, rows), whole, ids, rows)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("shape", [(), (3, 2)], ids=str)
def test_ids_and_tables_of_any_dims(make_mesh, dim, shape):
    mesh = make_mesh(3)
    whole = table(6, 3, 9)
    num_ids = int(np.prod(shape))
    ids = np.random.default_rng(0).integers(0, 6, (3, num_ids)).astype(np.int32)
    rows = whole[ids]
    assert_exact(exchange(mesh, dim, shape=shape)(whole, ids, rows), whole, ids, rows)


def test_a_table_of_numbers(make_mesh):
    whole, ids, rows = case("uniform", 8, 8 * 31)
    assert_exact(exchange(make_mesh(8), 0)(whole, ids, rows), whole, ids, rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [0, 1])
def test_small_dtypes(make_mesh, dtype, dim):
    whole, ids, rows = case("uniform", 3, 3 * 40, 6, dtype=dtype)
    assert_exact(exchange(make_mesh(3), dim)(whole, ids, rows), whole, ids, rows)


def test_a_large_table(make_mesh):
    whole = table(8 * 4099, 61)  # 8 MB
    ids = np.random.default_rng(1).integers(0, len(whole), (8, 3001)).astype(np.int32)
    rows = whole[ids]
    assert_exact(exchange(make_mesh(8), 0)(whole, ids, rows), whole, ids, rows)


@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a")], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_table_over_two_axes(axes, dim):
    mesh = jax.make_mesh((2, 3), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    whole, ids, rows = case("skewed", 6, 6 * 41, 6)
    assert_exact(exchange(mesh, dim, axes)(whole, ids, rows), whole, ids, rows)


def on_ranks(mesh, fn, dim, whole, *rest):
    """Call `fn(part, *rest)` on every rank, `rest` stacked by rank; stack the results."""
    mapped = jax.shard_map(
        lambda part, *rest: fn(part, *(x[0] for x in rest))[None],
        mesh=mesh,
        in_specs=(P(*[None] * dim, "data"), *(P("data") for _ in rest)),
        out_specs=P("data"),
        check_vma=False,
    )
    return np.asarray(jax.jit(mapped)(whole, *rest))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_batch_of_ids_is_looked_up_at_once(make_mesh, dim):
    mesh = make_mesh(3)
    whole = table(12, 6)
    ids = np.random.default_rng(2).integers(0, 12, (3, 5, 7)).astype(np.int32)

    def by_row(part, ids):
        return jax.vmap(lambda one: take_rows(part, one, dim, ("data",)), in_axes=1)(ids)

    np.testing.assert_array_equal(
        on_ranks(mesh, by_row, dim, whole, ids), np.moveaxis(whole[ids], 2, 1)
    )
    specs = dict(in_specs=(P(), P()), out_specs=P(), check_vma=False)
    jaxpr = jax.make_jaxpr(jax.shard_map(by_row, mesh=mesh, **specs))
    assert str(jaxpr(whole, ids[0])).count("jdp_take_rows") == 1


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("axes", [(1, None), (None, 0), (2, 1)], ids=str)
def test_every_operand_may_be_batched(make_mesh, dim, axes):
    whole = table(6, 6)
    draw = np.random.default_rng(3).integers
    ids = draw(0, 6, (3, 4, 2) if axes[1] is not None else (3, 4)).astype(np.int32)
    if axes[1] == 0:
        ids = np.swapaxes(ids, 1, 2)

    def take(part, ids):
        tables = part if axes[0] is None else jnp.stack([part, 2 * part], axes[0])
        return jax.vmap(lambda t, i: take_rows(t, i, dim, ("data",)), in_axes=axes)(tables, ids)

    def add(part, ids):
        rows = jnp.stack([jnp.ones((4, 6)), jnp.full((4, 6), 2.0)], 1)
        batched = (1, axes[1])
        of = {"num_rows": 6, "dim": dim, "axes": ("data",), "num_ranks": jax.lax.axis_size("data")}
        sums = jax.vmap(functools.partial(add_p.bind, **of), in_axes=batched)(rows, ids)
        return jax.lax.all_gather(sums, "data", axis=1 + dim, tiled=True)

    both = np.moveaxis(ids, 1 + axes[1], 0) if axes[1] is not None else np.stack([ids, ids])
    scales = (1, 1) if axes[0] is None else (1, 2)
    want = [scale * whole[each] for scale, each in zip(scales, both, strict=True)]
    np.testing.assert_array_equal(on_ranks(make_mesh(3), take, dim, whole, ids), np.stack(want, 1))
    counts = np.stack(
        [scale * np.bincount(x.flat, minlength=6) for scale, x in zip((1, 2), both, strict=True)]
    )
    got = on_ranks(make_mesh(3), add, dim, whole, ids)
    np.testing.assert_array_equal(got, np.broadcast_to(counts[None, :, :, None], got.shape))


def test_derivatives_of_a_lookup(make_mesh):
    whole, ids, rows = case("skewed", 3, 3 * 50, 4)

    def forward(part, ids, rows):
        take = functools.partial(take_rows, ids=ids, dim=0, axes=("data",))
        tangent = jax.jvp(take, (part,), (3 * part,))[1]
        twice = jax.jvp(lambda p: jax.vjp(take, p)[1](rows)[0], (part,), (part,))[1]
        return jnp.where(jnp.any(twice != 0), jnp.nan, tangent)  # a linear function

    np.testing.assert_array_equal(
        on_ranks(make_mesh(3), forward, 0, whole, ids, rows), 3 * whole[ids]
    )

    def twice(part, ids, rows):
        def loss(p):
            return jnp.sum(jax.grad(lambda q: jnp.sum(take_rows(q, ids, 0, ("data",)) ** 2))(p))

        return jax.grad(loss)(part)

    with pytest.raises(ValueError, match="sharded_embedding"):
        on_ranks(make_mesh(3), twice, 0, whole, ids, rows)
