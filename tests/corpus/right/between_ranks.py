"""Losses in which rows of different ranks meet: each counts the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from corpus.right.corpus import loss, loss_fn, mean_error, params, predict


def towers():
    return {**params(), "v": params()["w"][::-1].copy(), "log_temperature": np.float32(0.5)}


def both(p, batch):
    def normalised(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    image = normalised(batch["rows"] @ p["w"] + p["b"])
    return image, normalised(batch["sequence"].mean(1) @ p["v"])


@loss(towers, uniform=False)
def clip(p, batch):
    """CLIP: every image against the texts of all ranks, and the other way round."""
    image, text = both(p, batch)
    images, texts = lax.all_gather((image, text), "data", tiled=True)
    right = lax.axis_index("data") * image.shape[0] + jnp.arange(image.shape[0])
    temperature = jnp.exp(p["log_temperature"])
    cross_entropy = optax.losses.softmax_cross_entropy_with_integer_labels
    to_text = cross_entropy(temperature * image @ texts.T, right)
    to_image = cross_entropy(temperature * text @ images.T, right)
    return jnp.mean(to_text + to_image) / 2


@loss(towers, uniform=False, runs=True)
def clip_on_every_rank(p, batch):
    """The same loss, which each rank takes of all pairs: uniform, with a uniform temperature."""
    images, texts = lax.all_gather(both(p, batch), "data", tiled=True)
    scores = jnp.exp(p["log_temperature"]) * images @ texts.T
    cross_entropy = optax.losses.softmax_cross_entropy_with_integer_labels
    right = jnp.arange(scores.shape[0])
    return jnp.mean(cross_entropy(scores, right) + cross_entropy(scores.T, right)) / 2


@loss(towers, uniform=False, runs=True)
def sigmoid_pairs(p, batch):
    """SigLIP: texts travel round the ranks, and each rank adds up its images' losses."""
    image, text = both(p, batch)
    n, size = lax.axis_size("data"), image.shape[0]
    ring = [(rank, (rank + 1) % n) for rank in range(n)]
    total = 0.0
    for hop in range(n):
        signs = 2 * jnp.eye(size) - 1 if hop == 0 else -jnp.ones((size, size))
        logits = jnp.exp(p["log_temperature"]) * image @ text.T
        total += -jnp.sum(jax.nn.log_sigmoid(signs * logits)) / size
        text = lax.ppermute(text, "data", ring)
    return total


@loss(towers, uniform=False)
def negatives_of_a_queue(p, batch):
    """MoCo: negatives are the rows of all ranks, without a gradient."""
    mine, other = both(p, batch)
    keys = lax.stop_gradient(lax.all_gather(other, "data", tiled=True))
    right = lax.axis_index("data") * mine.shape[0] + jnp.arange(mine.shape[0])
    scores = mine @ keys.T * jnp.exp(p["log_temperature"]) + jnp.sum(p["v"]) * 0.1
    return jnp.mean(optax.losses.softmax_cross_entropy_with_integer_labels(scores, right))


@loss(towers, runs=True)
def barlow_twins(p, batch):
    """The correlation of the global batch: psum of what each rank's rows add to it."""
    one, two = both(p, batch)
    n = lax.psum(one.shape[0], "data")
    correlation = lax.psum(one.T @ two, "data") / n * jnp.exp(p["log_temperature"])
    return jnp.sum((correlation - jnp.eye(3)) ** 2)


@loss()
def mean_of_all_rows(p, batch):
    rows = jnp.sum((predict(p, batch["rows"]) - batch["targets"]) ** 2, axis=-1)
    return lax.psum(rows.sum(), "data") / lax.psum(rows.size, "data")


@loss(runs=True)
def pmean_of_the_loss(p, batch):
    return lax.pmean(loss_fn(p, batch), "data")


@loss()
def standardised_by_all_ranks(p, batch):
    """Targets whitened with the mean and deviation of the global batch."""
    targets = batch["targets"]
    mean = lax.pmean(targets.mean(0), "data")
    variance = lax.pmean(((targets - mean) ** 2).mean(0), "data")
    return jnp.mean((predict(p, batch["rows"]) - (targets - mean) / jnp.sqrt(variance)) ** 2)


@loss()
def load_balanced(p, batch):
    """A mixture of experts: top-k routing, with the balance loss of the global batch."""
    gates = jax.nn.softmax(batch["rows"] @ p["w"])
    weights, chosen = lax.top_k(gates, 2)
    used = lax.pmean(jax.nn.one_hot(chosen[:, 0], 3).mean(0), "data")
    outputs = batch["rows"][:, :1] * p["b"]
    mixed = jnp.take_along_axis(outputs, chosen, axis=1) * weights
    return jnp.mean((mixed.sum(1) - batch["targets"][:, 0]) ** 2) + 0.1 * jnp.sum(
        used * gates.mean(0)
    )


@loss(weight=lambda batch: batch["counts"].sum(), runs=True)
def rows_that_count(p, batch):
    rows = jnp.mean((predict(p, batch["rows"]) - batch["targets"]) ** 2, axis=-1)
    return jnp.sum(rows * batch["counts"]) / jnp.maximum(jnp.sum(batch["counts"]), 1)


@loss(uniform=False)
def experts_on_other_ranks(p, batch):
    """Rows go to the ranks of their experts and come back."""
    n = lax.axis_size("data")
    there = lax.all_to_all(jnp.tile(batch["rows"], (n, 1, 1)), "data", 0, 0)
    back = lax.all_to_all(predict(p, there), "data", 0, 0)
    return mean_error(back.mean(0), batch)


@loss(uniform=False, runs=True)
def ring_attention(p, batch):
    """Every row attends to the rows of all ranks, whose values travel round in a loop."""
    n = lax.axis_size("data")
    query = predict(p, batch["rows"])

    def hop(_, carry):
        values, weighted, weights = carry
        scores = jnp.exp(query @ values.T)
        values = lax.ppermute(values, "data", [(rank, (rank + 1) % n) for rank in range(n)])
        return values, weighted + scores @ carry[0], weights + scores.sum(1)

    start = query, jnp.zeros_like(query), jnp.zeros(query.shape[0])
    _, weighted, weights = lax.fori_loop(0, n, hop, start)
    return mean_error(weighted / weights[:, None], batch)


@loss(uniform=False)
def scattered_sums(p, batch):
    y = predict(p, batch["rows"])
    shares = lax.psum_scatter(jnp.tile(y.sum(0), (lax.axis_size("data"), 1)), "data")
    return mean_error(y - shares, batch)
