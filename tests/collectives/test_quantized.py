"""The all-reduce of 8 or 4 bits, beside the same arithmetic in NumPy and beside exact sums."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.per_rank import assert_equal_bits, per_rank
from support.training import ranks, step_of

import jdp
from jdp.collectives import quantized

LARGEST = {"int8": 127, "int4": 7, "float8_e4m3fn": 448, "float8_e5m2": 57344}
every_dtype = pytest.mark.parametrize("dtype", LARGEST)


def rounded(blocks, dtype):
    """What arrives of float32 blocks `[..., block]`."""
    largest = np.abs(blocks).max(-1, keepdims=True)
    scale = largest / np.float32(LARGEST[dtype])
    numbers = blocks / np.where(scale == 0, np.float32(1), scale)
    is_int = dtype.startswith("int")
    sent = np.round(numbers) if is_int else numbers
    kind = np.int8 if is_int else getattr(ml_dtypes, dtype)
    return sent.astype(kind).astype(np.float32) * scale


def expected(x, dtype, block, scale):
    """The sum of `[ranks, size]`, as the ranks compute it."""
    arrived = rounded(chunks(x, block), dtype)
    total = rounded(tree_sum(arrived) * np.float32(scale), dtype)
    rows = total.reshape(len(x), -1)[:, : -(-x.shape[1] // len(x))]
    return rows.ravel()[: x.shape[1]].astype(x.dtype)


def tree_sum(rows):
    while len(rows) > 1:
        pairs = [a + b for a, b in zip(rows[::2], rows[1::2], strict=False)]
        rows = [*pairs, *rows[len(pairs) * 2 :]]
    return rows[0]


def chunks(x, block):
    """The blocks that each rank sends to each: `[ranks, ranks, blocks, block]`."""
    padded = np.pad(x.astype(np.float32), ((0, 0), (0, -x.shape[1] % len(x))))
    rows = padded.reshape(len(x), len(x), -1)
    return np.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % block))).reshape(
        len(x), len(x), -1, block
    )


def normal(num_ranks, size, dtype="float32"):
    draw = np.random.default_rng(size).normal(size=(num_ranks, size))
    return (draw * np.exp(draw[:, ::-1])).astype(jnp.dtype(dtype))


def reduced(mesh, leaves, **options):
    algorithm = functools.partial(quantized, **options)
    return per_rank(mesh, lambda bucket: algorithm([bucket], ("data",))[0], leaves)


@every_dtype
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_the_sum_is_that_of_numpy_on_every_rank(make_mesh, num_ranks, dtype):
    leaves = [normal(num_ranks, size) for size in (4096, 9973, 65537)]
    got = reduced(make_mesh(num_ranks), leaves, dtype=dtype, scale=1 / 3)
    assert_equal_bits(got)
    for total, leaf in zip(got, leaves, strict=True):
        want = expected(leaf, dtype, 256, 1 / 3)
        # XLA multiplies by the reciprocal, so a tie may be rounded to the other side.
        differs = np.abs(total[0] - want) > 1e-5 * np.abs(want).max()
        assert differs.mean() < 1e-3
        exact = leaf.astype(np.float64).sum(0) / 3
        most = 0.5 if dtype == "int4" else 0.2
        assert np.abs(total[0] - exact).max() < most * np.abs(exact).max()


@pytest.mark.parametrize("block", [16, 100, 5000])
def test_a_number_is_off_by_half_a_step_of_its_blocks(make_mesh, block):
    x = normal(3, 9972)
    [got] = reduced(make_mesh(3), [x], block=block)
    exact = x.astype(np.float64).sum(0)
    step = np.abs(chunks(x, block)).max(-1).sum(0) / 127  # no sum has a larger one
    bound = np.repeat(step, block, -1)[:, : 9972 // 3].ravel() * (0.5 + 0.5 + 0.02)
    assert (np.abs(got[0] - exact) <= bound).all()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_whole_numbers_up_to_the_largest_arrive_exactly(make_mesh, dtype):
    x, most = np.zeros((4, 5000), np.float32), LARGEST[dtype]
    x[1] = np.random.default_rng(0).integers(-most, most + 1, 5000)
    x[1, ::50] = most  # the step of each block is 1
    [got] = reduced(make_mesh(4), [x], block=50, dtype=dtype)
    np.testing.assert_array_equal(got, np.stack([x[1]] * 4))


@every_dtype
def test_a_block_with_a_subnormal_scale_becomes_zero(make_mesh, dtype):
    x = normal(2, 8192)
    x[:, 4096:4352] *= 1e-39  # a block of rank 1's chunk
    x[:, 4100] = 0
    [got] = reduced(make_mesh(2), [x], dtype=dtype)
    assert np.isfinite(got).all() and not got[:, 4096:4352].any() and got[:, 4352:].any()


def test_small_leaves_and_other_dtypes_are_exact(make_mesh):
    leaves = [normal(3, 4095), np.arange(3 * 5000, dtype=np.int32).reshape(3, -1)]
    got = [reduced(make_mesh(3), [leaf])[0] for leaf in leaves]
    np.testing.assert_allclose(got[0][1], leaves[0].astype(np.float64).sum(0), 1e-5, 1e-5)
    np.testing.assert_array_equal(got[1][1], leaves[1].sum(0))
    with jax.enable_x64(True):
        x = normal(3, 5000, "float64")
        [total] = reduced(make_mesh(3), [x])
    np.testing.assert_allclose(total[2], x.sum(0), 1e-12, 1e-12)


@pytest.mark.parametrize("size", [8 * 1024 - 1, 8 * 1024])
def test_leaves_without_a_block_for_each_rank_are_exact(make_mesh, size):
    x = normal(8, size)
    [total] = reduced(make_mesh(8), [x], block=1024)
    error = np.abs(total[0] - x.astype(np.float64).sum(0)).max() / np.abs(total[0]).max()
    assert (error < 1e-6) == (size < 8 * 1024)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@every_dtype
def test_a_number_that_is_not_finite_reaches_every_rank(make_mesh, dtype, value):
    x = normal(3, 8192)
    x[1, 300] = value
    [got] = reduced(make_mesh(3), [x], dtype=dtype)
    finite = np.isfinite(got)
    assert not finite[:, 256:512].any() and finite[:, :256].all() and finite[:, 512:].all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_leaves_keep_their_dtype(make_mesh, dtype):
    x = normal(3, 5000, dtype).clip(-9, 9)
    [got] = reduced(make_mesh(3), [x], scale=1 / 3)
    assert got.dtype == x.dtype
    want = expected(x, "int8", 256, 1 / 3).astype(np.float32)
    np.testing.assert_allclose(got[0].astype(np.float32), want, atol=0.08)


def test_zeros_stay_zeros_and_one_rank_sends_nothing(make_mesh):
    [got] = reduced(make_mesh(2), [np.zeros((2, 5000), np.float32)])
    np.testing.assert_array_equal(got, 0)
    x = normal(1, 5000)
    np.testing.assert_array_equal(reduced(make_mesh(1), [x])[0], x)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": jnp.bfloat16}, "dtype=bfloat16.*reduce_dtype"),
        ({"block": 8}, "block"),
        ({"dtype": jnp.int4, "block": 33}, "block=34"),
    ],
)
def test_other_dtypes_and_blocks_are_refused(make_mesh, options, text):
    with pytest.raises(ValueError, match=text):
        reduced(make_mesh(2), [normal(2, 5000)], **options)
    ranks(2)
    tx = jdp.sharded(optax.sgd(1.0), all_reduce=functools.partial(quantized, **options))
    state = jdp.TrainState.create({"w": np.zeros((80, 80), np.float32)}, tx)

    @jdp.train_step
    def step(state, x):
        return state.apply_gradients({"w": x[0]}), {}

    with pytest.raises(ValueError, match=text):
        step(state, np.ones((2, 80, 80), np.float32))


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    errors = (hidden @ params["v"])[:, 0] - batch["y"]
    return (errors**2 * batch["m"]).sum() / batch["m"].sum()


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_follows_exact_training(num_ranks, stage):
    ranks(num_ranks)
    draw = np.random.default_rng(1)
    params = {"w": draw.normal(size=(96, 72)) / 9, "b": np.zeros(72), "v": np.zeros((72, 1))}
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    x = draw.normal(size=(24, 96)).astype(np.float32)
    batch = {"x": x, "y": np.sin(x.sum(1)), "m": (np.arange(24) % 5 > 0).astype(np.float32)}

    def trained(all_reduce):
        options = {"all_reduce": all_reduce}
        wrap = functools.partial(jdp.sharded, stage=stage) if stage else jdp.replicated
        state = jdp.TrainState.create(params, wrap(optax.adam(1e-2), **options))

        step, losses = step_of(loss_fn, weight=lambda batch: batch["m"].sum()), []
        for _ in range(30):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        jdp.check_replicas(state)
        plan = step.communication_plan(state, batch)
        sent = [x for x in plan if x.dtype != "u8" and x.num_bytes > 2 * 4 * 96]
        if all_reduce is quantized:
            assert {x.kind for x in sent} <= {"all-gather"}
            [exchange] = [x for x in plan if x.kind == "all-to-all"]
            assert [leaf.path for leaf in exchange.leaves] == ["grads['w']", ""]  # with scales
        return losses

    losses, exact = trained(quantized), trained(jdp.collectives.auto)
    assert losses[0] == pytest.approx(exact[0], rel=1e-6) and exact[-1] < 0.3 * exact[0]
    np.testing.assert_allclose(losses, exact, rtol=0.1, atol=0.02 * exact[0])
    assert losses != exact


def of_layers(params, x):
    x, _ = jdp.scan_layers(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    return jnp.mean((x @ params["out"] - 1) ** 2)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_scanned_layers_send_8_bits(stage):
    ranks(2)
    draw = np.random.default_rng(2)
    params = {"layers": draw.normal(size=(3, 80, 80)) / 9, "out": draw.normal(size=80) / 9}
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    wrap = functools.partial(jdp.sharded, stage=stage) if stage else jdp.replicated
    state = jdp.TrainState.create(params, wrap(optax.sgd(1.0), all_reduce=quantized))
    x = draw.normal(size=(8, 80)).astype(np.float32)

    @jdp.train_step
    def step(state, x):
        return state.apply_gradients(jdp.value_and_grad(of_layers)(state.params, x)[1]), {}

    sent = [each for each in step.communication_plan(state, x) if each.kind != "all-gather"]
    if stage:
        assert max(each.num_bytes for each in sent if each.dtype != "u8") <= 4 * 80
    new, _ = step(state, x)
    jdp.check_replicas(new)
    exact = jax.grad(of_layers)(params, x)
    for name, gradient in exact.items():
        found = params[name] - np.asarray(new.params[name])
        assert np.abs(found - gradient).max() < 0.02 * np.abs(gradient).max()


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_derivatives_are_those_of_the_exact_sum(make_mesh, num_ranks):
    x = normal(num_ranks, 5003)

    def slopes(all_reduce, x):
        def sums(x, factor):
            ((total,),) = all_reduce([[x]], ("data",), scale=factor)
            return total

        half = jnp.float32(0.5)
        total, of_both = jax.jvp(sums, (x, half), (jnp.cos(x), half))
        _, transposed = jax.vjp(sums, x, half)
        return total, of_both, transposed(jnp.sin(x))

    got, want = (
        per_rank(make_mesh(num_ranks), functools.partial(slopes, all_reduce), x)
        for all_reduce in (quantized, jdp.collectives.xla)
    )
    assert np.abs(got[0] - want[0]).max() > 0
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4), got[1:], want[1:]
    )


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_gradient_flows_through_quantized_gradients(stage):
    ranks(2)
    x = np.random.default_rng(3).normal(size=(8, 64)).astype(np.float32)

    def trained(all_reduce):
        wrap = functools.partial(jdp.sharded, stage=stage) if stage else jdp.replicated
        tx = wrap(optax.sgd(0.5), all_reduce=all_reduce)
        state = jdp.TrainState.create({"w": jnp.ones((64, 80)) / 8}, tx)

        @jdp.train_step
        def step(state, x):
            def inner(params):
                return jnp.mean((x @ params["w"]) ** 2)

            def outer(params):
                slopes = jdp.sync_gradients(jax.grad(inner)(params), all_reduce=all_reduce)
                return inner(jax.tree.map(lambda p, g: p - 0.5 * g, params, slopes))

            return state.apply_gradients(jax.grad(outer)(state.params)), {}

        return np.asarray(step(state, x)[0].params["w"]) - 1 / 8

    got, exact = trained(quantized), trained(jdp.collectives.xla)
    assert np.abs(got - exact).max() < 0.02 * np.abs(exact).max()


@pytest.mark.parametrize("stage", [1, 3])
def test_leaves_split_by_the_compiler_are_exact_and_others_are_not(before_init, stage):
    mesh = jdp.init(devices=jax.devices()[:4], axes={"data": 2, "model": 2})
    x = np.random.default_rng(4).normal(size=(4, 64)).astype(np.float32)
    params = {"split": np.ones((64, 96), np.float32) / 9, "whole": np.ones((64, 80), np.float32)}
    specs = {"split": P(None, "model"), "whole": P()}
    placed = {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in params.items()}
    tx = jdp.sharded(optax.sgd(1.0), stage=stage, all_reduce=quantized)
    state = jdp.TrainState.create(placed, tx)

    def loss_fn(params, x):
        return sum(((x @ leaf) ** 2).mean() for leaf in params.values())

    @jdp.train_step
    def step(state, x):
        return state.apply_gradients(jax.grad(loss_fn)(state.params, x)), {}

    new, _ = step(state, x)
    for name, slope in jax.grad(loss_fn)(params, x).items():
        error = np.abs(params[name] - np.asarray(new.params[name]) - slope).max()
        relative = error / np.abs(slope).max()
        assert (relative < 1e-5) if name == "split" else (1e-5 < relative < 0.02)


def on_two_processes(x):
    mesh = jdp.init()
    tx = jdp.replicated(optax.sgd(1.0), all_reduce=quantized)
    state = jdp.TrainState.create({"w": jnp.zeros((80, 80))}, tx)

    @jdp.train_step
    def step(state, x):
        return state.apply_gradients({"w": x[0]}), {}

    rows = jax.make_array_from_callback(x.shape, NamedSharding(mesh, P("data")), lambda i: x[i])
    state, _ = step(state, rows)
    return np.asarray(state.params["w"].addressable_data(1))


def test_two_processes_get_equal_bits(processes):
    x = normal(4, 6400).reshape(4, 80, 80)
    found = processes(2).run(on_two_processes, x)
    np.testing.assert_array_equal(found[0], found[1])
    want = expected(x.reshape(4, -1), "int8", 256, 0.25)
    assert np.abs(-found[0].ravel() - want).max() <= 0.01 * np.abs(want).max()


def test_a_typed_shard_map_is_refused(make_mesh):
    mean = functools.partial(jdp.sync_gradients, all_reduce=quantized)
    typed = jax.shard_map(mean, mesh=make_mesh(2), in_specs=P("data"), out_specs=P())
    with pytest.raises(ValueError, match="collectives.quantized cannot run .* check_vma=True"):
        jax.jit(typed)(normal(2, 5000))
