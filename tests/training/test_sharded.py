"""`jdp.sharded` trains as `jdp.replicated` does, and each rank holds its part of the state."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support import sharded_training as model
from support.losses import count as weight
from support.sharded_training import (
    batch,
    loss_fn,
    make_state,
    masked_loss,
    optimizer,
    train,
    with_frozen,
)
from support.training import assert_close, ranks, step_of

import jdp

STAGES = (1, 2, 3)


def synced(state, rows):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, rows)
    grads = jdp.sync_gradients(grads)
    new = state.apply_gradients(grads, synced=True)
    return new, {"loss": loss, "norm": model.norm(grads)}


def of_a_global_mean(state, rows):
    loss, grads = jax.value_and_grad(jdp.global_mean(loss_fn))(state.params, rows)
    return state.apply_gradients(grads, synced=True), {"loss": loss}


def touched(state, rows):
    """The author changes gradients and new parameters by hand."""
    loss, grads = jdp.value_and_grad(loss_fn)(state.params, rows)
    new = state.apply_gradients(jax.tree.map(lambda g: 2 * g, grads))
    return new.replace(params=jax.tree.map(lambda p: jnp.clip(p, -1, 1), new.params)), {
        "loss": loss
    }


def averaged(state, rows):
    loss, grads = jdp.value_and_grad(loss_fn)(state.params, rows)
    new = state.apply_gradients(grads)
    mean = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state.model_state, new.params)
    return new.replace(model_state=mean), {"loss": loss}


def guarded(state, rows):
    loss, grads = jdp.value_and_grad(loss_fn)(state.params, rows)
    new, is_good = state.apply_gradients(grads), jdp.mean_over_ranks(loss) < 30
    return jax.tree.map(lambda a, b: jnp.where(is_good, a, b), new, state), {"loss": loss}


def decided(state, rows):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, rows)
    grads = jdp.sync_gradients(grads)
    is_good = jnp.isfinite(model.norm(grads))
    new = jax.lax.cond(is_good, lambda: state.apply_gradients(grads, synced=True), lambda: state)
    return new, {"loss": loss}


def closing_over_its_rows(state, rows):
    loss, grads = jdp.value_and_grad(lambda p: loss_fn(p, rows))(state.params)
    return state.apply_gradients(grads), {"loss": loss}


def with_average(stage):
    return make_state(stage, model_state=model.params())


accumulated = model.program_of("accumulated", loss_fn, micro_batch_rows=3)
weighed = model.program_of("weighed", masked_loss)
weighed_in_parts = model.program_of("weighed_in_parts", masked_loss, micro_batch_rows=2)
rematerialised = model.program_of("rematerialised", jax.checkpoint(loss_fn))
# Each stage with each number of ranks, and each program with one of them.
CASES = [
    *[(model.differentiated, n, stage, {}) for n in (1, 2, 3, 8) for stage in STAGES],
    (model.plain, 2, 1, {}),
    (model.plain, 8, 3, {}),
    (accumulated, 2, 2, {}),
    (accumulated, 8, 3, {}),
    (weighed, 3, 1, {"weight": weight}),
    (weighed, 8, 3, {"weight": weight}),  # two ranks have only padding
    (weighed_in_parts, 8, 2, {"weight": weight}),
    (weighed_in_parts, 3, 3, {"weight": weight}),
    (synced, 2, 3, {}),
    (synced, 3, 2, {}),
    (of_a_global_mean, 2, 3, {}),
    (touched, 3, 3, {}),
    (touched, 2, 1, {}),
    (averaged, 2, 3, {"state": with_average}),
    (averaged, 3, 1, {"state": with_average}),
    (guarded, 2, 3, {}),
    (decided, 3, 3, {}),
    (rematerialised, 2, 3, {}),
    (closing_over_its_rows, 2, 3, {}),
    (closing_over_its_rows, 3, 2, {}),
    (model.differentiated, 3, 3, {"state": with_frozen}),
    (model.plain, 2, 2, {"state": with_frozen}),
]


def named(x):
    return x.__name__ if callable(x) else "-".join(x) if isinstance(x, dict) else str(x)


@pytest.mark.parametrize("program, n, stage, options", CASES, ids=named)
def test_trains_as_replicated_does(program, n, stage, options):
    got, state = train(n, stage, program, **options)
    assert_close(got, train(n, 0, program, **options)[0], 1e-6)
    jdp.check_replicas(state)


def shares(tree):
    """The share of each leaf that lies on each device."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        sizes = {shard.data.size / leaf.size for shard in leaf.addressable_shards}
        assert len(sizes) == 1
        found[jax.tree_util.keystr(path)] = sizes.pop()
    return found


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("stage", STAGES)
def test_each_rank_holds_its_part_before_and_after_a_step(stage, n):
    ranks(n)
    split = {"['embedding']", "['w']", "['b']", "['v']"}
    step = jdp.train_step(model.differentiated)
    for current in (make_state(stage), step(make_state(stage), batch())[0]):
        momentum = shares(current.opt_state[1][0].trace)
        assert momentum == {path: 1 / n if path in split else 1 for path in momentum}
        held = shares(current.params)
        assert held == {path: 1 / n if stage == 3 and path in split else 1 for path in held}
        assert current.params["w"].shape == (24, 48)


