"""A vmap that gives its rows the name of the mesh axis: the name then means the rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jdp
from jdp import axis, collectives

ALGORITHMS = {name: getattr(collectives, name) for name in ("auto", "native", "xla", "ring")}
DIRECTLY, JITTED = (lambda f: f), jax.jit
ROWS = 4


def summed_in_step(num_ranks, function, wrap, make_mesh):
    """What `function` gives for each of this rank's rows, averaged over ranks."""
    jdp.init(make_mesh(num_ranks))

    @jdp.train_step
    def step(state, batch):
        each = jax.vmap(wrap(function), axis_name="data")(batch)
        return jdp.mean_over_ranks(each), {}

    got, _ = step(jnp.zeros((ROWS, 2)), rows(num_ranks).reshape(-1, 2))
    return np.asarray(got)


def rows(num_ranks):
    return np.arange(num_ranks * ROWS * 2, dtype=np.float32).reshape(num_ranks, ROWS, 2)


def expected(num_ranks, of_rows):
    each = [np.broadcast_to(of_rows(part), (ROWS, 2)) for part in rows(num_ranks)]
    return np.mean(each, axis=0)


@pytest.mark.parametrize("wrap", [DIRECTLY, JITTED], ids=["directly", "in jit"])
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("num_ranks", [1, 3, 4])  # 4: as many ranks as rows
def test_every_algorithm_averages_the_rows(num_ranks, name, wrap, make_mesh):
    synced = functools.partial(jdp.sync_gradients, all_reduce=ALGORITHMS[name])
    got = summed_in_step(num_ranks, synced, wrap, make_mesh)
    np.testing.assert_array_equal(got, expected(num_ranks, lambda part: part.mean(0)))


@pytest.mark.parametrize(
    ("function", "of_rows"),
    [
        (jdp.mean_over_ranks, lambda part: part.mean(0)),
        (jdp.sum_over_ranks, lambda part: part.sum(0)),
        (lambda x: 0 * x + axis.size("data"), lambda part: ROWS),
    ],
    ids=["mean_over_ranks", "sum_over_ranks", "size"],
)
def test_the_others_mean_the_rows_too(function, of_rows, make_mesh):
    got = summed_in_step(3, function, DIRECTLY, make_mesh)
    np.testing.assert_array_equal(got, expected(3, of_rows))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_mean_of_rows_is_no_mean_of_ranks(name, make_mesh):
    jdp.init(make_mesh(2))
    synced = functools.partial(jdp.sync_gradients, all_reduce=ALGORITHMS[name])

    @jdp.train_step
    def step(state, batch):
        return jax.vmap(synced, axis_name="data")(batch)[0], {}

    with pytest.raises(ValueError, match="`new state` .*JDP101"):
        step(jnp.zeros(2), rows(2).reshape(-1, 2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
@pytest.mark.parametrize("in_axes", [0, 1, None], ids=str)
def test_native_adds_rows_up_as_psum_does(in_axes, dtype, make_mesh):
    def total(all_reduce):
        def on_rank(x):
            def one(row):
                return all_reduce([[row, row[:1]]], "data", scale=1 if dtype == "int32" else 0.5)

            return jax.vmap(one, in_axes, axis_name="data", axis_size=3)(x)

        mapped = jax.shard_map(
            on_rank, mesh=make_mesh(2), in_specs=P(), out_specs=P("data"), check_vma=False
        )
        return jax.tree.map(np.asarray, jax.jit(mapped)(jnp.arange(9).reshape(3, 3).astype(dtype)))

    native, xla = total(collectives.native), total(collectives.xla)
    for got, want in zip(jax.tree.leaves(native), jax.tree.leaves(xla), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_two_axes_of_which_a_vmap_has_one_are_refused(make_mesh):
    def on_rank(x):
        def one(row):
            return collectives.native([[row]], ("rows", "data"))

        return jax.vmap(one, axis_name="rows")(x)

    mapped = jax.shard_map(
        on_rank, mesh=make_mesh(2), in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    with pytest.raises(ValueError, match=r"\('rows', 'data'\).* vmap"):
        jax.jit(mapped)(jnp.arange(8.0))
