"""A model whose leaves are split in different ways, and its training on n ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp
from support.training import fetched, ranks

NUM_ROWS = 48


def params():
    draw = np.random.default_rng(0).normal
    return {
        "embedding": draw(size=(50, 24)).astype("f"),  # 2 divides both dims, 3 and 8 the last
        "w": draw(size=(24, 48)).astype("f"),  # its larger dim is the last
        "b": np.zeros(48, "f"),
        "v": draw(size=(48, 7)).astype("f"),  # its larger dim is the first
        "odd": draw(size=(7, 5)).astype("f"),  # divides by no number of ranks but 1
        "scale": np.float32(1.0),
    }


def batch(seed=0):
    draw = np.random.default_rng(100 + seed)
    return {
        "x": draw.normal(size=(NUM_ROWS, 24)).astype("f"),
        "y": draw.normal(size=(NUM_ROWS, 5)).astype("f"),
        "ids": draw.integers(0, 50, NUM_ROWS),
        "counts": (np.arange(NUM_ROWS) < 37 + seed).astype("f"),
    }


def losses(p, rows):
    h = jnp.tanh((rows["x"] + p["embedding"][rows["ids"]]) @ p["w"] + p["b"])
    return jnp.square((h @ p["v"]) @ p["odd"] * p["scale"] - rows["y"]).mean(-1)


def loss_fn(p, rows):
    return losses(p, rows).mean()


def masked_loss(p, rows):
    return jnp.sum(losses(p, rows) * rows["counts"]) / jnp.sum(rows["counts"])


def of_layers(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.square(x).mean()


def clipped():
    """An optimizer with state, whose norm is one of all leaves."""
    return optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))


def optimizer(stage, tx=None, **options):
    """`jdp.sharded` of every leaf that can be split; at stage 0 `jdp.replicated`."""
    tx = clipped() if tx is None else tx
    if stage == 0:
        return jdp.replicated(tx)
    return jdp.sharded(tx, **{"stage": stage, "min_size": 1, **options})


def make_state(stage, tx=None, **options):
    return jdp.TrainState.create(params(), optimizer(stage, tx), **options)


def with_frozen(stage):
    return make_state(stage, trainable=lambda path, leaf: "embedding" not in path)


def norm(tree):
    return jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(tree)))


def plain(state, rows):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, rows)
    return state.apply_gradients(grads), {"loss": loss, "norm": norm(state.params)}


def program_of(name, loss_fn, **options):
    """A step that trains on a loss; the options are those of `jdp.value_and_grad`."""

    def program(state, rows):
        loss, grads = jdp.value_and_grad(loss_fn, **options)(state.params, rows)
        return state.apply_gradients(grads), {"loss": loss, "norm": norm(state.params)}

    program.__name__ = name
    return program


differentiated = program_of("differentiated", loss_fn)


def train(n, stage, program=differentiated, num_steps=3, state=None, **options):
    """Train on n ranks: `(fetched state and metrics, state)`."""
    ranks(n)
    step = jdp.train_step(program, **options)
    current, reported = make_state(stage) if state is None else state(stage), []
    for i in range(num_steps):
        current, metrics = step(current, batch(i))
        reported.append(metrics)
    numbers = current.params, current.opt_state, current.model_state, reported
    return fetched(numbers), current
