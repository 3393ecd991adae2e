"""At stage 3 `jdp.value_and_grad` gives the gradients of whole parameters, from shards."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import losses
from support.losses import DIM, NUM_ROWS, batch, count, dense, masked, params
from support.training import assert_close, fetched, ranks, step_of

import jdp
from jdp.analysis.dataflow import used_inputs
from jdp.collectives import shards
from jdp.collectives.cpu import runtime
from jdp.jax_compat import opened
from jdp.reduction import shard_registry, wait_order

# A loss here need not read all parameters.
pytestmark = pytest.mark.filterwarnings("ignore:the loss does not depend on")


def train(n, tx, loss_fn, *, num_steps=2, weight=None, trainable=None, **options):
    """The parameters after some steps on n ranks, and the losses."""
    ranks(n)
    step = step_of(loss_fn, weight=weight, **options)

    state, losses = jdp.TrainState.create(params(), tx, trainable=trainable), []
    for i in range(num_steps):
        state, metrics = step(state, batch(i))
        losses.append(metrics["loss"])
    return fetched((state.params, losses))


def sgd():
    return optax.sgd(0.1, momentum=0.9)


def stage_3(**options):
    # A group holds one layer.
    return jdp.sharded(
        sgd(), **{"stage": 3, "min_size": 30, "bucket_bytes": 4 * DIM * DIM, **options}
    )


def assert_equals_replicated(n, loss_fn, options=None, **given):
    options = {} if options is None else options
    want = train(n, jdp.replicated(sgd(), mean=options.get("mean", True)), loss_fn, **given)
    assert_close(train(n, stage_3(**options), loss_fn, **given), want, 2e-6)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_trains_as_replicated_does_on_any_number_of_ranks(n):
    assert_equals_replicated(n, dense)


@pytest.mark.parametrize("loss_fn", losses.ALL, ids=lambda fn: fn.__name__)
def test_trains_as_replicated_does(loss_fn):
    assert_equals_replicated(3, loss_fn)


@jax.custom_vjp
def probe(x, read_by_no_one):
    return x


probe.defvjp(lambda x, _: (x, None), lambda _, g: (g, jnp.broadcast_to(g.sum(0), (DIM, DIM))))


@pytest.mark.parametrize("given", [{}, {"accumulate": 2}], ids=str)
def test_a_gradient_that_a_custom_rule_makes_counts_though_the_loss_reads_no_value(given):
    def loss_fn(p, rows):
        x = probe(jnp.tanh(rows["x"] @ p["layers"][0]), p["layers"][3])
        return jnp.square(x @ p["layers"][1]).mean()

    assert_equals_replicated(3, loss_fn, **given)


@pytest.mark.parametrize("given", [{}, {"accumulate": 2}], ids=str)
def test_a_gradient_that_is_a_constant_counts(given):
    def loss_fn(p, rows):
        return dense(p, rows) + p["table"].sum() + 3 * p["layers"][0].mean()

    assert_equals_replicated(3, loss_fn, **given)


def test_gradients_of_single_rows_are_not_averaged():
    def clipped(p, row):
        grads = jdp.value_and_grad(dense)(p, jax.tree.map(lambda x: x[None], row))[1]
        norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda g: g / jnp.maximum(1, 20 * norm), grads)

    def trained(tx):
        ranks(3)

        @jdp.train_step
        def step(state, rows):
            grads = jax.vmap(clipped, (None, 0))(state.params, rows)
            return state.apply_gradients(jax.tree.map(lambda g: g.mean(0), grads)), {}

        return fetched(step(jdp.TrainState.create(params(), tx), batch(0))[0].params)

    assert_close(trained(stage_3()), trained(jdp.replicated(sgd())), 2e-6)


@pytest.mark.parametrize("options", [{"weight": 2.0}, {"mean": False}], ids=str)
def test_a_mean_is_not_weighed_or_summed_once_more(options):
    ranks(2)
    state = jdp.TrainState.create(params(), stage_3())

    @jdp.train_step
    def step(state, rows):
        given = {name: jnp.float32(x) if name == "weight" else x for name, x in options.items()}
        grads = jdp.value_and_grad(dense)(state.params, rows)[1]
        grads = jdp.sync_gradients(grads, **given)
        return state.apply_gradients(grads, synced=True), {}

    with pytest.raises(ValueError, match="stage=3"):
        step(state, batch(0))


@pytest.mark.parametrize(
    "given",
    [
        {"accumulate": 2},
        {"micro_batch_rows": 6},  # the last micro-batch is smaller
        {"weight": count},
        {"weight": count, "accumulate": 2},
        {"weight": count, "micro_batch_rows": 6},
        {"trainable": lambda path, leaf: "layers" not in path},
    ],
    ids="-".join,
)
def test_micro_batches_and_weights_equal_replicated(given):
    # 3 ranks have 16 rows each, and the last ones of the last rank are padding.
    assert_equals_replicated(3, masked if "weight" in given else dense, **given)


@pytest.mark.parametrize("options", [{"mean": False}, {"keep_gathered": True}], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_options_of_the_optimizer_equal_replicated(options, accumulate):
    assert_equals_replicated(2, dense, options, accumulate=accumulate)


def run(step_fn, n=2, tx=None, rows=None, **options):
    ranks(n)
    state = jdp.TrainState.create(params(), stage_3() if tx is None else tx)
    return jdp.train_step(step_fn, **options)(state, batch() if rows is None else rows)


def test_micro_batches_weighed_by_another_weight_than_the_steps_equal_replicated():
    def step(state, rows):
        grads = jdp.value_and_grad(masked, accumulate=2, weight=count)(state.params, rows)[1]
        return state.apply_gradients(grads), {}

    got, _ = run(step, 3)
    want, _ = run(step, 3, jdp.replicated(sgd()))
    assert_close(fetched(got.params), fetched(want.params), 2e-6)


@pytest.mark.filterwarnings("ignore:the step reduces gradients, and returns")
def test_a_gradient_knows_its_shard_and_is_the_mean_on_every_rank():
    found = {}

    def step(state, rows):
        grads = jdp.value_and_grad(dense)(state.params, rows)[1]
        found["layer"] = shard_registry.known(grads["layers"][0])
        found["odd"] = shard_registry.known(grads["odd"])
        new = {name: grads[name] for name in ("table", "layers")}
        return state.replace(params={**state.params, **new}), {}

    state, _ = run(step)
    assert found["layer"].value.shape == (DIM // 2, DIM)
    assert found["odd"] is None  # it stays whole
    want = jax.grad(dense)(params(), batch())
    for shard in state.params["layers"][0].addressable_shards:
        np.testing.assert_allclose(shard.data, want["layers"][0][shard.index], atol=1e-6)
    np.testing.assert_array_equal(state.params["table"], 0)  # which the loss does not read


def test_what_is_not_an_array_comes_back_beside_the_loss():
    seen = []

    def loss_fn(p, rows):
        return dense(p, rows), {"name": "dense", "number": 3, "first": rows["x"][0], "f": np.sin}

    def step(state, rows):
        (loss, aux), grads = jdp.value_and_grad(loss_fn, has_aux=True)(state.params, rows)
        seen.append((aux["name"], aux["number"], aux["f"], aux["first"].shape))
        return state.apply_gradients(grads), {"first": jdp.mean_over_ranks(aux["first"].sum())}

    _, metrics = run(step, 2)
    x = batch()["x"]
    np.testing.assert_allclose(metrics["first"], (x[0] + x[NUM_ROWS // 2]).sum() / 2, rtol=1e-5)
    assert set(seen) == {("dense", 3, np.sin, (DIM,))}


def test_in_a_derivative_of_the_author_gradients_are_those_of_the_rank():
    def step(state, rows):
        def scaled(factor):
            given = {**rows, "x": factor * rows["x"]}
            grads = jdp.value_and_grad(dense)(state.params, given)[1]
            return jnp.square(grads["odd"]).sum() + jnp.square(grads["layers"][1]).sum()

        return state, {"slope": jdp.mean_over_ranks(jax.jvp(scaled, (1.0,), (1.0,))[1])}

    def of_rows(rows):
        def squares(factor):
            grads = jax.grad(dense)(params(), {"x": factor * rows})
            return jnp.square(grads["odd"]).sum() + jnp.square(grads["layers"][1]).sum()

        return jax.jvp(squares, (1.0,), (1.0,))[1]

    n = 2
    want = np.mean([of_rows(rows) for rows in np.split(batch()["x"], n)])
    np.testing.assert_allclose(run(step, n)[1]["slope"], want, rtol=1e-4)


def product(x, whole):
    """A product that takes the shard if it is known, as layers that gather by themselves do."""
    shard = shard_registry.known(whole)
    if shard is None:
        return x @ whole

    def gathered(part):
        return shards.all_gather([[part]], [[shard.dim]], shard.axes)[0][0]

    @jax.custom_vjp
    def multiplied(x, part):
        return x @ gathered(part)

    def backward(saved, ct):
        x, part = saved
        sums = shards.reduce_scatter([[x.T @ ct]], [[shard.dim]], shard.axes, scale=1 / 2)
        return ct @ gathered(part).T, sums[0][0]

    multiplied.defvjp(lambda x, part: (multiplied(x, part), (x, part)), backward)
    return multiplied(x, shard.value)


def test_code_in_the_loss_can_take_the_shard_and_give_its_mean_gradient():
    def loss_fn(p, rows):  # the first layer is used in both ways
        x = product(product(rows["x"], p["layers"][0]), p["layers"][1]) @ p["layers"][0]
        return jnp.square(x).mean()

    assert_equals_replicated(2, loss_fn)


def test_integer_parameters_are_refused_as_by_jax():
    ranks(2)
    state = jdp.TrainState.create({**params(), "count": np.int32(3)}, stage_3())
    with pytest.raises(TypeError, match="int32"):
        step_of(dense)(state, batch())


def test_what_a_gather_only_waits_for_counts_as_unread():
    program = jax.make_jaxpr(lambda x, y: wait_order.after([x], [y]))(1.0, 2.0)
    assert used_inputs(opened(program)) == (True, False)


@pytest.mark.skipif(runtime.why_missing() is not None, reason=f"{runtime.why_missing()}")
def test_native_gathers_take_shards_where_they_lie():
    def step(state, rows):
        loss, grads = jdp.value_and_grad(dense)(state.params, rows)
        return state.apply_gradients(grads), {"loss": loss}

    ranks(2)
    state = jdp.TrainState.create(params(), stage_3())
    text = jdp.train_step(step).lower(state, batch()).as_text()
    assert text.count(f"@{runtime.ALL_GATHER}(") == 5  # of four groups, one of them again
    # A `select` lets a value wait for another, and copies it. Only the token may wait.
    assert set(re.findall(r"stablehlo.select .*, tensor<(.*)f32>", text)) == {"1x"}


@pytest.mark.parametrize("mean", [True, False])
def test_gradients_that_the_author_changes_equal_replicated(mean):
    def step(state, rows):
        grads = jdp.value_and_grad(dense)(state.params, rows)[1]
        return state.apply_gradients(jax.tree.map(lambda g: 2 * g, grads)), {}

    got, _ = run(step, 3, stage_3(mean=mean))
    want, _ = run(step, 3, jdp.replicated(sgd(), mean=mean))
    assert_close(fetched(got.params), fetched(want.params), 2e-6)


def test_gradients_of_frozen_parameters_are_not_sent():
    found = []

    def step(state, rows):
        grads = jdp.value_and_grad(dense)(state.params, rows)[1]
        found.append([shard_registry.known(g) is None for g in grads["layers"]])
        return state.apply_gradients(grads), {}

    ranks(2)
    flags = {"table": True, "layers": [False, True, False, True], "scale": True, "odd": True}
    state = jdp.TrainState.create(params(), stage_3(), trainable=flags)
    new, _ = jdp.train_step(step)(state, batch())
    assert found[0] == [True, False, True, False]
    assert_close(fetched(new.params["layers"][0]), params()["layers"][0], 0)


def test_whole_gradients_are_logged_once_with_their_bytes(caplog):
    def step_with(value_and_grad):
        def step(state, rows):
            grads = value_and_grad(dense)(state.params, rows)[1]
            return state.apply_gradients(grads), {}

        return step

    def logged():
        return [text for text in caplog.messages if "gets gradients as whole arrays" in text]

    with caplog.at_level(logging.WARNING, logger="jdp"):
        run(step_with(jdp.value_and_grad))
        assert not logged()
        run(step_with(jax.value_and_grad))
        run(step_with(jax.value_and_grad))
    num_bytes = 4 * (48 * DIM + 4 * DIM * DIM)
    (text,) = logged()
    assert f"{num_bytes:,} bytes" in text


def test_parameters_stay_gathered_only_at_stage_3():
    with pytest.raises(ValueError, match="stage=2"):
        jdp.sharded(sgd(), stage=2, keep_gathered=True)
