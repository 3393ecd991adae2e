"""Losses of the predictions through functions of arrays, sorted, scattered, transformed."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

from right_programs.corpus import add_loss, predict


def loss_of_predictions(function):
    """Note the training with a function of `(predictions, batch)`."""

    def loss_fn(p, batch):
        return jnp.mean(jnp.abs(function(predict(p, batch["rows"]), batch)))

    add_loss(function.__name__.replace("_", " "), loss_fn)
    return function


@loss_of_predictions
def spectrum(y, batch):
    return jnp.abs(jnp.fft.rfft(y + batch["targets"], axis=-1))


@loss_of_predictions
def top(y, batch):
    return lax.top_k(y + batch["targets"], 2)[0]


@loss_of_predictions
def sorted_with_labels(y, batch):
    return lax.sort((y[:, 0], y[:, 1]), num_keys=1)[1]


@loss_of_predictions
def ranked(y, batch):
    return jnp.take_along_axis(batch["targets"], jnp.argsort(y, axis=-1), axis=-1) * y


@loss_of_predictions
def summed_by_class(y, batch):
    return jax.ops.segment_sum(y, batch["labels"], num_segments=3)


@loss_of_predictions
def scattered(y, batch):
    return jnp.zeros((3, 3)).at[batch["labels"]].add(y).at[0].multiply(0.5)


@loss_of_predictions
def sliced(y, batch):
    return lax.dynamic_update_slice(
        y, lax.dynamic_slice(y, (batch["labels"][0] % 2, 0), (1, 3)), (0, 0)
    )


@loss_of_predictions
def convolved(y, batch):
    return jax.vmap(lambda a, b: jax.scipy.signal.convolve(a, b))(y, batch["targets"])


@loss_of_predictions
def interpolated(y, batch):
    return jax.scipy.ndimage.map_coordinates(batch["targets"], [y[:, 0] + 1, y[:, 1] + 1], order=1)


@loss_of_predictions
def special_functions(y, batch):
    y = jnp.abs(y) + 0.5
    return (
        special.gammaln(y) + special.betainc(2.0, 1.0, y / 4) + special.digamma(y) + special.i0e(y)
    )


@loss_of_predictions
def cumulative(y, batch):
    return jnp.cumsum(y, 0) + jnp.cumprod(y, 1) + lax.cummax(y, 0) + lax.cumlogsumexp(y)


@loss_of_predictions
def windowed(y, batch):
    return lax.reduce_window(y, -jnp.inf, lax.max, (1, 2), (1, 1), "VALID")


@loss_of_predictions
def resized(y, batch):
    return jax.image.resize(y, (y.shape[0], 6), "linear")


@loss_of_predictions
def einsum(y, batch):
    return jnp.einsum("ri,rj,rst->st", y, batch["targets"], batch["sequence"])


@loss_of_predictions
def masked_softmax(y, batch):
    return jax.nn.softmax(y, where=batch["targets"] > -2, axis=-1)


@loss_of_predictions
def histogram_of_rows(y, batch):
    return jnp.histogram(lax.stop_gradient(y), bins=3)[0] * jnp.mean(y)


@loss_of_predictions
def through_a_callback(y, batch):
    """A pure function of numpy on this rank's rows, without a gradient."""
    shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
    weights = jax.pure_callback(lambda x: np.exp(-np.abs(x)), shape, lax.stop_gradient(y))
    return y * weights


@loss_of_predictions
def printed(y, batch):
    jax.debug.callback(lambda x: None, y.mean())
    return y
