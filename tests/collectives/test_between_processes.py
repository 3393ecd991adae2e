"""Training over gloo, where a bucket is one array."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support import training
from support.per_rank import per_rank

import jdp
from jdp import axis
from jdp.collectives.cpu import shared_memory

NUM_STEPS = 4
KINDS = {
    "replicated": lambda: jdp.replicated(optax.adam(1e-2)),
    "16 bits": lambda: jdp.replicated(optax.adam(1e-2), reduce_dtype=jnp.bfloat16),
    "stage 1": lambda: jdp.sharded(optax.adam(1e-2), stage=1, min_size=1),
    "stage 2": lambda: jdp.sharded(optax.adam(1e-2), stage=2, min_size=1),
    "stage 3": lambda: jdp.sharded(optax.adam(1e-2), stage=3, min_size=1),
    "stage 3, 16 bits": lambda: jdp.sharded(
        optax.adam(1e-2), stage=3, min_size=1, reduce_dtype=jnp.bfloat16, gather_dtype=jnp.bfloat16
    ),
}


def parameters():
    draw = np.random.default_rng(0)
    shapes = {"w": (12, 300), "odd": (5, 7), "v": (300, 24), "b": (24,), "scale": ()}
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["w"])
    result = hidden @ params["v"] + params["b"] * params["scale"]
    return jnp.mean(result**2) + jnp.sum(params["odd"] ** 2) * jnp.mean(x)


def train(kind, num_ranks):
    """Return the parameters, and the names and kinds of the collectives."""
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))[:num_ranks]
    mesh = jdp.init(devices=devices)

    @jdp.train_step
    def step(state, batch):
        loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch["x"])
        return state.apply_gradients(grads), {"loss": loss}

    state, batch = jdp.TrainState.create(parameters(), KINDS[kind]()), None
    rows = {"x": np.random.default_rng(1).normal(size=(12 * NUM_STEPS, 12)).astype(np.float32)}
    for batch in jdp.batches(rows, 12, num_steps=NUM_STEPS, shuffle=False):
        state, _ = step(state, batch)
    jdp.check_replicas(state)
    plan = step.communication_plan(state, batch)
    sent = [(each.kind, each.dtype, [leaf.path for leaf in each.leaves]) for each in plan]
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(state.params)
    return training.fetched(jax.tree.map(lambda x: x.addressable_data(0), whole)), sent


def train_apart(kind, num_ranks):
    with mock.patch.object(shared_memory, "why_apart", lambda *_: "they are apart."):
        return train(kind, num_ranks)


@pytest.mark.processes
@pytest.mark.parametrize("num_processes", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_training_apart_equals_training_on_one_host(processes, kind, num_processes):
    num_ranks = 2 * num_processes
    want, _ = train(kind, num_ranks)
    for params, sent in processes(num_processes).run(train_apart, kind, num_ranks):
        training.assert_close(params, want)
        summed = [path for sort, _, paths in sent if sort != "all-gather" for path in paths]
        assert sorted(filter(None, summed)) == sorted(f"grads['{name}']" for name in want)
        assert summed.count("") <= 3  # loss and weight
        assert len(sent) <= 6 < len(params) + 2
        is_short = {"u16", "bf16"} & {dtype for _, dtype, _ in sent}
        assert bool(is_short) == ("16" in kind)


def layers_loss(params, x):
    x, _ = jdp.scan_layers(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    return jnp.mean((x @ params["out"]) ** 2)


def plan(apart, tx, params, loss_fn, **options):
    """What a step of 4 ranks sends, by kind and names; as if each had a process of its own."""
    training.ranks(4)

    @jdp.train_step(**options)
    def step(state, x):
        return state.apply_gradients(jdp.value_and_grad(loss_fn)(state.params, x)[1]), {}

    state, x = jdp.TrainState.create(params, tx), np.ones((24, 12), np.float32)
    mocked = mock.patch.object(axis, "is_between_processes", lambda mesh: apart and mesh.size > 1)
    with mocked, mock.patch.object(shared_memory, "why_apart", lambda *_: "they are apart."):
        sent = step.communication_plan(state, x)
    return {(each.kind, leaf.path) for each in sent for leaf in each.leaves}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_scanned_layers_keep_their_names(stage, dtype):
    params = {"layers": np.ones((3, 12, 12), np.float32), "out": np.ones((12, 8), np.float32)}
    tx = jdp.sharded(optax.adam(0.1), stage=stage, min_size=1, reduce_dtype=dtype)
    together, apart = (plan(flag, tx, params, layers_loss) for flag in (False, True))
    renamed = {(kind.replace("reduce-scatter", "all-to-all"), path) for kind, path in together}
    assert apart == renamed and ("all-to-all", "grads['out']") in apart


@pytest.mark.parametrize("stage", [0, 2])
def test_virtual_ranks_send_the_same_wherever_ranks_are(stage):
    wrap = functools.partial(jdp.sharded, stage=stage, min_size=1) if stage else jdp.replicated
    tx = wrap(optax.sgd(0.1), reduce_dtype=jnp.bfloat16)
    together, apart = (plan(flag, tx, parameters(), loss_fn, virtual_ranks=8) for flag in (0, 1))
    assert together == apart


def test_axes_of_one_device_split_nothing(before_init):
    mesh = jdp.init(devices=jax.devices()[:4], axes={"data": 4, "model": 1})
    x = np.arange(8, dtype=np.float32).reshape(4, 2)

    def fn(x):
        return jdp.collectives.xla([[x, x[0]]], "data", mesh=mesh)

    with mock.patch.object(axis, "is_between_processes", lambda mesh: True):
        mapped = jax.shard_map(
            fn, in_specs=PartitionSpec("data"), out_specs=PartitionSpec(), axis_names={"data"},
            check_vma=False, mesh=mesh,
        )  # fmt: skip
        text = jax.jit(mapped).lower(x).as_text()
    assert text.count("all_reduce") == 1


@pytest.mark.parametrize("scale", [0.25, np.float32(0.25)])
def test_derivatives_of_large_float16_sums_are_finite(make_mesh, scale):
    x = np.full((4, 6), 30_000, np.float16)

    def slope(x):
        total = lambda x: jdp.collectives.xla([[x]], "data", scale=scale)[0][0]  # noqa: E731
        return jax.jvp(total, (x,), (x,))

    with mock.patch.object(axis, "is_between_processes", lambda mesh: True):
        for result in per_rank(make_mesh(4), slope, x):
            np.testing.assert_array_equal(result, x)
