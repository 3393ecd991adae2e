"""Losses of one rank's rows: those of Optax, and some by hand."""

import jax
import jax.numpy as jnp
import optax
from optax import losses

from corpus.right.corpus import add_loss, loss, predict


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
