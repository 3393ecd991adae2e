"""Losses that use parameters in many ways, and the parameters and rows for all of them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jdp

NUM_ROWS, DIM = 48, 24


def params():
    draw = np.random.default_rng(0).normal
    return {
        "table": draw(size=(48, DIM)).astype("f") / 5,
        "layers": [draw(size=(DIM, DIM)).astype("f") / 5 for _ in range(4)],
        "scale": np.ones(DIM, "f"),
        "odd": draw(size=(7, 5)).astype("f"),  # divides by no number of ranks but 1
    }


def batch(seed=0):
    draw = np.random.default_rng(100 + seed)
    return {
        "x": draw.normal(size=(NUM_ROWS, DIM)).astype("f"),
        "ids": draw.integers(0, 48, NUM_ROWS),
        "counts": (np.arange(NUM_ROWS) < 37 + seed).astype("f"),
    }


def dense(p, rows):
    x = rows["x"]
    for w in p["layers"]:
        x = jnp.tanh(x @ w * p["scale"])
    return jnp.square(x).mean() + jnp.square(p["odd"]).mean()


def tied(p, rows):
    x = p["table"][rows["ids"]] + rows["x"]
    x = jnp.tanh(x @ p["layers"][0]) @ p["layers"][1]
    return jnp.square(x @ p["table"].T).mean()


def cast(p, rows):
    x = rows["x"]
    for w in p["layers"]:
        x = jnp.tanh(x @ (w * p["scale"]).T.astype(jnp.float16).astype(jnp.float32))
    return x.mean()


def penalised(p, rows):
    return dense(p, rows) + 0.1 * sum(jnp.square(w).sum() for w in p["layers"])


def normalised(p, rows):
    unit = [w / jnp.linalg.norm(w) for w in p["layers"]]
    return dense({**p, "layers": unit}, rows)


def low_rank(p, rows):
    first, second, third, fourth = p["layers"]
    return dense({**p, "layers": [first + 0.1 * second @ third, fourth]}, rows)


def looped(p, rows):
    """Parameters inside of a scan, a while loop and a branch."""
    first, second, third, _ = p["layers"]
    x, _ = lax.scan(lambda x, _: (jnp.tanh(x @ first), None), rows["x"], length=3)
    count, _ = lax.while_loop(
        lambda at: at[0] < 3, lambda at: (at[0] + 1, at[1] @ second), (0, lax.stop_gradient(x))
    )
    x = lax.cond(count > 2, lambda x: x @ third, lambda x: x, x)
    stacked = jnp.stack(p["layers"])
    return lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, stacked)[0].mean()


@jax.custom_vjp
def doubled(x, w):
    return x @ w


doubled.defvjp(lambda x, w: (x @ w, (x, w)), lambda res, ct: (ct @ res[1].T, 2 * res[0].T @ ct))


@jax.custom_jvp
def without_derivative(x):
    return jnp.floor(x)


@without_derivative.defjvp
def refuse(primals, slopes):
    raise TypeError("rows of the batch are not differentiated")


def own_rules(p, rows):
    """A derivative of the author's, a jitted part, and functions of the batch that have none."""
    x = jax.jit(lambda p, x: doubled(jnp.tanh(x @ p[0]), p[1]))(p["layers"], rows["x"])
    shape = jax.ShapeDtypeStruct(rows["x"].shape, jnp.float32)
    seen = jax.pure_callback(lambda x: np.sign(x), shape, rows["x"], vmap_method="sequential")
    steps = lax.while_loop(lambda x: x < 10, lambda x: x + 3, rows["x"].sum())
    return jnp.mean((x + seen + without_derivative(rows["x"])) ** 2) * jnp.sign(steps)


def rematerialised(p, rows):
    x = rows["x"]
    for w in p["layers"]:
        x = jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(x @ w) @ w.T))(x, w)
    return x.mean()


def over_ranks(p, rows):
    """The loss holds a mean over ranks, which has its own transpose."""
    x = rows["x"] @ p["layers"][0]
    return jnp.mean((x - jdp.mean_over_ranks(x.mean(0))) ** 2 @ p["layers"][1])


def learning_inside(p, rows):
    """A gradient step inside of the loss is that of a rank, whatever the stage."""
    grads = jdp.value_and_grad(dense)(p, rows)[1]
    return dense(jax.tree.map(lambda w, g: w - 0.5 * g, p, grads), rows)


def masked(p, rows):
    x = jnp.tanh(rows["x"] @ p["layers"][0] @ p["layers"][1]).mean(1)
    return jnp.sum(x * rows["counts"]) / jnp.maximum(rows["counts"].sum(), 1)


def count(rows):
    return rows["counts"].sum()


ALL = [tied, cast, penalised, normalised, low_rank, looped, own_rules]
ALL += [rematerialised, over_ranks, learning_inside]
