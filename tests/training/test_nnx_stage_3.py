"""Variables of nnx models live as shards at stage 3, beside the optimizer that updates them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.sharded_training import batch, clipped, loss_fn, optimizer, params
from support.training import ranks

import jdp

NUM_STEPS = 3


class Frozen(nnx.Variable):
    """A variable that the optimizer does not update."""


class Model(nnx.Module):
    def __init__(self):
        for name, value in params().items():
            setattr(self, name, nnx.Param(jnp.asarray(value)))
        self.mean = nnx.BatchStat(jnp.zeros(24))
        self.offset = Frozen(jnp.full(48, 0.5))

    def loss(self, rows):
        mean = jdp.mean_over_ranks(rows["x"].mean(0))
        self.mean[...] = 0.5 * self.mean[...] + 0.5 * mean
        weights = {name: getattr(self, name)[...] for name in params()}
        return loss_fn(weights | {"b": weights["b"] + self.offset[...]}, rows)


def made(tx):
    model = Model()
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def with_nnx(state, rows):
    model, optimizer = state
    loss, grads = nnx.value_and_grad(lambda model: model.loss(rows))(model)
    optimizer.update(model, grads)
    return (model, optimizer), {"loss": loss}


def with_jdp(state, rows, **options):
    model, optimizer = state
    graph, weights, others = nnx.split(model, nnx.Param, ...)

    def loss_of(weights, rows):
        model = nnx.merge(graph, weights, others, copy=True)
        return model.loss(rows), nnx.state(model, nnx.BatchStat)

    differentiate = jdp.value_and_grad(loss_of, has_aux=True, **options)
    (loss, statistics), grads = differentiate(weights, rows)
    nnx.update(model, statistics)
    optimizer.update(model, grads)
    return (model, optimizer), {"loss": loss}


def trained(program, state, decorate):
    step = decorate(program)
    for i in range(NUM_STEPS):
        state, _ = step(state, batch(i))
    return state


def named(state):
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def assert_every_shard(state, want):
    want = named(want)
    for path, leaf in named(state).items():
        for shard in leaf.addressable_shards:
            np.testing.assert_allclose(
                shard.data,
                np.asarray(want[path])[shard.index],
                rtol=1e-5,
                atol=1e-6,
                err_msg=f"{path} on {shard.device}",
            )


@pytest.fixture(scope="module")
def alone():
    return trained(with_nnx, made(clipped()), lambda step: step)


@pytest.mark.parametrize(
    ("program", "n"), [(with_nnx, 1), (with_nnx, 3), (with_jdp, 2), (with_jdp, 8)]
)
def test_training_is_that_of_one_device(alone, program, n):
    ranks(n)
    state = trained(program, made(optimizer(3)), jdp.train_step)
    assert_every_shard(state, alone)
    held = {
        path: leaf.size // leaf.addressable_shards[0].data.size
        for path, leaf in named(state[0]).items()
    }
    split = {f".{name}.value": n for name in ("b", "embedding", "v", "w")}
    assert held == dict.fromkeys(held, 1) | split


class Deep(nnx.Module):
    def __init__(self):
        for i in range(12):
            setattr(self, f"w{i}", nnx.Param(jnp.full((256, 256), 0.01)))

    def loss(self, x):
        for i in range(12):
            x = jnp.tanh(x @ getattr(self, f"w{i}")[...])
        return jnp.square(x).mean()


@pytest.mark.parametrize(("program", "least", "most"), [(with_nnx, 12, 14), (with_jdp, 0, 4.5)])
def test_a_rank_holds_its_parts_between_steps_and_gathers_two_layers_with_jdp(program, least, most):
    ranks(8)
    layer = 4 * 256 * 256
    model = Deep()
    tx = jdp.sharded(optax.sgd(0.1, momentum=0.9), stage=3, bucket_bytes=layer)
    state = model, nnx.Optimizer(model, tx, wrt=nnx.Param)
    rows = np.zeros((64, 256), np.float32)
    memory = jdp.train_step(program).lower(state, rows).compile().memory_analysis()
    assert memory.argument_size_in_bytes == pytest.approx(2 * 12 * layer / 8, rel=0.02)
    assert least < memory.temp_size_in_bytes / layer < most


def adversaries(first, second):
    return {"made": made(first), "judge": made(second)}


def in_turn(state, rows):
    return {name: with_jdp(each, rows)[0] for name, each in state.items()}, {}


@pytest.mark.parametrize(
    ("options", "num_parts"), [({}, 3), ({"mean": False}, 1), ({"bucket_bytes": 1}, 1)]
)
def test_optimizers_that_reduce_differently_leave_the_variables_of_both_whole(options, num_parts):
    want = trained(in_turn, adversaries(clipped(), clipped()), lambda step: step)
    ranks(3)
    tx = optax.chain(optax.scale(1 / 3), clipped()) if "mean" in options else clipped()
    state = adversaries(optimizer(3), optimizer(3, tx, **options))
    state = trained(in_turn, state, jdp.train_step)
    for name in want:
        assert_every_shard(state[name][0], want[name][0])
        found = state[name][0].w[...]
        assert found.size // found.addressable_shards[0].data.size == num_parts


def test_training_continues_at_another_stage_on_another_number_of_ranks(tmp_path, alone):
    state = None
    for n, stage, num_steps in ((3, 3, 1), (2, 2, 2), (8, 3, 3)):
        ranks(n)
        batches = jdp.batches(batch(0), 48, num_steps=num_steps, shuffle=False)
        with jdp.Checkpointer(tmp_path, resume=True) as checkpointer:
            state = checkpointer.restore(made(optimizer(stage)), batches)
            step = jdp.train_step(with_jdp)
            for _ in batches:
                state, _ = step(state, batch(int(state[1].step[...])))
                checkpointer.step(state, batches)
    assert_every_shard(state, alone)
