"""Losses: those of Optax, and those that compare the rows of all ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from optax import losses

from right_programs.corpus import add_loss, loss, params, predict


def of_targets(loss):
    return lambda p, batch: jnp.mean(loss(predict(p, batch["rows"]), batch["targets"]))


def of_labels(loss):
    return lambda p, batch: jnp.mean(loss(predict(p, batch["rows"]), batch["labels"]))


def of_classes(loss):
    def one_hot(batch):
        return jax.nn.one_hot(batch["labels"], 3)

    return lambda p, batch: jnp.mean(loss(predict(p, batch["rows"]), one_hot(batch)))


def of_signs(loss):
    return lambda p, batch: jnp.mean(loss(predict(p, batch["rows"]), jnp.sign(batch["targets"])))


def of_distributions(loss):
    def mean_loss(p, batch):
        return jnp.mean(
            loss(jax.nn.log_softmax(predict(p, batch["rows"])), jax.nn.softmax(batch["targets"]))
        )

    return mean_loss


@loss()
def ctc(p, batch):
    logits = batch["sequence"] @ p["w"] + p["b"]
    no_padding = jnp.zeros(logits.shape[:2])
    labels = jnp.clip(batch["tokens"][:, :2], 1, 2)
    return jnp.mean(optax.ctc_loss(logits, no_padding, labels, jnp.zeros(labels.shape)))


@loss()
def triplet(p, batch):
    anchor, positive = predict(p, batch["rows"]), predict(p, batch["rows"] + 0.1)
    return jnp.mean(losses.triplet_margin_loss(anchor, positive, predict(p, -batch["rows"])))


@loss()
def ntxent(p, batch):
    pairs = jnp.concatenate([predict(p, batch["rows"]), predict(p, batch["rows"] + 0.1)])
    n = batch["rows"].shape[0]
    return losses.ntxent(pairs, jnp.tile(jnp.arange(n), 2))


@loss()
def ranking(p, batch):
    return losses.ranking_softmax_loss(
        predict(p, batch["rows"]), jnp.abs(batch["targets"]), reduce_fn=jnp.mean
    )


@loss()
def dice(p, batch):
    return jnp.mean(
        losses.multiclass_generalized_dice_loss(
            predict(p, batch["rows"])[:, None], jax.nn.one_hot(batch["labels"], 3)[:, None]
        )
    )


@loss()
def fenchel_young(p, batch):
    loss = losses.make_fenchel_young_loss(jax.nn.logsumexp)
    rows = jax.vmap(loss)(predict(p, batch["rows"]), jax.nn.softmax(batch["targets"]))
    return jnp.mean(rows)


@loss()
def smoothed(p, batch):
    labels = losses.smooth_labels(jax.nn.one_hot(batch["labels"], 3), 0.1)
    return jnp.mean(losses.softmax_cross_entropy(predict(p, batch["rows"]), labels))


@loss()
def evidence(p, batch):
    """The loss of a variational model, with a draw of this rank's own rows."""
    mean, log_std = predict(p, batch["rows"]), p["b"]
    noise = jnp.sin(100 * batch["targets"])
    drawn = mean + jnp.exp(log_std) * noise
    divergence = jnp.mean(jnp.exp(2 * log_std) + mean**2 - 2 * log_std)
    return jnp.mean((drawn - batch["targets"]) ** 2) + 0.1 * divergence


@loss()
def gaussian(p, batch):
    log_density = jax.scipy.stats.norm.logpdf(
        batch["targets"], predict(p, batch["rows"]), jnp.exp(p["b"])
    )
    return -jnp.mean(log_density)


@loss()
def l2_penalty(p, batch):
    penalty = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p))
    return of_targets(losses.squared_error)(p, batch) + 0.01 * penalty


@loss()
def noisy_labels(p, batch):
    """Drops the largest of this rank's losses, by sort."""
    rows = jnp.mean((predict(p, batch["rows"]) - batch["targets"]) ** 2, axis=-1)
    return jnp.mean(jnp.sort(rows)[:-1])


