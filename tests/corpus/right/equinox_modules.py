"""Layers and transformations of Equinox: in a TrainState, whole, and with a state of their own."""

import equinox as eqx
import jax
import jax.numpy as jnp

import jdp
from corpus.right.corpus import SGD, add, distance, filled


def each_row(module, x, key):
    return jax.vmap(module)(x)


def with_keys(module, x, key):
    keys = jax.random.split(key, x.shape[0])
    return jax.vmap(lambda x, key: module(x, key=key))(x, keys)


def trained(name, make, takes="rows", *, apply=each_row, runs=False):
    """Train `make(key)`: its float arrays are the parameters, the rest is closed over."""
    others = []

    def init():
        params, static = eqx.partition(make(jax.random.key(0)), eqx.is_inexact_array)
        others.append(static)
        return params

    def make_state():
        return jdp.TrainState.create(filled(init), SGD)

    def step(state, batch):
        def loss_fn(params):
            return distance(apply(eqx.combine(params, others[-1]), batch[takes], state.key))

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    add(f"equinox: {name}", step, make_state, runs=runs)


def trained_whole(name, make, takes="rows", *, apply=each_row, runs=False):
    """Train `make(key)` as it is: the functions among its leaves are part of the state."""

    def make_state():
        shapes = eqx.filter_eval_shape(make, jax.random.key(0))
        structs, others = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))
        arrays = filled(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), structs))
        return eqx.combine(arrays, others), SGD.init(arrays)

    def step(state, batch):
        model, opt_state = state

        def loss_fn(model):
            return distance(apply(model, batch[takes], None))

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = SGD.update(grads, opt_state, params)
        return (eqx.apply_updates(model, updates), opt_state), {"loss": loss}

    add(f"equinox: {name}, whole", step, make_state, runs=runs)


def trained_with_state(name, make, *, combine=lambda new: new, runs=False):
    """Train a layer whose statistics live in an `eqx.nn.State`."""
    others = []

    def init():
        model, layer_state = eqx.nn.make_with_state(make)(jax.random.key(0))
        params, static = eqx.partition(model, eqx.is_inexact_array)
        others.append(static)
        return params, layer_state

    def make_state():
        params, layer_state = filled(init)
        return jdp.TrainState.create(params, SGD, model_state=layer_state)

    def step(state, batch):
        def loss_fn(params):
            model = eqx.combine(params, others[-1])
            batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
            out, new = batched(batch["rows"], state.model_state)
            return distance(out), new

        (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads).replace(model_state=combine(new)), {"loss": loss}

    add(f"equinox: {name}", step, make_state, runs=runs)


def mean_statistics(new):
    statistics, counts = eqx.partition(new, eqx.is_inexact_array)
    return eqx.combine(jdp.mean_over_ranks(statistics), counts)


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell | eqx.nn.LSTMCell
    hidden: int = eqx.field(static=True)

    def __call__(self, x):
        start = jnp.zeros(self.hidden)
        carry = (start, start) if isinstance(self.cell, nn.LSTMCell) else start
        return jax.lax.scan(lambda carry, x: (self.cell(x, carry), None), carry, x)[0]


class Positions(eqx.Module):
    linear: eqx.nn.Linear
    rotary: eqx.nn.RotaryPositionalEmbedding

    def __call__(self, x):
        return self.rotary(jax.vmap(self.linear)(x))


def pooled(pool, *shape):
    """A layer before `pool`, which sees its four numbers in one channel of this shape."""
    seen = nn.Lambda(lambda x: x.reshape(1, *shape))
    return lambda key: nn.Sequential([nn.Linear(4, 4, key=key), seen, pool])


def causal_attention(module, x, key):
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))

    def attend(x, key):
        return module(x, x, x, mask=mask, key=key)

    return jax.vmap(attend)(x, jax.random.split(key, x.shape[0]))


def stack(key):
    """Three layers made by one vmap, for a scan over them."""
    return eqx.filter_vmap(lambda key: nn.Linear(4, 4, key=key))(jax.random.split(key, 3))


def scan_layers(layers, x, key):
    arrays, static = eqx.partition(layers, eqx.is_array)

    def forward(x, layer):
        return jnp.tanh(jax.vmap(eqx.combine(layer, static))(x)), None

    return jax.lax.scan(forward, x, arrays)[0]


