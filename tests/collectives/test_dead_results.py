"""What nobody reads of native calls is not sent, and the calls behind it are right."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.training import ranks

import jdp
from jdp.collectives import call_order, native, native_shards
from jdp.collectives.cpu import runtime as cpu_runtime

pytestmark = pytest.mark.skipif(
    cpu_runtime.why_missing() is not None, reason=f"{cpu_runtime.why_missing()}"
)
CALLS = re.compile(r"custom_call @(jdp_\w+)\(([^)]*)\)")


def compiled(mesh, fn, x):
    """What runs: the function, and its native calls with the number of leaves of each."""

    def in_order(x):
        with call_order.entered():
            return fn(x)

    mapped = jax.jit(
        jax.shard_map(in_order, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    )
    lowered = mapped.lower(x)
    leaves = [
        (name, given.count(",") - call_order.TOKEN)
        for name, given in CALLS.findall(lowered.as_text())
    ]
    return lowered.compile()(x), leaves


def whole_numbers(num_ranks, columns):
    return np.arange(num_ranks * 6 * columns, dtype=np.float32).reshape(num_ranks * 6, columns)


def test_a_gather_sends_only_the_leaves_that_are_read(mesh):
    x = whole_numbers(mesh.size, 5)

    def fn(x):
        (a, b, c), (d,) = native_shards.all_gather(
            [[x, 2 * x, 3 * x], [4 * x]], [[0, 1, 0], [0]], "data", mesh=mesh
        )
        return b[:, :5] + native([[x]], "data", mesh=mesh)[0][0]

    result, leaves = compiled(mesh, fn, x)
    assert leaves == [("jdp_all_gather", 1), ("jdp_all_reduce", 1)]
    blocks = x.reshape(mesh.size, 6, 5)
    whole = 2 * np.concatenate([*blocks], axis=1)[:, :5]
    np.testing.assert_array_equal(result, np.tile(whole + blocks.sum(0), (mesh.size, 1)))


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_a_sum_adds_only_the_leaves_that_are_read(mesh, kind):
    x = whole_numbers(mesh.size, mesh.size)

    def fn(x):
        if kind == "all_reduce":
            a, b = native([[x, x + 1]], "data", mesh=mesh)[0]
            return b
        a, b = native_shards.reduce_scatter([[x, x + 1]], [[1, 1]], "data", mesh=mesh)[0]
        return b

    result, leaves = compiled(mesh, fn, x)
    assert leaves == [(f"jdp_{kind}", 1)]
    total = (x + 1).reshape(mesh.size, 6, -1).sum(0)
    expected = np.tile(total, (mesh.size, 1))
    if kind == "reduce_scatter":
        expected = np.concatenate(np.split(total, mesh.size, axis=1))
    np.testing.assert_array_equal(result, expected)


def test_in_a_loop_what_no_turn_reads_is_not_sent(mesh):
    x = whole_numbers(mesh.size, 2)

    def turn(carry, _):
        ((whole,),) = native_shards.all_gather([[carry]], [[0]], "data", mesh=mesh)
        ((total,),) = native([[carry]], "data", mesh=mesh)
        return total, whole

    result, leaves = compiled(mesh, lambda x: lax.scan(turn, x, length=3)[0], x)
    assert leaves == [("jdp_all_reduce", 1)]
    once = x.reshape(mesh.size, 6, 2).sum(0)
    np.testing.assert_array_equal(result, np.tile(once * mesh.size**2, (mesh.size, 1)))


@pytest.mark.filterwarnings("ignore:the step reduces gradients, and returns")
def test_a_step_that_reads_the_loss_alone_gathers_nothing_for_its_gradients():
    ranks(2)
    tx = jdp.sharded(optax.sgd(0.1), stage=3, min_size=1, bucket_bytes=64)
    layers = [np.full((4, 4), 0.1, np.float32)] * 5

    def loss_fn(layers, x):
        for w in layers:
            x = jnp.tanh(x @ w)
        return x.mean()

    def gathers(step):
        state = jdp.TrainState.create(layers, tx)
        text = jdp.train_step(step).lower(state, np.ones((4, 4), np.float32)).as_text()
        return sum(name == "jdp_all_gather" for name, _ in CALLS.findall(text))

    def whole_step(state, rows):
        loss, grads = jdp.value_and_grad(loss_fn)(state.params, rows)
        return state.apply_gradients(grads), {"loss": loss}

    def loss_alone(state, rows):
        return state, {"loss": jdp.value_and_grad(loss_fn)(state.params, rows)[0]}

    # On the way back the last two are still there, and no gradient needs the first one.
    assert (gathers(loss_alone), gathers(whole_step)) == (5, 5 + 2)
