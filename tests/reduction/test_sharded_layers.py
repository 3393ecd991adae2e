"""Layers whose parameters are shards train like layers under lax.scan on one device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support import layer_forms
from support.layer_forms import assert_close, count_of, counted, layer, mean_loss, squares

import jdp

# The width divides by 1, 2, 3 and 8 ranks, the layers do not.
NUM_LAYERS, WIDTH, RATE = 5, 24, 0.05
parameters = functools.partial(layer_forms.parameters, NUM_LAYERS, WIDTH)
rows = functools.partial(layer_forms.rows, 48, WIDTH)
plainly = functools.partial(layer_forms.plainly, RATE)
step_of = functools.partial(layer_forms.step_of, scan=jdp.scan_layers)


def state_of(mesh, params, min_size=WIDTH + 1, stage=3, **options):
    jdp.init(devices=list(mesh.devices.flat))
    tx = jdp.sharded(optax.sgd(RATE), stage=stage, min_size=min_size, **options)
    return jdp.TrainState.create(params, tx)


def trained(mesh, loss_fn, params, batch, num_steps=2, min_size=WIDTH + 1, **options):
    state, step = state_of(mesh, params, min_size), step_of(loss_fn, **options)
    for _ in range(num_steps):
        state, _ = step(state, batch)
    return state.params


# One model, in all the forms in which layers are written


def saving_products(scan, params, batch):
    f = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)
    return squares(scan, params, batch["x"], f=f).mean()


def unrolled_backwards(scan, params, batch):
    return squares(scan, params, batch["x"], unroll=True, reverse=True).mean()


def sum_that_begins_with_a_number(scan, params, batch):
    def f(carry, w):
        x, total = carry
        x, _ = layer(x, w)
        return (x, total + x.mean()), None

    return scan(f, (batch["x"] * params["out"], 0.0), params["layers"])[0][1]


def only_outputs(scan, params, batch):
    def f(x, w):
        return x, {"kept": jnp.tanh(x @ w["w"]).mean(), "unread": x, "number": jnp.int32(3)}

    ys = scan(f, batch["x"] * params["out"], params["layers"])[1]
    return (ys["kept"] * ys["number"]).sum()


def nested(scan, params, batch):
    def f(x, w):
        return scan(lambda x, row: (jnp.tanh(x * row), None), layer(x, w)[0], w["w"])[0], None

    return squares(scan, params, batch["x"], f=f).mean()


def used_elsewhere(scan, params, batch):
    twice = squares(scan, params, batch["x"]) * squares(scan, params, 2 * batch["x"], reverse=True)
    tied = jnp.square(batch["x"] @ params["layers"]["w"][1]).mean()
    return (twice.mean() + tied + jnp.square(params["layers"]["b"]).sum()) / 8


def changed_before(scan, params, batch):
    halves = jax.tree.map(lambda x: x / 2, params["layers"])
    return squares(scan, {**params, "layers": halves}, batch["x"]).mean()


def mean_over_ranks(scan, params, batch):
    """Layers that subtract the mean of the global batch."""

    def f(x, w):
        x, _ = layer(x, w)
        mean = x.mean(0)
        return x - (mean if scan is lax.scan else jdp.mean_over_ranks(mean)), None

    return squares(scan, params, batch["x"], f=f).mean()


FORMS = [
    *layer_forms.FORMS,
    saving_products,
    unrolled_backwards,
    sum_that_begins_with_a_number,
    only_outputs,
    nested,
    used_elsewhere,
    changed_before,
    mean_over_ranks,
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_form_trains_like_lax_scan_on_one_device(form, make_mesh):
    want = plainly(form, parameters(), rows())
    assert_close(trained(make_mesh(3), form, parameters(), rows()), want, 3e-6)


def test_trains_like_lax_scan_on_any_number_of_ranks(mesh):
    want = plainly(mean_loss, parameters(), rows())
    assert_close(trained(mesh, mean_loss, parameters(), rows()), want)


@pytest.mark.parametrize("min_size", [NUM_LAYERS * WIDTH + 1, NUM_LAYERS * WIDTH * WIDTH + 1])
def test_leaves_that_stay_whole_train_beside_those_that_are_split(min_size, make_mesh):
    want = plainly(mean_loss, parameters(), rows())
    assert_close(trained(make_mesh(2), mean_loss, parameters(), rows(), min_size=min_size), want)


def test_leaves_that_are_split_by_layers_train_beside_the_others(make_mesh):
    def loss_fn(scan, params, batch):
        def f(x, w):
            return jnp.tanh(x + w[: x.shape[-1]]), None

        return squares(scan, params, scan(f, batch["x"], params["many"])[0]).mean()

    # Of [32, 25] only the first dim divides by 2.
    many = np.random.default_rng(2).normal(size=(32, 25)).astype(np.float32)
    params = {**parameters(), "many": many}
    got = trained(make_mesh(2), loss_fn, params, rows())
    assert got["many"].sharding.spec == P("data")
    assert_close(got, plainly(loss_fn, params, rows()), 3e-6)


def test_leaves_of_several_dtypes_keep_theirs(make_mesh):
    to_train = functools.partial(trained, make_mesh(2))
    layer_forms.assert_dtypes_are_kept(to_train, plainly, parameters(), rows())


def test_layers_that_are_not_differentiated_are_frozen(make_mesh):
    def loss_of(scan, out, layers, batch):
        return squares(scan, {"layers": layers, "out": out}, batch["x"]).mean()

    @jdp.train_step
    def step(state, batch):
        loss = functools.partial(loss_of, jdp.scan_layers)
        slope = jax.grad(loss)(state.params["out"], state.params["layers"], batch)
        return state.apply_gradients({"layers": state.params["layers"], "out": slope}), {}

    params = parameters()
    mesh = make_mesh(3)
    tx = jdp.sharded(optax.sgd(RATE), stage=3, min_size=WIDTH + 1)
    jdp.init(mesh)
    trainable = {"layers": False, "out": True}
    state, _ = step(jdp.TrainState.create(params, tx, trainable=trainable), rows())
    slope = jax.grad(functools.partial(loss_of, lax.scan))(params["out"], params["layers"], rows())
    want = {**params, "out": params["out"] - RATE * np.asarray(slope)}
    assert_close(state.params, want)


def test_shards_over_one_of_two_axes_are_averaged_over_both():
    devices = np.array(jax.devices("cpu")[:6]).reshape(3, 2)
    mesh = jax.sharding.Mesh(devices, ("replica", "shard"))
    both = ("replica", "shard")
    jdp.init(mesh, axis_name=both)
    tx = jdp.sharded(optax.sgd(RATE), stage=3, min_size=WIDTH + 1, axis_name=both, over="shard")
    scan = functools.partial(jdp.scan_layers, axis_name=both)
    step = step_of(mean_loss, scan=scan, axis_name=both)
    state, _ = step(jdp.TrainState.create(parameters(), tx), rows())
    assert state.params["layers"]["w"].sharding.spec == P(None, "shard")
    assert_close(state.params, plainly(mean_loss, parameters(), rows(), num_steps=1))


# Weights and micro-batches


def counted_penalty(scan, params, batch):
    def output(x):
        return squares(scan, params, x).sum()

    slopes = jnp.square(jax.grad(output)(batch["x"])).mean(1)
    return counted(scan, params, batch) + (slopes * batch["count"]).sum() / batch["count"].sum()


@pytest.mark.parametrize("form", [counted, counted_penalty])
def test_weights_count_as_in_the_whole_batch(form, make_mesh):
    want = plainly(form, parameters(), rows())
    assert_close(trained(make_mesh(3), form, parameters(), rows(), weight=count_of), want, 3e-6)


def test_a_rank_of_weight_0_contributes_nothing_even_nan(make_mesh):
    batch = rows()
    batch["count"][:16] = 0
    clean = {name: x[16:] for name, x in batch.items()}
    batch["x"][:16] = np.nan
    want = plainly(counted, parameters(), clean)
    assert_close(trained(make_mesh(3), counted, parameters(), batch, weight=count_of), want, 3e-6)


@pytest.mark.parametrize("weight", [None, count_of])
def test_micro_batches_train_like_the_whole_batch(weight, make_mesh):
    loss_fn = mean_loss if weight is None else counted
    step = step_of(loss_fn, weight=weight, accumulate=2)
    state, _ = step(state_of(make_mesh(3), parameters()), rows())
    assert_close(state.params, plainly(loss_fn, parameters(), rows(), num_steps=1), 3e-6)


# What is sent and kept


def collectives_of(lowered):
    """Gathers and reduce-scatters of the compiled program, those of a loop's body once."""
    text = lowered.compile().as_text()
    names = re.findall(r" (all-gather|reduce-scatter)\(", text)
    return {name: names.count(name) for name in set(names)}


