"""Maxima and minima over ranks: NaN stays NaN, and every rank gets the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.per_rank import assert_equal_bits, per_rank

import jdp
from jdp.reduction import step_context

both_types = pytest.mark.parametrize("check_vma", [True, False])
EXTREMES = {jdp.max_over_ranks: np.max, jdp.min_over_ranks: np.min}
extremes = pytest.mark.parametrize("fn", EXTREMES, ids=lambda fn: fn.__name__)

FLOATS = ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32"]
INTEGERS = ["bool", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32"]


@extremes
@pytest.mark.parametrize("where", [0, 1, 3, None])
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_of_any_rank_is_the_result(make_mesh, fn, dtype, where):
    values = np.array([1, 2, 3, 4], np.float32)
    values[slice(None) if where is None else where] = np.nan
    x = np.stack([values, -values], 1).astype(dtype)  # NaN of both signs
    got = per_rank(make_mesh(4), fn, x)
    assert got.dtype == dtype
    assert np.isnan(got.astype(np.float32)).all()
    assert_equal_bits(got)


def ordered_values(dtype):
    """Values of a dtype in their order, of which none is NaN."""
    if dtype == "bool":
        return np.array([False, True])
    if dtype in INTEGERS:
        low, high = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
        return np.array(sorted({low, low + 1, 0, 1, high - 1, high}), np.int64).astype(dtype)
    info = jnp.finfo(dtype)
    tiny, most = float(info.smallest_subnormal), float(info.max)
    found = [-most, -1, -tiny, -0.0, 0.0, tiny, 1, most]
    if dtype != "float8_e4m3fn":
        found = [-np.inf, *found, np.inf]
    return np.array(found).astype(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_orders_all_values_of_a_dtype(make_mesh, dtype):
    values = ordered_values(dtype)
    low, high = np.meshgrid(np.arange(len(values)), np.arange(len(values)))
    one, other = values[low], values[high]
    tree = {"x": np.stack([one, other])}
    for fn, pick in ((jdp.max_over_ranks, np.maximum), (jdp.min_over_ranks, np.minimum)):
        got = per_rank(make_mesh(2), fn, tree)["x"]
        assert got.dtype == dtype
        assert_equal_bits(got)
        assert got[0].tobytes() == values[pick(low, high)].tobytes()


@extremes
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_takes_a_tree_in_one_collective(make_mesh, num_ranks, fn):
    rng = np.random.default_rng(0)
    x = {
        "a": rng.normal(size=(num_ranks, 3)).astype(np.float32),
        "b": [rng.integers(-9, 9, (num_ranks, 2, 2)), rng.random(num_ranks) < 0.5],
    }
    got = per_rank(make_mesh(num_ranks), fn, x)
    assert_equal_bits(got)
    want = jax.tree.map(lambda leaf: EXTREMES[fn](leaf, 0), x)
    jax.tree.map(lambda g, w: np.testing.assert_array_equal(g[0], w), got, want)
    traced = str(jax.make_jaxpr(fn, axis_env=[("data", num_ranks)])(x))
    assert traced.count("pmax") + traced.count("pmin") == 1


@extremes
def test_64_bits(make_mesh, fn):
    x = np.array([[1 + 2**-40, np.nan, -5e-324], [1, 1, -0.0]])
    with jax.enable_x64(True):
        got = per_rank(make_mesh(2), fn, {"float": x, "integer": np.array([2**40, 2**40 + 1])})
    np.testing.assert_array_equal(got["float"][0], EXTREMES[fn](x, 0))
    np.testing.assert_array_equal(got["integer"][0], EXTREMES[fn]([2**40, 2**40 + 1]))
    assert got["float"].dtype == np.float64


@extremes
@both_types
def test_is_usable_at_once_and_is_the_same_everywhere(make_mesh, fn, check_vma):
    def on_rank(x):
        extreme = fn(x[0])
        return lax.cond(extreme < 3, lambda: extreme, lambda: -extreme)

    mapped = jax.shard_map(
        on_rank, mesh=make_mesh(3), in_specs=jax.P("data"), out_specs=jax.P(), check_vma=check_vma
    )
    want = -6 if fn is jdp.max_over_ranks else 1
    assert jax.jit(mapped)(np.array([1, 2, 6], np.float32)) == want


@extremes
def test_where_nothing_is_bound_there_is_one_rank(fn):
    tree = {"a": jnp.float32(np.nan), "b": jnp.arange(3), "c": True}
    jax.tree.map(np.testing.assert_array_equal, fn(tree), tree)


@extremes
@pytest.mark.parametrize("wrong", [np.ones(2, np.complex64), jax.random.key(0)])
def test_values_without_an_order_are_refused_by_path(fn, wrong):
    with pytest.raises(TypeError, match=rf"{fn.__name__} of .*x\['a'\]"):
        fn({"a": wrong})


@both_types
@pytest.mark.parametrize("values", [[1, 2, 6], [6, 2, 6]])
@extremes
def test_the_gradient_is_that_of_the_extreme_of_all_rows(make_mesh, fn, values, check_vma):
    x = np.array(values, np.float32)
    extreme = jnp.max if fn is jdp.max_over_ranks else jnp.min

    def loss(x):
        return jnp.sin(fn(x)) * 3, fn({"x": x, "n": jnp.int32(3)})  # a metric beside it

    def on_rank(x):
        grad = jax.grad(lambda x: loss(x)[0])(x)
        slope = jax.jvp(lambda x: loss(x)[0], (x,), (jnp.cos(x),))[1]
        return grad, slope, jax.value_and_grad(loss, has_aux=True)(x)[0][1]

    grad, slope, aux = per_rank(make_mesh(3), on_rank, x, check_vma=check_vma)
    want = jax.grad(lambda x: 3 * jnp.sin(extreme(x)))(x)
    # The loss is that of each of three ranks, and JAX adds the three cotangents up.
    np.testing.assert_allclose(grad, want * (1 if check_vma else 3), rtol=1e-6)
    np.testing.assert_allclose(slope, [want @ np.cos(x)] * 3, rtol=1e-6)
    np.testing.assert_array_equal(aux["x"], [extreme(x)] * 3)


def test_the_gradient_in_a_step_with_weights_is_exact():
    jdp.init(devices=jax.devices()[:3])
    batch = {"x": np.array([3, 1, 2, 5, 4, 0], np.float32), "mask": np.array([1, 1, 1, 1, 1, 0])}

    def loss_fn(w, batch, largest):
        losses = batch["mask"] * (w * batch["x"] / largest(w**2 * batch["x"]) - 1) ** 2
        return losses.sum() / batch["mask"].sum()

    @jdp.train_step(weight=lambda batch: batch["mask"].sum())
    def step(state, batch):
        grads = jax.grad(loss_fn)(state, batch, lambda x: jdp.max_over_ranks(x.max()))
        return state - jdp.sync_gradients(grads), {"largest": jdp.max_over_ranks(batch["x"].max())}

    w = np.float32(0.5)
    new, metrics = step(w, batch)
    want = jax.grad(loss_fn)(w, jax.tree.map(jnp.asarray, batch), jnp.max)
    np.testing.assert_allclose(w - new, want, rtol=1e-5)
    assert metrics["largest"] == 5


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_metric_of_a_step_is_nan_if_that_of_one_rank_is(num_ranks):
    jdp.init(devices=jax.devices()[:num_ranks])

    @jdp.eval_step
    def measure(w, batch):
        largest, least = jdp.max_over_ranks(batch.max()), jdp.min_over_ranks(batch.min())
        return {"largest": largest, "range": largest - least, "n": jdp.max_over_ranks(batch > 2)}

    for i in range(4):
        batch = np.arange(4, dtype=np.float32)
        assert measure(0.0, batch)["range"] == 3
        batch[i] = np.nan
        assert np.isnan(measure(0.0, batch)["range"])


def test_the_weight_of_the_step_plays_no_part(make_mesh):
    def fn(x):
        with step_context.entered("data", x[None], lambda x: (x.sum() > 4) * 1.0):
            return jdp.min_over_ranks(x)

    np.testing.assert_array_equal(per_rank(make_mesh(3), fn, np.float32([3, 5, 6])), [3, 3, 3])


def extremes_with_a_nan():
    """The maxima and minima of 1 to 4 with a NaN on one rank, for each rank."""
    jdp.init(devices=sorted(jax.devices(), key=lambda d: (d.process_index, d.id))[:4])

    @jdp.eval_step
    def measure(state, batch):
        x = batch["x"].astype(jnp.bfloat16)[0]
        return {"extremes": [jdp.max_over_ranks(x), jdp.min_over_ranks(batch["x"][0])]}

    found = []
    for rank in [*range(4), None]:
        x = np.array([np.nan if i == rank else i + 1 for i in range(4)], np.float32)
        mine = np.split(x, jax.process_count())[jax.process_index()]
        [batch] = jdp.shard_batches([{"x": mine}])
        found.append([float(extreme) for extreme in measure(0.0, batch)["extremes"]])
    return found


def test_a_nan_of_any_rank_is_the_maximum_over_processes(processes):
    for found in processes(2).run(extremes_with_a_nan):
        np.testing.assert_array_equal(found, [[np.nan, np.nan]] * 4 + [[4, 1]])
