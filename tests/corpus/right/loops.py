"""Losses with a loop or a branch inside, also of one rank alone."""

import jax
import jax.numpy as jnp
from jax import lax

from corpus.right.corpus import loss, predict


@loss()
def linear_recurrence(p, batch):
    decay = jax.nn.sigmoid(p["b"])

    def combine(a, b):
        return (a[0] * b[0], b[0] * a[1] + b[1])

    drive = batch["sequence"] @ p["w"]
    _, states = lax.associative_scan(combine, (jnp.broadcast_to(decay, drive.shape), drive), axis=1)
    return jnp.mean((states[:, -1] - batch["targets"]) ** 2)


@loss()
def counted_loop(p, batch):
    y = lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y @ p["w"] @ p["w"].T + i * 0.1), batch["rows"])
    return jnp.mean((y @ p["w"] + p["b"] - batch["targets"]) ** 2)


@loss()
def loop_of_this_rank(p, batch):
    """As many rounds as this rank's rows ask for; nothing in it waits for another rank."""
    rounds = jnp.sum(batch["labels"]) % 3
    scale = lax.fori_loop(0, rounds, lambda i, s: s * 0.5, 1.0)
    return scale * jnp.mean((predict(p, batch["rows"]) - batch["targets"]) ** 2)


@loss()
def mapped(p, batch):
    return jnp.mean(lax.map(lambda x: predict(p, x), batch["rows"], batch_size=1) ** 2)


@loss()
def scanned_with_remat(p, batch):
    body = jax.checkpoint(lambda h, x: (jnp.tanh(x @ p["w"] + h * p["b"]), None))
    h, _ = lax.scan(
        body, jnp.zeros((batch["rows"].shape[0], 3)), batch["sequence"].swapaxes(0, 1), unroll=2
    )
    return jnp.mean((h - batch["targets"]) ** 2)


@loss()
def branch_of_this_rank(p, batch):
    """Huber's loss by cond on a rank's own error: the gradient is averaged afterwards."""
    error = jnp.mean(jnp.abs(predict(p, batch["rows"]) - batch["targets"]))
    return lax.cond(error < 0.5, lambda e: e**2, lambda e: e - 0.25, error)


@loss()
def branch_for_each_row(p, batch):
    branches = [jnp.sin, jnp.tanh, jnp.square]

    def choose(label, y):
        return lax.switch(label, branches, y)

    return jnp.mean(jax.vmap(choose)(batch["labels"], predict(p, batch["rows"])))


@loss()
def branch_on_the_device(p, batch):
    branches = {"cpu": lambda x: x * 1.0, "default": lambda x: x + 0.0}
    rows = lax.platform_dependent(
        predict(p, batch["rows"]), cpu=branches["cpu"], default=branches["default"]
    )
    return jnp.mean((rows - batch["targets"]) ** 2)