def test_each_loop_gathers_a_layer_ahead_and_the_backward_one_scatters_a_layer(make_mesh):
    step = step_of(mean_loss)
    found = collectives_of(step.lower(state_of(make_mesh(2), parameters()), rows()))
    # Two leaves: before each of two loops and in it; in the backward loop and after it.
    assert found == {"all-gather": 2 * 4, "reduce-scatter": 2 * 2}


def test_an_evaluation_gathers_a_layer_ahead(make_mesh):
    state = state_of(make_mesh(2), parameters())
    measure = jdp.eval_step(
        lambda state, batch: {"loss": mean_loss(jdp.scan_layers, state.params, batch)}
    )
    found = collectives_of(measure.lower(state, rows()))
    assert found["all-gather"] == 2 * 2 and "reduce-scatter" not in found
    want = mean_loss(lax.scan, parameters(), rows())
    np.testing.assert_allclose(measure(state, rows())["loss"], want, rtol=1e-6)


def test_two_layers_are_whole_at_once(make_mesh):
    """Beside two gradients: that of a layer, and the one that is scattered meanwhile."""
    width, layer_bytes = 256, 4 * 256 * 256

    def f(x, w):
        return jnp.tanh(x @ w), None

    def loss_fn(params, batch):
        return jnp.square(jdp.scan_layers(f, batch, params)[0]).mean()

    def temporary(num_layers):
        params = np.zeros((num_layers, width, width), np.float32)
        step = step_of(lambda scan, *args: loss_fn(*args))
        lowered = step.lower(state_of(make_mesh(8), params), np.ones((8, width), np.float32))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    # A layer more takes memory for the gradient of its shard, a carry of one row, and its number.
    each = layer_bytes / 8 + 4 * width + 4
    assert temporary(48) - temporary(16) <= 32 * each
    assert temporary(16) <= 16 * each + 4 * layer_bytes + 2**16