def test_leaves_below_min_size_stay_whole():
    ranks(2)
    tx = jdp.sharded(optax.adam(0.1), stage=3, min_size=24 * 48)
    state = jdp.TrainState.create(model.params(), tx)
    held = shares(state.params)
    assert {path for path, share in held.items() if share < 1} == {"['embedding']", "['w']"}


def test_large_leaves_that_do_not_divide_are_logged_once(caplog):
    with caplog.at_level("WARNING", "jdp"):
        for n in (2, 3, 3, 1):
            ranks(n)
            for stage in (0, 3):
                jdp.TrainState.create(model.params(), optimizer(stage, min_size=30))
    said = [text for text in caplog.messages if "divides no dim" in text]
    for n, text in zip((2, 3), said, strict=True):
        for part in ("shards 4 of 5", f"{n} ranks, 140 bytes", "`params['odd']` float32[7, 5]"):
            assert part in text


def test_averages_of_the_parameters_are_split_as_they_are():
    ranks(2)
    state, _ = jdp.train_step(averaged)(with_average(3), batch())
    assert shares(state.model_state) == shares(state.params)
    state, _ = jdp.train_step(averaged)(with_average(2), batch())
    assert set(shares(state.model_state).values()) == {1}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WithAverage(jdp.TrainState):
    average: Any = None


@pytest.mark.parametrize("stage", STAGES)
def test_a_class_that_inherits_from_the_state_may_have_more_fields(stage):
    def with_field(stage):
        state = make_state(stage)
        fields = {each.name: getattr(state, each.name) for each in dataclasses.fields(state)}
        return WithAverage(**fields, average=model.params())

    def program(state, rows):
        new, metrics = model.differentiated(state, rows)
        mean = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state.average, new.params)
        return new.replace(average=mean), metrics

    (want, _), (got, state) = (train(2, each, program, state=with_field) for each in (0, stage))
    assert_close(got, want, 1e-6)
    assert shares(state.average)["['w']"] == (1 / 2 if stage == 3 else 1)


def test_on_one_rank_nothing_is_split():
    ranks(1)
    assert set(shares(make_state(3)).values()) == {1}


@pytest.mark.parametrize("width, share", [(16, 1 / 8), (7, 1)])
def test_a_table_whose_rows_do_not_divide_is_split_along_its_columns_if_they_do(width, share):
    ranks(8)
    table = np.random.default_rng(0).normal(size=(50257, width)).astype("f")
    ids = np.random.default_rng(1).integers(0, 50257, 64)

    step = step_of(lambda table, ids: jnp.square(table[ids]).sum(1).mean())

    def trained(stage):
        state = jdp.TrainState.create(table, optimizer(stage, optax.sgd(2.0)))
        return step(step(state, ids)[0], ids)[0].params

    got = trained(3)
    assert got.addressable_shards[0].data.size / got.size == share
    np.testing.assert_array_equal(jax.device_get(got), jax.device_get(trained(0)))


@pytest.mark.parametrize("old, new", [(0, 3), (3, 1), (1, 0)])
def test_a_state_of_another_stage_is_placed_anew(old, new):
    ranks(3)
    step = jdp.train_step(model.differentiated)
    before, _ = step(make_state(old), batch())
    if new == 0:  # which says nothing of how leaves are split
        before = jax.device_put(
            before, NamedSharding(before.params["w"].sharding.mesh, PartitionSpec())
        )
    changed = before.replace(tx=optimizer(new))
    after, _ = jdp.train_step(model.differentiated)(changed, batch(1))
    want, _ = train(3, 0, num_steps=2)
    assert_close(jax.device_get(after.params), want[0], 1e-6)
    assert shares(after.params)["['w']"] == (1 / 3 if new == 3 else 1)


