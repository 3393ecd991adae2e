"""What a rank holds between steps, and at stage 3 in them: two groups of gathered parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.training import ranks, step_of

import jdp
from benchmarks.harness import models

pytestmark = pytest.mark.optimized

DIM, NUM_RANKS = 256, 8
LAYER = 4 * DIM * DIM  # bytes; a group of parameters holds one layer


# Copies of all parameters that a rank holds between steps, with Adam.
HELD = {1: lambda n: 1 + 2 / n, 2: lambda n: 1 + 2 / n, 3: lambda n: 3 / n}


def mlp(x, w):
    return jnp.tanh(x @ w)


def transposed_and_cast(x, w):
    return jnp.tanh(x @ w.T.astype(jnp.bfloat16).astype(jnp.float32))


def temporary(layers, apply, rows=64, stage=3, value_and_grad=jdp.value_and_grad, **options):
    """Temporary bytes of a rank, in layers, of a step that computes gradients and keeps them."""
    ranks(NUM_RANKS)
    keep = options.pop("keep_gathered", False)
    split = {"stage": stage, "bucket_bytes": LAYER, "keep_gathered": keep}

    def loss_fn(params, x):
        for p in params:
            x = apply(x, p)
        return jnp.square(x).mean()

    @jdp.train_step
    def step(state, x):
        loss, grads = value_and_grad(loss_fn, **options)(state.params, x)
        return state.replace(params=grads), {"loss": loss}

    state = jdp.TrainState.create(layers, jdp.sharded(optax.sgd(0.1), **split))
    compiled = step.lower(state, np.zeros((rows, DIM), np.float32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes / LAYER


def equal_layers(number):
    return [np.full((DIM, DIM), 0.01, np.float32)] * number


# Two groups of parameters, two gradients on their way, and the parts of all others.
@pytest.mark.parametrize("apply, most", [(mlp, 4.5), (transposed_and_cast, 6.5)])
def test_twelve_layers_take_the_memory_of_two(apply, most):
    assert temporary(equal_layers(12), apply) < most


def test_the_memory_does_not_grow_with_the_number_of_layers():
    # Each layer adds an eighth of its parameters and 8 rows of activations.
    assert temporary(equal_layers(24), mlp) - temporary(equal_layers(12), mlp) < 12 * 0.3


def test_with_keep_gathered_all_parameters_are_there_at_once():
    assert temporary(equal_layers(12), mlp, keep_gathered=True) > 11


@pytest.mark.parametrize("accumulate", [2, 4])
def test_micro_batches_add_up_shards(accumulate):
    # The sums are the shards of 12 layers: 1.5 layers, twice in the loop.
    assert temporary(equal_layers(12), mlp, accumulate=accumulate) < 4.0 + 3.0


def test_checkpoint_of_the_author_stays_in_force():
    def wide(x, w):
        for _ in range(6):
            x = jnp.tanh(jnp.sin(x) @ w)
        return x

    # 256 rows of a rank are one layer's size: 12 activations with it, and 72 or more without. Some
    # of one checkpoint are there at a time; JAX 0.10 drops barriers on CPUs, and has more of them.
    kept = temporary(equal_layers(12), wide, rows=256 * NUM_RANKS)
    again = temporary(equal_layers(12), jax.checkpoint(wide), rows=256 * NUM_RANKS)
    assert kept > 72 and again < kept / 2


def held_and_temporary(tx, num_ranks):
    """Bytes of a rank, in copies of all parameters: 12 layers, 4 micro-batches, Adam."""
    ranks(num_ranks)

    def loss_fn(params, x):
        for p in params:
            x = mlp(x, p)
        return jnp.square(x).mean()

    step = step_of(loss_fn, accumulate=4)

    state = jdp.TrainState.create(equal_layers(12), tx)
    rows = np.zeros((32 * num_ranks, DIM), np.float32)
    memory = step.lower(state, rows).compile().memory_analysis()
    return np.array([memory.argument_size_in_bytes, memory.temp_size_in_bytes]) / (12 * LAYER)


# Beside activations: sums of gradients, gradients on their way, and gathered parameters.
GROUP = 1 / 12
TEMPORARY = {
    1: lambda n: 1 + GROUP,
    2: lambda n: (1 + GROUP) / n + GROUP,
    3: lambda n: (1 + GROUP) / n + 2 * GROUP,
}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_on_one_rank_each_stage_needs_what_replicated_does(stage):
    adam, split = optax.adam(1e-3), {"stage": stage, "bucket_bytes": LAYER}
    found = held_and_temporary(jdp.sharded(adam, **split), 1)
    np.testing.assert_array_equal(found, held_and_temporary(jdp.replicated(adam), 1))


@pytest.mark.parametrize("stage, num_ranks", [(1, 2), (2, 2), (2, 8), (3, 4), (3, 8)])
def test_with_micro_batches_a_rank_needs_what_the_guide_says(stage, num_ranks):
    held, whole = held_and_temporary(jdp.replicated(optax.adam(0.1)), num_ranks)
    rows = held - 3
    split = jdp.sharded(optax.adam(0.1), stage=stage, min_size=1, bucket_bytes=LAYER)
    found = sum(held_and_temporary(split, num_ranks))
    activations = whole - 1 - GROUP
    expected = HELD[stage](num_ranks) + rows + TEMPORARY[stage](num_ranks) + activations
    assert found == pytest.approx(expected, rel=0.02)


def block(x, p):
    """A layer of a transformer, for rows that are the positions of one text each rank."""
    q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1)
    x = x + jax.nn.softmax(q @ k.T / DIM**0.5) @ v @ p["out"]
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def test_a_transformer_takes_the_memory_of_two_groups():
    shapes = {
        "qkv": (DIM, 3 * DIM),
        "out": (DIM, DIM),
        "up": (DIM, 2 * DIM),
        "down": (2 * DIM, DIM),
    }
    layers = [{k: np.full(s, 0.01, np.float32) for k, s in shapes.items()} for _ in range(6)]
    # 48 layers' sizes in all. The largest leaf has three, and a group holds at least one leaf.
    assert temporary(layers, block) < 15
    assert temporary(layers, block, keep_gathered=True) > 45


def stacked_transformer():
    shapes = {"qkv": (64, 192), "out": (64, 64), "up": (64, 256), "down": (256, 64)}
    layers = {name: np.full((6, *shape), 0.01, np.float32) for name, shape in shapes.items()}

    def loss_fn(params, x):
        def layer(x, p):
            q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1)
            x = x + jax.nn.softmax(q @ k.T / 8.0) @ v @ p["out"]
            return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

        return jnp.square(jdp.scan_layers(layer, x, params)[0]).mean()

    return models.Problem("stacked", layers, np.ones((16, 64), np.float32), loss_fn)


PROBLEMS = {
    "mlp": lambda: models.mlp(width=256, num_layers=4, num_rows=16),
    "transformer": lambda: models.transformer(dim=128, num_layers=2, num_rows=16, length=8),
    "stacked transformer": stacked_transformer,
}


@pytest.mark.parametrize(
    "name, stage, num_ranks",
    [
        ("mlp", 1, 2),
        ("mlp", 3, 8),
        ("transformer", 1, 8),
        ("transformer", 2, 4),
        ("transformer", 3, 1),
        ("stacked transformer", 2, 1),
        ("stacked transformer", 3, 4),
    ],
)
def test_between_steps_a_rank_holds_what_the_table_of_the_guide_says(name, stage, num_ranks):
    ranks(num_ranks)
    problem = PROBLEMS[name]()

    step = step_of(problem.loss_fn)

    tx = jdp.sharded(optax.adam(0.1), stage=stage, min_size=128)
    state = jdp.TrainState.create(problem.params, tx)
    memory = step.lower(state, problem.batch).compile().memory_analysis()
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(problem.params))
    rows = sum(x.nbytes for x in jax.tree.leaves(problem.batch)) / num_ranks
    held = (memory.argument_size_in_bytes - rows) / num_bytes
    assert held == pytest.approx(HELD[stage](num_ranks), rel=0.02)
    # All of it is written in place; metrics come out beside it.
    assert memory.alias_size_in_bytes > 0.98 * (memory.argument_size_in_bytes - rows)