def tied(key):
    pair = nn.Embedding(7, 4, key=key), nn.Linear(4, 7, use_bias=False, key=key)
    return nn.Shared(pair, lambda pair: pair[1].weight, lambda pair: pair[0].weight)


def predict_tokens(shared, tokens, key):
    embedding, linear = shared()
    return jax.vmap(jax.vmap(lambda token: linear(embedding(token))))(tokens)


nn = eqx.nn
GLOBAL = ("batch", "data")


def linear(key):
    return nn.Linear(4, 3, key=key)


trained("Linear", linear)
trained("Linear of one number", lambda k: nn.Linear(4, "scalar", key=k))
trained("MLP", lambda k: nn.MLP(4, 3, 5, 2, key=k))
trained("Embedding", lambda k: nn.Embedding(7, 3, key=k), "labels")
trained("Shared", tied, "tokens", apply=predict_tokens)
trained("Conv1d", lambda k: nn.Conv1d(5, 3, 2, key=k), "sequence")
trained("Conv2d", lambda k: nn.Conv2d(6, 3, 2, key=k), "image")
trained("Conv3d", lambda k: nn.Conv3d(4, 3, 2, key=k), "volume")
trained("ConvTranspose1d", lambda k: nn.ConvTranspose1d(5, 3, 2, key=k), "sequence")
trained("ConvTranspose2d", lambda k: nn.ConvTranspose2d(6, 3, 2, key=k), "image")
trained("LayerNorm", lambda k: nn.LayerNorm(4))
trained("RMSNorm", lambda k: nn.RMSNorm(4))
trained("GroupNorm", lambda k: nn.GroupNorm(2, 4))
trained("WeightNorm", lambda k: nn.WeightNorm(linear(k)))
trained("PReLU", lambda k: nn.PReLU(0.25))
trained("Dropout", lambda k: nn.Sequential([linear(k), nn.Dropout(0.5)]), apply=with_keys)
trained(
    "MultiheadAttention",
    lambda k: nn.MultiheadAttention(2, 4, dropout_p=0.1, key=k),
    "sequence",
    apply=causal_attention,
)
trained(
    "RotaryPositionalEmbedding",
    lambda k: Positions(nn.Linear(4, 4, key=k), nn.RotaryPositionalEmbedding(4)),
    "sequence",
)
trained("GRUCell", lambda k: Recurrent(nn.GRUCell(4, 3, key=k), 3), "sequence")
trained("LSTMCell", lambda k: Recurrent(nn.LSTMCell(4, 3, key=k), 3), "sequence")
trained("AvgPool1d", pooled(nn.AvgPool1d(2, 2), 4))
trained("MaxPool2d", pooled(nn.MaxPool2d(2), 2, 2))
trained("AvgPool3d", pooled(nn.AvgPool3d((2, 2, 1)), 2, 2, 1))
trained("AdaptiveAvgPool1d", pooled(nn.AdaptiveAvgPool1d(2), 4))
trained("AdaptiveMaxPool2d", pooled(nn.AdaptiveMaxPool2d(1), 2, 2))
trained("scan over layers", stack, apply=scan_layers)
trained("filter_checkpoint", linear, apply=lambda m, x, k: jax.vmap(eqx.filter_checkpoint(m))(x))
trained("filter_jit", linear, apply=lambda m, x, k: jax.vmap(eqx.filter_jit(m))(x))
trained("filter_vmap", linear, apply=lambda m, x, k: eqx.filter_vmap(m)(x))
trained_whole("MLP", lambda k: nn.MLP(4, 3, 5, 2, activation=jnp.tanh, key=k))
trained_whole(
    "Sequential", lambda k: nn.Sequential([nn.Identity(), linear(k), nn.Lambda(jax.nn.relu)])
)
trained_whole("GRUCell", lambda k: Recurrent(nn.GRUCell(4, 3, key=k), 3), "sequence")
trained_whole("Shared", tied, "tokens", apply=predict_tokens)
trained_with_state(
    "BatchNorm of the global batch", lambda k: nn.BatchNorm(4, GLOBAL, mode="batch"), runs=True
)
trained_with_state(
    "BatchNorm with mean statistics",
    lambda k: nn.BatchNorm(4, "batch", mode="batch"),
    combine=mean_statistics,
)
trained_with_state("SpectralNorm", lambda k: nn.SpectralNorm(linear(k), "weight", key=k))
