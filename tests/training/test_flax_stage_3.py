"""Parameters of Flax's TrainState live as shards at stage 3, and train as on one device."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState as FlaxTrainState
from support.sharded_training import batch, clipped, loss_fn, optimizer, params
from support.training import assert_close, fetched, ranks

import jdp
from jdp.distributed import this_process

NUM_STEPS = 3
LAYER = 4 * 256 * 256  # bytes of a matrix; a group of parameters holds one


class WithAverage(FlaxTrainState):
    """A state with an average of the parameters, and one of the rows that has the shape of `b`."""

    average: Any
    center: jax.Array


def made(tx):
    given = params()
    return WithAverage.create(
        apply_fn=None, params=given, tx=tx, average=given, center=np.zeros(48, "f")
    )


def with_value_and_grad(state, rows):
    loss, grads = jdp.value_and_grad(loss_fn)(state.params, rows)
    return state.apply_gradients(grads=grads), {"loss": loss}


def in_micro_batches(state, rows):
    loss, grads = jdp.value_and_grad(loss_fn, accumulate=2)(state.params, rows)
    return state.apply_gradients(grads=grads), {"loss": loss}


def with_jax(state, rows):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, rows)
    return state.apply_gradients(grads=grads), {"loss": loss}


def averaged(state, rows):
    """Averages, with a decay that depends on the step, and clips the new weights."""
    loss, grads = jdp.value_and_grad(loss_fn)(state.params, rows)
    state = state.apply_gradients(grads=grads)
    decay = jnp.minimum(0.9, (1 + state.step) / (4 + state.step))
    average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, state.average, state.params)
    center = 0.5 * state.center + jdp.mean_over_ranks(jnp.tile(rows["x"].mean(0), 2))
    clipped = jax.tree.map(lambda p: jnp.clip(p, -1, 1), state.params)
    return state.replace(params=clipped, average=average, center=center), {"loss": loss}


def twice(state, rows):
    """Updates twice, the second time from parameters that exist in this step alone."""
    state, metrics = with_value_and_grad(state, rows)
    loss, grads = jdp.value_and_grad(lambda p, r: 0.5 * loss_fn(p, r))(state.params, rows)
    return state.apply_gradients(grads=grads), metrics | {"second": loss}


def by_hand(state, rows):
    """Reads the updates, and returns the old parameters where these are too large."""
    loss, grads = jdp.value_and_grad(loss_fn)(state.params, rows)
    updates, opt_state = state.tx.update(grads, state.opt_state, state.params)
    norm = optax.tree.norm(updates)
    new = optax.apply_updates(state.params, jax.tree.map(lambda u: 0.5 * u, updates))
    new = jax.tree.map(lambda a, b: jnp.where(norm < 0.04, a, b), new, state.params)
    new["embedding"] = new["embedding"][::-1]  # not element by element
    return state.replace(params=new, opt_state=opt_state), {"loss": loss, "norm": norm}


def trained(program, tx, decorate):
    state, step, reported = made(tx), decorate(program), []
    for i in range(NUM_STEPS):
        state, metrics = step(state, batch(i))
        reported.append(metrics)
    return state, reported


def alone(program):
    """The same training on one device, without a step of jdp."""
    return fetched(trained(program, clipped(), jax.jit))


def numbers(state):
    return {name: getattr(state, name) for name in ("params", "opt_state", "average", "center")}


def assert_every_shard(state, want):
    for (path, leaf), value in zip(
        jax.tree_util.tree_leaves_with_path(numbers(state)),
        jax.tree.leaves(numbers(want)),
        strict=True,
    ):
        for shard in leaf.addressable_shards:
            np.testing.assert_allclose(
                shard.data,
                value[shard.index],
                rtol=1e-5,
                atol=1e-6,
                err_msg=f"{jax.tree_util.keystr(path)} on {shard.device}",
            )


@pytest.mark.parametrize(
    ("program", "n", "options"),
    [
        (with_value_and_grad, 1, {}),
        (with_value_and_grad, 8, {}),
        (in_micro_batches, 2, {}),
        (in_micro_batches, 3, {"keep_gathered": True}),
        (with_jax, 3, {}),
        (averaged, 2, {"bucket_bytes": 1}),
        (averaged, 3, {}),
        (twice, 8, {}),
        (by_hand, 3, {}),
    ],
)
def test_training_is_that_of_one_device(program, n, options):
    want, reported_alone = alone(program)
    ranks(n)
    state, reported = trained(program, optimizer(3, **options), jdp.train_step)
    assert_every_shard(state, want)
    assert_close(fetched(reported), reported_alone, 1e-5)
    jdp.check_replicas(state)
    held = {path: leaf.addressable_shards[0].data.size for path, leaf in state.params.items()}
    whole = {path: leaf.size for path, leaf in state.params.items()}
    assert held == {p: whole[p] // (1 if p in ("odd", "scale") else n) for p in whole}


def matrices(number):
    return {f"w{i}": np.full((256, 256), 0.01, np.float32) for i in range(number)}


def through_matrices(weights, x):
    for name in sorted(weights):
        x = jnp.tanh(x @ weights[name])
    return jnp.square(x).mean()


def of_jdp(tx):
    return jdp.TrainState.create(matrices(12), tx)


def of_flax(tx):
    return FlaxTrainState.create(apply_fn=None, params=matrices(12), tx=tx)


def memory_and_calls(make, apply, value_and_grad):
    """Bytes of a rank in a step, its arguments and the rest, and the kinds of its collectives."""
    ranks(4)

    @jdp.train_step
    def step(state, x):
        loss, grads = value_and_grad(through_matrices)(state.params, x)
        return apply(state, grads), {"loss": loss}

    state = make(jdp.sharded(optax.adam(0.1), stage=3, min_size=1, bucket_bytes=LAYER))
    rows = np.zeros((32, 256), np.float32)
    memory = step.lower(state, rows).compile().memory_analysis()
    found = jdp.explain(step, state, rows)
    calls = sorted(bucket.kind for bucket in found.buckets for _ in bucket.leaves)
    return memory.argument_size_in_bytes, memory.temp_size_in_bytes, calls


@pytest.mark.parametrize("value_and_grad", [jdp.value_and_grad, jax.value_and_grad])
def test_a_rank_needs_and_sends_as_much_as_with_a_state_of_jdp(value_and_grad):
    held, temporary, calls = memory_and_calls(
        of_flax, lambda state, grads: state.apply_gradients(grads=grads), value_and_grad
    )
    want = memory_and_calls(
        of_jdp, lambda state, grads: state.apply_gradients(grads), value_and_grad
    )
    assert calls == want[2]
    assert temporary == pytest.approx(want[1], rel=0.01)
    assert held == pytest.approx(3 / 4 * 12 * LAYER + 8 * 256 * 4, rel=0.001)


def logged(caplog, program):
    ranks(2)
    this_process.log_once.cache_clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "jdp"):
        trained(program, optimizer(3), jdp.train_step)
    return [record.getMessage() for record in caplog.records]


def test_parameters_that_are_gathered_for_a_whole_step_are_logged_once(caplog):
    assert not logged(caplog, with_value_and_grad)
    (line,) = logged(caplog, with_jax)
    assert "4 arrays of 10,944 bytes" in line and "jdp.value_and_grad" in line


def test_training_continues_at_another_stage_on_another_number_of_ranks(tmp_path):
    want, _ = alone(with_value_and_grad)
    for n, stage, num_steps in ((3, 3, 1), (2, 1, 2), (8, 3, 3)):
        ranks(n)
        batches = jdp.batches(batch(0), 48, num_steps=num_steps, shuffle=False)
        with jdp.Checkpointer(tmp_path, resume=True) as checkpointer:
            state = checkpointer.restore(made(optimizer(stage)), batches)
            step = jdp.train_step(with_value_and_grad)
            for _ in batches:
                state, _ = step(state, batch(int(state.step)))
                checkpointer.step(state, batches)
    assert_every_shard(state, want)


def test_a_state_that_another_stage_left_is_placed_anew():
    want, _ = alone(with_value_and_grad)
    ranks(2)
    state = made(optimizer(3))
    for i, stage in enumerate((3, 1, 3)):
        state = state.replace(tx=optimizer(stage))
        state, _ = jdp.train_step(with_value_and_grad)(state, batch(i))
        assert state.params["w"].is_fully_replicated == (stage == 1)
    assert_every_shard(state, want)


def test_a_state_is_read_as_any_other():
    ranks(3)
    state, _ = trained(with_value_and_grad, optimizer(3), jdp.train_step)
    rows = batch(9)
    host = jax.device_get(state.params)
    want = loss_fn(host, rows)
    assert np.allclose(jax.jit(loss_fn)(state.params, rows), want, rtol=1e-6)
    measure = jdp.eval_step(lambda state, rows: {"loss": loss_fn(state.params, rows)})
    assert np.allclose(measure(state, rows)["loss"], want, rtol=1e-6)
    jdp.check_step(jdp.train_step(with_value_and_grad), state, rows)


def test_a_loss_sees_parameters_in_gather_dtype():
    seen = set()

    def program(state, rows):
        def narrow(p, rows):
            seen.update(leaf.dtype.name for leaf in jax.tree.leaves(p))
            return loss_fn(p, rows)

        loss, grads = jdp.value_and_grad(narrow)(state.params, rows)
        return state.apply_gradients(grads=grads), {"loss": loss}

    for n in (1, 2):
        ranks(n)
        tx = optimizer(3, gather_dtype=jnp.bfloat16)
        state, _ = trained(program, tx, jdp.train_step)
        assert seen == {"bfloat16"} and state.params["w"].dtype == jnp.float32
        if n > 1:
            jdp.check_step(jdp.train_step(program), state, batch(9))
        with pytest.raises(ValueError, match="gather_dtype"):
            trained(with_jax, tx, jdp.train_step)


def test_a_value_that_is_asked_for_is_named_as_the_author_names_it():
    ranks(2)

    @jdp.train_step
    def fit(state, rows):
        if state.params["w"][0, 0] > 0:
            pass
        return state, {}

    with pytest.raises(TypeError, match="JDP127") as caught:
        fit(made(optimizer(3)), batch())
    assert "`state.params['w']`" in str(caught.value)
