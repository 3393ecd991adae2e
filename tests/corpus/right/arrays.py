"""Losses of the predictions through functions of arrays, sorted, scattered, transformed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental import sparse
from jax.experimental.jet import jet
from jax.scipy import special

from corpus.right.corpus import add_loss, predict


def loss_of_predictions(function):
    """Record the training with a function of `(predictions, batch)`."""

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


@loss_of_predictions
def dot_product_attention(y, batch):
    heads = y[None, :, None] + batch["sequence"][None, :, :1, :3]
    return jax.nn.dot_product_attention(heads, heads, heads, is_causal=True)


@loss_of_predictions
def ragged_experts(y, batch):
    order, sizes = jnp.argsort(batch["labels"]), jnp.bincount(batch["labels"], length=3)
    return lax.ragged_dot(y[order], jnp.ones((3, 3, 2)), sizes.astype(jnp.int32))


@loss_of_predictions
def sparse_matrix(y, batch):
    links = jnp.stack([batch["labels"], jnp.arange(y.shape[0])], axis=1)
    return sparse.BCOO((jnp.abs(y[:, 0]), links), shape=(3, y.shape[0])) @ y


@loss_of_predictions
def approximately_largest(y, batch):
    return lax.approx_max_k(y, 2)[0]


@loss_of_predictions
def reduced_by_own_functions(y, batch):
    constant = lax.stop_gradient(y)
    norms = lax.reduce(constant, np.float32(0), lambda a, b: a + b * b, (0,))
    window = (1, 2), (1, 1), "VALID"
    sums = lax.reduce_window(constant, np.float32(0), lambda a, b: a + b / 2, *window)
    return y + norms + sums.sum()


@loss_of_predictions
def scattered_by_other_functions(y, batch):
    first = batch["labels"][0]
    wave = lax.stop_gradient(y).at[0].apply(jnp.sin)
    return wave + y.at[first].max(0.1) + y.at[0].min(0.2) + y.at[1].multiply(2)


@loss_of_predictions
def drawn_with_a_constant_key(y, batch):
    keys = jax.random.split(jax.random.key(0), 5)
    return (
        y * jax.random.gamma(keys[0], 2.0, (3,))
        + jax.random.poisson(keys[1], 2.0, (3,))
        + jax.random.categorical(keys[2], y)[:, None]
        + jax.random.binomial(keys[3], 5, 0.5, (3,))
        + jax.random.orthogonal(keys[4], 3)[0]
    )


@loss_of_predictions
def reparametrised_gamma(y, batch):
    return jax.random.gamma(jax.random.key(0), jnp.abs(y) + 1)


@loss_of_predictions
def perturbed_choice(y, batch):
    choose = optax.perturbations.make_perturbed_fun(
        lambda y: jax.nn.one_hot(jnp.argmax(y, axis=-1), 3), num_samples=4, sigma=0.5
    )
    return choose(jax.random.key(0), y)


@loss_of_predictions
def taylor_series(y, batch):
    value, (slope,) = jet(jnp.tanh, (y,), ((jnp.ones_like(y),),))
    return value + slope


@jax.custom_vjp
def doubled_by_a_kernel(x):
    def kernel(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...]

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)


doubled_by_a_kernel.defvjp(lambda x: (doubled_by_a_kernel(x), None), lambda _, g: (2 * g,))


@loss_of_predictions
def pallas_kernel(y, batch):
    return doubled_by_a_kernel(y)


@loss_of_predictions
def pallas_kernel_with_a_grid(y, batch):
    """Blocks of the columns are added up, the first one into zeros."""

    def kernel(x_ref, out_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            out_ref[...] = jnp.zeros_like(out_ref)

        out_ref[...] += x_ref[...]

    rows = y.shape[0]
    column = pl.BlockSpec((rows, 1), lambda i: (0, i))
    sums = pl.pallas_call(
        kernel,
        grid=(3,),
        in_specs=[column],
        out_specs=pl.BlockSpec((rows, 1), lambda i: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, 1), y.dtype),
        interpret=True,
    )
    return y + sums(lax.stop_gradient(y))