# Rows of all ranks are compared: the mean over ranks of these losses is that of the whole batch.


def towers():
    return {**params(), "v": params()["w"][::-1].copy(), "log_temperature": np.float32(0.5)}


def both(p, batch):
    def normalised(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    image = normalised(batch["rows"] @ p["w"] + p["b"])
    return image, normalised(batch["sequence"].mean(1) @ p["v"])


@loss(towers)
def clip(p, batch):
    """CLIP: every image against the texts of all ranks, and the other way round."""
    image, text = both(p, batch)
    images, texts = lax.all_gather((image, text), "data", tiled=True)
    right = lax.axis_index("data") * image.shape[0] + jnp.arange(image.shape[0])
    temperature = jnp.exp(p["log_temperature"])
    cross_entropy = losses.softmax_cross_entropy_with_integer_labels
    to_text = cross_entropy(temperature * image @ texts.T, right)
    to_image = cross_entropy(temperature * text @ images.T, right)
    return jnp.mean(to_text + to_image) / 2


@loss(towers, runs=True)
def clip_on_every_rank(p, batch):
    """The same loss, which each rank takes of all pairs: uniform, with a uniform temperature."""
    images, texts = lax.all_gather(both(p, batch), "data", tiled=True)
    scores = jnp.exp(p["log_temperature"]) * images @ texts.T
    cross_entropy = losses.softmax_cross_entropy_with_integer_labels
    right = jnp.arange(scores.shape[0])
    return jnp.mean(cross_entropy(scores, right) + cross_entropy(scores.T, right)) / 2


@loss(towers, runs=True)
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


@loss(towers)
def negatives_of_a_queue(p, batch):
    """MoCo: negatives are the rows of all ranks, without a gradient."""
    mine, other = both(p, batch)
    keys = lax.stop_gradient(lax.all_gather(other, "data", tiled=True))
    right = lax.axis_index("data") * mine.shape[0] + jnp.arange(mine.shape[0])
    scores = mine @ keys.T * jnp.exp(p["log_temperature"]) + jnp.sum(p["v"]) * 0.1
    return jnp.mean(losses.softmax_cross_entropy_with_integer_labels(scores, right))


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
    return lax.pmean(of_targets(losses.squared_error)(p, batch), "data")


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


add_loss("squared_error", of_targets(losses.squared_error))
add_loss("l2_loss", of_targets(losses.l2_loss))
add_loss("huber_loss", of_targets(losses.huber_loss))
add_loss("log_cosh", of_targets(losses.log_cosh))
add_loss("cosine_distance", of_targets(losses.cosine_distance))
add_loss("kl_divergence", of_distributions(losses.kl_divergence))
add_loss("generalized_kl_divergence", of_distributions(losses.generalized_kl_divergence))
add_loss("softmax_cross_entropy", of_classes(losses.softmax_cross_entropy))
add_loss("safe_softmax_cross_entropy", of_classes(losses.safe_softmax_cross_entropy))
add_loss(
    "softmax_cross_entropy_with_integer_labels",
    of_labels(losses.softmax_cross_entropy_with_integer_labels),
)
add_loss("poly_loss_cross_entropy", of_classes(losses.poly_loss_cross_entropy))
add_loss("sigmoid_binary_cross_entropy", of_classes(losses.sigmoid_binary_cross_entropy))
add_loss("sigmoid_focal_loss", of_classes(losses.sigmoid_focal_loss))
add_loss("hinge_loss", of_signs(losses.hinge_loss))
add_loss("perceptron_loss", of_signs(losses.perceptron_loss))
add_loss("sparsemax_loss", of_signs(losses.sparsemax_loss))
add_loss("multiclass_hinge_loss", of_labels(losses.multiclass_hinge_loss))
add_loss("multiclass_perceptron_loss", of_labels(losses.multiclass_perceptron_loss))
add_loss("multiclass_sparsemax_loss", of_labels(losses.multiclass_sparsemax_loss))