def test_forward_mode_is_refused_and_says_what_to_write(make_mesh):
    @jdp.eval_step
    def measure(state, batch):
        loss = lambda x: squares(jdp.scan_layers, state.params, x).mean()  # noqa: E731
        return {"slope": jax.jvp(loss, (batch["x"],), (batch["x"],))[1]}

    with pytest.raises(ValueError, match=r"late=False.*JDP111"):
        measure.lower(state_of(make_mesh(2), parameters()), rows())


@pytest.mark.parametrize("stage", [2, 3])
def test_a_derivative_of_forward_mode_is_refused_at_its_line(stage, make_mesh):
    state = state_of(make_mesh(2), parameters(), stage=stage)
    with pytest.raises(ValueError, match=r"layer_forms\.py:\d+.*late=False.*JDP111"):
        step_of(layer_forms.along_the_parameters).lower(state, rows())


@pytest.mark.parametrize("stage", [2, 3])
def test_a_derivative_of_forward_mode_is_right_with_late_false(stage, make_mesh):
    scan = functools.partial(jdp.scan_layers, late=False)
    state = state_of(make_mesh(3), parameters(), stage=stage)
    state, _ = step_of(layer_forms.along_the_parameters, scan=scan)(state, rows())
    want = plainly(layer_forms.along_the_parameters, parameters(), rows(), num_steps=1)
    assert_close(state.params, want)


def test_late_false_scans_whole_layers(make_mesh):
    scan = functools.partial(jdp.scan_layers, late=False)
    measure = jdp.eval_step(lambda state, batch: {"loss": mean_loss(scan, state.params, batch)})
    text = measure.lower(state_of(make_mesh(2), parameters()), rows()).compile().as_text()
    gathers = [line for line in text.splitlines() if re.search(r"all.gather(_start)?[(\"]", line)]
    assert gathers and not any("while/body" in line for line in gathers)
