"""At stage 2 micro-batches add up parts of gradients, of parameters that every rank has whole."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from support import sharded_training as model
from support.sharded_training import batch, loss_fn, make_state, masked_loss, optimizer, with_frozen
from support.training import assert_close, fetched, ranks, step_of

import jdp
from jdp.analysis import jaxprs
from jdp.reduction import shard_registry

LAYERS, DIM = 5, 24


def layered_loss(p, rows):
    x, _ = jdp.scan_layers(lambda x, w: (jnp.tanh(x @ w["w"] + w["b"]), None), rows["x"], p)
    return jnp.square(x.mean(1) - rows["y"][:, 0]).mean()


def layers_in_reverse(p, rows):
    def layer(x, given):
        w, scale = given
        return jnp.tanh(scale * (x @ w["w"]) + w["b"]), x.mean()

    scales = 1 + jnp.arange(LAYERS) * rows["x"].mean()
    x, ys = jdp.scan_layers(layer, rows["x"], p, scales, reverse=True, unroll=2)
    return jnp.square(x.mean(1) - rows["y"][:, 0]).mean() + jnp.square(ys).sum()


def with_a_gradient_penalty(p, rows):
    def squares(x):
        return jnp.sum(jnp.square(layered_loss(p, {**rows, "x": x})))

    slope = jax.grad(squares)(rows["x"])
    return layered_loss(p, rows) + jnp.square(slope).sum()


def weighed_layers(p, rows):
    x, _ = jdp.scan_layers(lambda x, w: (jnp.tanh(x @ w["w"] + w["b"]), None), rows["x"], p)
    return jnp.sum(jnp.square(x.mean(1)) * rows["counts"]) / count(rows)


def count(rows):
    # A micro-batch may have only padding.
    return rows["counts"].sum() + 1e-3


def layered_state(stage):
    draw = np.random.default_rng(5).normal
    params = {
        "w": 0.3 * draw(size=(LAYERS, DIM, DIM)).astype("f"),
        "b": np.zeros((LAYERS, 1), "f"),  # divides by no number of ranks
    }
    return jdp.TrainState.create(params, optimizer(stage))


def plain_sgd(stage):
    return make_state(stage, optax.sgd(1e-3))  # without state, nothing of it is split


def in_small_buckets(stage):
    return jdp.TrainState.create(model.params(), optimizer(stage, bucket_bytes=4 * 24 * 24))


def summed(stage):
    tx = optax.sgd(1e-3)
    sums = jdp.replicated(tx, mean=False) if stage == 0 else optimizer(stage, tx, mean=False)
    return jdp.TrainState.create(model.params(), sums)


def in_two(name, loss_fn, **options):
    return model.program_of(name, loss_fn, accumulate=2, **options)


accumulated = in_two("accumulated", loss_fn)
in_uneven_parts = model.program_of("in_uneven_parts", loss_fn, micro_batch_rows=4)
weighed = in_two("weighed", masked_loss)
layered = in_two("layered", layered_loss)
CASES = [
    *[(accumulated, n, make_state, None) for n in (1, 2, 3, 8)],
    (accumulated, 2, plain_sgd, None),
    (accumulated, 2, with_frozen, None),
    (accumulated, 3, in_small_buckets, None),
    (accumulated, 2, summed, None),
    (in_uneven_parts, 3, make_state, None),
    (weighed, 3, make_state, count),
    (weighed, 8, plain_sgd, count),
    (in_two("weighed_by_another_weight", masked_loss, weight=count), 2, make_state, None),
    (layered, 2, layered_state, None),
    (layered, 3, layered_state, None),
    (model.program_of("layers_in_reverse", layers_in_reverse), 3, layered_state, None),
    (in_two("with_a_gradient_penalty", with_a_gradient_penalty), 2, layered_state, None),
    (in_two("weighed_layers", weighed_layers), 2, layered_state, count),
    (model.differentiated, 3, with_frozen, None),
]


def named(x):
    return x.__name__ if callable(x) else str(x)


def train(n, stage, program, state, weight):
    ranks(n)
    step = jdp.train_step(program, weight=weight)
    current = state(stage)
    for i in range(2):
        current, metrics = step(current, batch(i))
    jdp.check_replicas(current)
    return fetched((current.params, current.opt_state, metrics))


@pytest.mark.parametrize("program, n, state, weight", CASES, ids=named)
def test_trains_as_replicated_does(program, n, state, weight):
    want = train(n, 0, program, state, weight)
    assert_close(train(n, 2, program, state, weight), want, 2e-6)


@pytest.mark.parametrize("over", ["inner", None])
def test_parts_over_one_of_two_axes_are_averaged_over_both(over):
    axis_name = ("outer", "inner")

    def run(tx):
        axes = (AxisType.Auto,) * 2
        mesh = jax.make_mesh((2, 2), axis_name, axes, devices=jax.devices()[:4])
        jdp.init(mesh, axis_name=axis_name)
        step = step_of(loss_fn, accumulate=2, axis_name=axis_name)
        state, _ = step(jdp.TrainState.create(model.params(), tx), batch())
        jdp.check_replicas(state, axis_name=axis_name)
        return fetched(state.params)

    options = {"min_size": 1, "over": over, "axis_name": axis_name}
    got = run(jdp.sharded(model.clipped(), stage=2, **options))
    assert_close(got, run(jdp.replicated(model.clipped(), axis_name=axis_name)), 1e-6)


def gradients_of(state, n, fn):
    """`(gradients, their shards)` in a step, as far as they leave it: the mean over ranks."""
    found = {}

    def step(current, rows):
        grads = fn(current.params, rows)[1]
        found.update({name: shard_registry.known(leaf) for name, leaf in grads.items()})
        return current.replace(params=grads), {}

    ranks(n)
    new, _ = jdp.train_step(step)(state, batch())
    return new.params, found


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gradient_is_the_mean_on_every_rank_and_knows_its_part(accumulate):
    ranks(3)
    got, parts = gradients_of(make_state(2), 3, jdp.value_and_grad(loss_fn, accumulate=accumulate))
    want = jax.grad(loss_fn)(model.params(), batch())
    for name, leaf in want.items():
        for shard in got[name].addressable_shards:
            np.testing.assert_allclose(shard.data, leaf, rtol=1e-4, atol=1e-4)
    assert parts["w"].value.shape == (24, 16) and parts["v"].value.shape == (16, 7)
    assert parts["odd"] is None


@pytest.mark.parametrize("n", [2, 8])
def test_with_plain_value_and_grad_gradients_are_those_of_the_rank(n):
    ranks(n)

    @jdp.train_step
    def step(state, rows):
        grads = jax.value_and_grad(loss_fn)(state.params, rows)[1]
        own = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
        return state, {"norm": own}

    split = {name: np.split(x, n) for name, x in batch().items()}
    parts = [{name: each[i] for name, each in split.items()} for i in range(n)]
    norms = [model.norm(jax.grad(loss_fn)(model.params(), each)) for each in parts]
    _, metrics = step(make_state(2), batch())
    np.testing.assert_allclose(metrics["norm"], np.mean(norms), rtol=1e-5)


def carried(stage, program, state):
    """Shapes of what is added up over the rounds of the loop over micro-batches."""
    ranks(2)
    lowered = jax.make_jaxpr(jdp.train_step(program))(state(stage), batch())
    loops = [eqn for eqn in jaxprs.equations(lowered.jaxpr) if eqn.primitive.name == "scan"]
    outer = max(loops, key=lambda eqn: len(list(jaxprs.equations(eqn.params["jaxpr"].jaxpr))))
    return {x.aval.shape for x in outer.outvars}


@pytest.mark.parametrize("stage, is_split", [(1, False), (2, True)])
def test_the_loop_over_micro_batches_carries_parts_of_gradients(stage, is_split):
    found = carried(stage, accumulated, make_state)
    wholes = {(50, 24), (24, 48), (48,), (48, 7)}
    assert wholes.isdisjoint(found) if is_split else wholes <= found
    assert {(7, 5), ()} <= found  # which do not divide
    assert ({(25, 24), (24, 24), (24,), (24, 7)} <= found) == is_split


def temporary(stage, loss_fn, params, dim, **options):
    """Temporary bytes of a rank of a step."""
    ranks(8)
    step = step_of(loss_fn, **options)
    tx = jdp.sharded(optax.sgd(0.1), stage=stage, bucket_bytes=4 * dim * dim)
    state = jdp.TrainState.create(params, tx)
    compiled = step.lower(state, np.zeros((32, dim), np.float32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def scanned(params, x):
    x, _ = jdp.scan_layers(lambda x, w: (jnp.tanh(x @ w), None), x, params)
    return jnp.square(x).mean()


@pytest.mark.parametrize("loss_fn", [model.of_layers, scanned], ids=named)
def test_the_whole_gradients_of_twelve_layers_are_never_there_at_once(loss_fn):
    dim, num_layers = 128, 12
    params = np.full((num_layers, dim, dim), 0.01, np.float32)
    params = params if loss_fn is scanned else [*params]
    at_1, at_2 = (
        temporary(stage, loss_fn, params, dim, accumulate=4) / (4 * dim * dim) for stage in (1, 2)
    )
    assert at_1 - at_2 > 9  # of 12 - 12 / 8
    assert at_2 < (num_layers + 3 if loss_fn is scanned else 3.5)  # a stack is gathered all at once


def wrong(change):
    """A step that adds up micro-batches, and then does something wrong."""

    def program(state, rows):
        loss, grads = jdp.value_and_grad(loss_fn, accumulate=2)(state.params, rows)
        return change(state, grads, rows), {"loss": loss}

    program.__name__ = change.__name__
    return program


def adds_what_differs(state, grads, rows):
    return state.apply_gradients(jax.tree.map(lambda g: g + rows["x"].mean(), grads), synced=True)


def masks_by_own_rows(state, grads, rows):
    keep = rows["x"].mean(0)[:, None] > 0
    grads = {**grads, "w": jnp.where(keep, grads["w"], 0)}
    return state.apply_gradients(grads, synced=True)


def scales_by_own_rows(state, grads, rows):
    new = jax.tree.map(lambda p: p * rows["x"].mean(), state.params)
    return state.replace(params=new).apply_gradients(grads)


WRONG = [adds_what_differs, masks_by_own_rows, scales_by_own_rows]


@pytest.mark.parametrize("change", WRONG, ids=named)
def test_refuses_steps_whose_ranks_would_drift_apart(change):
    ranks(2)
    with pytest.raises(ValueError, match="JDP1(01|14)"):
        jdp.train_step(wrong(change))(make_state(2), batch())


@pytest.mark.parametrize("given", [{"weight": 2.0}, {"mean": False}], ids=str)
def test_a_mean_is_not_weighed_or_summed_once_more(given):
    def step(state, rows):
        grads = jdp.value_and_grad(loss_fn, accumulate=2)(state.params, rows)[1]
        options = {name: jnp.float32(x) if name == "weight" else x for name, x in given.items()}
        return state.apply_gradients(jdp.sync_gradients(grads, **options), synced=True), {}

    ranks(2)
    with pytest.raises(ValueError, match="stage=2"):
        jdp.train_step(step)(make_state(2), batch())


@pytest.mark.parametrize("stage", [2, 3])
def test_a_mean_is_not_taken_for_the_sum_of_another_optimizer(stage):
    def step(states, rows):
        first, second = states
        grads = jdp.value_and_grad(loss_fn)(first.params, rows)[1]
        return (first, second.apply_gradients(grads)), {}

    ranks(2)
    with pytest.raises(ValueError, match="mean=False"):
        jdp.train_step(step)((make_state(stage), summed(stage)), batch())


def test_gradients_of_layers_that_are_computed_from_parameters_stay_those_of_the_rank():
    def loss_fn(p, rows):
        return layered_loss({**p, "w": p["w"] * rows["x"].mean()}, rows)

    step = in_two("changed", loss_fn)
    got, want = (train(2, stage, step, layered_state, None) for stage in (2, 0))
    assert_close(got, want, 2e-6)


@pytest.mark.filterwarnings("ignore:the loss does not depend on")
def test_a_table_is_looked_up_whole():
    def looked_up(p, rows):
        rows_of_table = jdp.sharded_embedding(p["embedding"], rows["ids"])
        return jnp.square(rows_of_table.mean(1) - rows["y"][:, 0]).mean()

    step = in_two("looked_up", looked_up)
    got, want = (train(3, stage, step, make_state, None) for stage in (2, 0))
    assert_close(got, want, 2e-6)


@pytest.mark.filterwarnings("error:the loss does not depend on")
@pytest.mark.parametrize("stage", (2, 3))
def test_what_one_of_two_losses_reads_is_not_called_unused(stage):
    def step(state, rows):
        def penalty(p, rows):
            return jnp.square(p["embedding"]).sum()

        _, grads = jdp.value_and_grad(loss_fn)(state.params, rows)
        _, more = jdp.value_and_grad(penalty)(state.params, rows)
        return state.apply_gradients(jax.tree.map(jnp.add, grads, more)), {}

    ranks(2)
    jdp.train_step(step)(make_state(stage), batch())
