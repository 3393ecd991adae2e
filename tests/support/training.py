"""A small regression problem, and running a step on it on n ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp

NUM_ROWS = 24  # divides by 1, 2, 3, 4 and 8


def ranks(n, **kwargs):
    return jdp.init(devices=jax.devices()[:n], **kwargs)


def params():
    draw = np.random.default_rng(1).normal
    return {
        "w": draw(size=(5, 4)).astype(np.float32),
        "v": draw(size=(4, 1)).astype(np.float32),
        "b": np.zeros(1, np.float32),
    }


def batch(seed=0, num_rows=NUM_ROWS):
    draw = np.random.default_rng(seed).normal
    x = draw(size=(num_rows, 5)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(1, keepdims=True))}


def predict(p, x):
    return jnp.tanh(x @ p["w"]) @ p["v"] + p["b"]


def loss_fn(p, batch):
    return jnp.mean((predict(p, batch["x"]) - batch["y"]) ** 2)


def gradient(state, batch):
    return jax.grad(loss_fn)(state.params, batch)


def masked_loss(p, batch):
    losses = ((predict(p, batch["x"]) - batch["y"]) ** 2).mean(-1)
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


def sgd(**kwargs):
    # Momentum, so that a wrong gradient of one step is seen in the next; never Adam, whose
    # update hides a wrong scale.
    return jdp.replicated(optax.sgd(0.1, momentum=0.9), **kwargs)


def state(tx=None, **kwargs):
    return jdp.TrainState.create(params(), sgd() if tx is None else tx, **kwargs)


def plain_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


def step_of(loss_fn, weight=None, axis_name="data", **options):
    """A step that trains on a loss; the options are those of `jdp.value_and_grad`."""

    @jdp.train_step(weight=weight, axis_name=axis_name)
    def step(state, batch):
        fn = jdp.value_and_grad(loss_fn, axis_name=axis_name, **options)
        loss, grads = fn(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    return step


def train(n, step, make_state=state, num_steps=4, make_batch=batch):
    """Train from scratch on n ranks: `(state, metrics of every step)`, fetched."""
    ranks(n)
    current, reported = make_state(), []
    for i in range(num_steps):
        current, metrics = step(current, make_batch(i))
        reported.append(metrics)
    return fetched((current, reported))


def fetched(tree):
    """The tree as numpy, random keys as the numbers that they are made of."""

    def fetch(x):
        is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(lambda x: x if callable(x) or isinstance(x, str) else fetch(x), tree)


def assert_close(got, want, tolerance=1e-5):
    # By path, since two optimizers built alike are not equal, and so neither are their trees.
    got, want = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (got, want))
    assert got.keys() == want.keys()
    for path, leaf in want.items():
        np.testing.assert_allclose(
            got[path], leaf, rtol=tolerance, atol=tolerance, err_msg=jax.tree_util.keystr(path)
        )