def test_steps_in_a_scan_of_the_caller():
    want, _ = train(2, 0)
    step = jdp.train_step(model.differentiated)
    rows = jax.tree.map(lambda *x: jnp.stack(x), *map(batch, range(3)))
    state, metrics = jax.jit(lambda s, b: jax.lax.scan(step, s, b))(make_state(3), rows)
    assert_close(jax.device_get(state.params), want[0], 1e-6)
    np.testing.assert_allclose(metrics["loss"], [each["loss"] for each in want[3]], rtol=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("axis_name", [("outer", "inner"), ("inner", "outer")], ids="-".join)
@pytest.mark.parametrize("over, share", [("inner", 1 / 3), (None, 1 / 6)])
def test_parts_over_one_of_two_axes_are_replicated_over_the_other(over, share, axis_name, stage):
    def run(tx):
        axes = (AxisType.Auto,) * 2
        mesh = jax.make_mesh((2, 3), ("outer", "inner"), axes, devices=jax.devices()[:6])
        jdp.init(mesh, axis_name=axis_name)

        step = step_of(loss_fn, axis_name=axis_name)
        state = jdp.TrainState.create(model.params(), tx)
        for i in range(3):
            state, _ = step(state, batch(i))
        jdp.check_replicas(state, axis_name=axis_name)
        return state

    tx = jdp.sharded(model.clipped(), stage=stage, min_size=1, over=over, axis_name=axis_name)
    state = run(tx)
    assert shares(state.opt_state[1][0].trace)["['w']"] == share
    assert shares(state.params)["['w']"] == (share if stage == 3 else 1)
    want = run(jdp.replicated(model.clipped(), axis_name=axis_name))
    assert_close(jax.device_get(state.params), jax.device_get(want.params), 1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_dim_that_the_compiler_splits_is_not_split_over_the_ranks(stage):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    jdp.init(mesh)

    @jdp.train_step
    def step(state, rows):
        grads = jax.grad(lambda p: jnp.mean(rows["x"][:, :3] @ p["w"]))(state.params)
        return state.apply_gradients(grads), {}

    w = np.arange(12, dtype="f").reshape(3, 4)
    params = {"w": jax.device_put(w, NamedSharding(mesh, PartitionSpec(None, "model")))}
    tx = optimizer(stage, optax.sgd(2.0, momentum=0.5))
    state, _ = step(jdp.TrainState.create(params, tx), batch())
    assert set(shares(state.opt_state).values()) == {1 / 2}
    want = w - 2 * np.broadcast_to(batch()["x"][:, :3].mean(0)[:, None] / 4, w.shape)
    np.testing.assert_allclose(state.params["w"], want, rtol=1e-6)


def test_evaluation_takes_split_parameters():
    ranks(3)
    measure = jdp.eval_step(lambda params, rows: {"loss": loss_fn(params, rows)})
    of_state = jdp.eval_step(lambda state, rows: {"loss": loss_fn(state.params, rows)})
    want = [np.mean(model.losses(model.params(), batch(i))) for i in range(2)]
    state, batches = make_state(3), [batch(i) for i in range(2)]
    for step, given in ((measure, state.params), (of_state, state)):
        np.testing.assert_allclose(
            jdp.evaluate(step, given, batches)["loss"], np.mean(want), rtol=1e-6
        )


def test_outside_of_a_step_the_state_is_plain_arrays():
    ranks(2)
    state, whole = make_state(3), make_state(0)
    grads = jax.tree.map(jnp.ones_like, model.params())
    got, want = state.apply_gradients(grads), whole.apply_gradients(grads)
    assert_close(jax.device_get(got.params), jax.device_get(want.params), 1e-6)
    loss = jax.jit(loss_fn)(state.params, batch())
    np.testing.assert_allclose(loss, loss_fn(model.params(), batch()), rtol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_check_step_compares_it_with_one_rank(stage):
    ranks(3)
    step = jdp.train_step(model.differentiated)
    assert jdp.check_step(step, make_state(stage), batch()).num_ranks == 3


def clipped_to_the_median(updates, params):
    def clip(x):
        middle = jnp.median(jnp.abs(x))
        return jnp.clip(x, -middle, middle)

    return jax.tree.map(clip, updates)


def test_check_step_and_the_log_name_what_an_optimizer_gathers(caplog):
    ranks(2)
    state = make_state(1, optax.chain(optax.stateless(clipped_to_the_median), optax.sgd(0.1)))
    step = jdp.train_step(model.differentiated)
    with caplog.at_level("INFO", "jdp"):
        found = jdp.check_step(step, state, batch())
    assert any("[1152]" in text for text in found.gathers), found.gathers  # 24 x 48
    assert "[1152]" in str(found)
    assert len([text for text in caplog.messages if "[1152]" in text]) == 1
    assert not jdp.check_step(step, make_state(1), batch()).gathers


def unsynced(state, rows):
    grads = jax.grad(loss_fn)(state.params, rows)
    return state.apply_gradients(grads, synced=True), {}


def local_beside(state, rows):
    grads = jax.grad(loss_fn)(state.params, rows)
    new = state.apply_gradients(grads)
    return new.replace(params=jax.tree.map(jnp.subtract, new.params, grads)), {}


def local_scale(state, rows):
    grads = jax.grad(loss_fn)(state.params, rows)
    scale = 1 / rows["x"].mean()
    new = jax.tree.map(lambda p: p * scale, state.params)
    return state.replace(params=new).apply_gradients(grads), {}


def summed(state, rows):
    grads = jax.lax.psum(jax.grad(loss_fn)(state.params, rows), "data")
    return state.apply_gradients(grads, synced=True), {}


def counted_twice(state, rows):
    grads = jax.lax.psum(jax.grad(loss_fn)(state.params, rows), "data")
    return state.apply_gradients(grads), {}


def masked_by_own_rows(state, rows):
    grads = jdp.sync_gradients(jax.grad(loss_fn)(state.params, rows))
    keep = rows["x"].mean(0)[:, None] > 0
    return state.apply_gradients({**grads, "w": jnp.where(keep, grads["w"], 0)}, synced=True), {}


WRONG = {
    masked_by_own_rows: "JDP101|JDP114",
    unsynced: "JDP101",
    local_beside: "JDP101",
    local_scale: "JDP101",
    summed: "JDP121",
    counted_twice: "JDP121",
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("program", WRONG, ids=lambda program: program.__name__)
def test_refuses_steps_whose_ranks_would_drift_apart(program, stage):
    ranks(2)
    with pytest.raises(ValueError, match=WRONG[program]):
        jdp.train_step(program)(make_state(stage), batch())


def test_the_line_of_the_update_is_named_where_leaves_stay_whole():
    ranks(2)
    state = jdp.TrainState.create({"b": np.ones(3, "f")}, jdp.sharded(optax.sgd(0.1), stage=3))

    def step(state, rows):
        grads = jax.grad(lambda p: jnp.sum(p["b"]) * rows["x"].mean())(state.params)
        return state.apply_gradients(grads, synced=True), {}

    line = step.__code__.co_firstlineno + 2
    with pytest.raises(ValueError, match=rf"test_sharded\.py:{line}\b.*JDP101"):
        jdp.train_step(step)(state, batch())


def test_refuses_options_that_have_no_meaning():
    for options in ({"stage": 4}, {"stage": 0}, {"min_size": 0}, {"over": "model"}):
        with pytest.raises(ValueError):
            jdp.sharded(optax.sgd(0.1), **options)


def test_two_optimizers_over_different_axes_are_refused():
    axes = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("outer", "inner"), axes, devices=jax.devices()[:4])
    jdp.init(mesh, axis_name=("outer", "inner"))
    options = {"axis_name": ("outer", "inner"), "min_size": 1}
    states = tuple(
        jdp.TrainState.create(model.params(), jdp.sharded(optax.sgd(0.1), over=over, **options))
        for over in ("inner", "outer")
    )
    with pytest.raises(ValueError, match="'inner'.*'outer'|'outer'.*'inner'"):
        jdp.train_step(lambda s, b: (s, {}), axis_name=("outer", "inner"))(states, batch())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["params", "opt_state", "model_state"])
def test_refuses_a_state_with_a_leaf_on_another_mesh(stage, name):
    ranks(2)
    other = make_state(stage, model_state=jdp.per_rank(np.zeros((4, 3), "f")))
    mesh = ranks(4)
    state = make_state(stage, model_state=jdp.per_rank(np.zeros((4, 3), "f")))
    mixed = state.replace(**{name: getattr(other, name)})
    step = jdp.train_step(model.differentiated)
    with pytest.raises(ValueError, match=rf"`\.{name}.* .* 2 devices .* 4 "):
        step(mixed, batch())
    moved = jax.device_put(mixed, jax.tree.map(lambda x: x.sharding, state))
    assert step(moved, batch())[0].step.sharding.mesh == mesh
