"""Layers and transformations of Flax nnx, functional and with nnx.Optimizer."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jdp
from corpus.right.corpus import SGD, add, batch, distance, filled

EXAMPLE = batch()


def call(module, x):
    return module(x)


def trained(name, make, takes="rows", *, apply=call, combine=lambda rest: rest, runs=False):
    """Train `make(rngs)` by split and merge; what is not a parameter is carried along."""
    graphs = []

    def init():
        graph, *parts = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)
        graphs.append(graph)
        return parts

    def make_state():
        params, rest = filled(init)
        return jdp.TrainState.create(params, SGD, model_state=rest)

    def step(state, batch):
        def loss_fn(params):
            # Copied, since a Variable may change only under the transformation that made it.
            module = nnx.merge(graphs[-1], params, state.model_state, copy=True)
            out = apply(module, batch[takes])
            return distance(out), nnx.state(module, nnx.Not(nnx.Param))

        (loss, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads).replace(model_state=combine(rest)), {"loss": loss}

    add(f"nnx: {name}", step, make_state, runs=runs)


def stateful(name, make, *, wrt=nnx.Param, apply=call, tx=SGD, optimizer=nnx.Optimizer, runs=False):
    """Train `make(rngs)` with an optimizer object, as the Flax guide does."""
    graphs = []

    def init():
        module = make(nnx.Rngs(0))
        graph, state = nnx.split((module, optimizer(module, tx, wrt=wrt)))
        graphs.append(graph)
        return state

    def step(state, batch):
        module, opt = nnx.merge(graphs[-1], state)

        def loss_fn(module):
            return distance(apply(module, batch["rows"]))

        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, wrt))(module)
        opt.update(*([grads] if optimizer is nnx.ModelAndOptimizer else [module, grads]))
        return nnx.state((module, opt)), {"loss": loss}

    make_state = functools.partial(filled, init) if runs else init
    add(f"nnx: {name}", step, make_state, runs=runs)


def means(rest):
    """Average the statistics of this rank; counts and keys are the same everywhere."""
    return nnx.map_state(
        lambda path, x: (
            x.replace(jdp.mean_over_ranks(x[...])) if isinstance(x, nnx.BatchStat) else x
        ),
        rest,
    )


def two_steps(cell, x):
    carry = cell.initialize_carry(x[:, 0].shape, nnx.Rngs(0))
    for t in range(2):
        carry, out = cell(carry, x[:, t])
    return carry, out


class Tower(nnx.Module):
    def __init__(self, rngs, num_layers=3):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(num_layers)])
        self.scale = nnx.Param(jnp.ones(4))

    def __call__(self, x):
        for layer in self.layers:
            x = x + nnx.relu(layer(x)) * self.scale
        return x


class Scanned(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def create(rngs):
            return nnx.Linear(4, 4, rngs=rngs)

        self.layers = create(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(layer, x):
            return jnp.tanh(layer(x))

        return forward(self.layers, x)


class Remat(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 3, rngs=rngs)

    @nnx.remat
    def __call__(self, x):
        return jnp.tanh(self.inner(x))


class Counting(nnx.Module):
    """Counts its calls in a variable of its own."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 3, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.linear(x)


class Adapted(nnx.Module):
    """A frozen layer with a low-rank correction."""

    def __init__(self, rngs):
        self.linear = nnx.LoRALinear(4, 3, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


def with_dropout(rngs):
    return nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))


def attention(rngs):
    return nnx.MultiHeadAttention(
        2, 4, 4, dropout_rate=0.1, deterministic=False, decode=False, rngs=rngs
    )


def linen_module(rngs):
    return nnx.bridge.ToNNX(nn.Dense(3), rngs=rngs).lazy_init(EXAMPLE["rows"])


trained("Linear", lambda r: nnx.Linear(4, 3, rngs=r))
trained("LinearGeneral", lambda r: nnx.LinearGeneral((5, 4), 3, axis=(-2, -1), rngs=r), "sequence")
trained("Einsum", lambda r: nnx.Einsum("ab,bc->ac", (4, 3), (3,), rngs=r))
trained("Embed", lambda r: nnx.Embed(7, 3, rngs=r), "tokens")
trained("Conv", lambda r: nnx.Conv(2, 3, (2, 2), rngs=r), "image")
trained("ConvTranspose", lambda r: nnx.ConvTranspose(2, 3, (2, 2), strides=2, rngs=r), "image")
trained("LayerNorm", lambda r: nnx.LayerNorm(4, rngs=r))
trained("RMSNorm", lambda r: nnx.RMSNorm(4, rngs=r))
trained("GroupNorm", lambda r: nnx.GroupNorm(4, 2, rngs=r))
trained("InstanceNorm", lambda r: nnx.InstanceNorm(2, rngs=r), "image")
trained("WeightNorm", lambda r: nnx.WeightNorm(nnx.Linear(4, 3, rngs=r), rngs=r))
trained("SpectralNorm", lambda r: nnx.SpectralNorm(nnx.Linear(4, 3, rngs=r), rngs=r))
trained(
    "BatchNorm of the global batch", lambda r: nnx.BatchNorm(4, axis_name="data", rngs=r), runs=True
)
trained("BatchNorm with mean statistics", lambda r: nnx.BatchNorm(4, rngs=r), combine=means)
trained("PReLU", lambda r: nnx.PReLU())
trained("Dropout of the module's own key", with_dropout)
trained("MultiHeadAttention", attention, "sequence")
trained("LSTMCell", lambda r: nnx.LSTMCell(4, 3, rngs=r), "sequence", apply=two_steps)
trained(
    "OptimizedLSTMCell", lambda r: nnx.OptimizedLSTMCell(4, 3, rngs=r), "sequence", apply=two_steps
)
trained("GRUCell", lambda r: nnx.GRUCell(4, 3, rngs=r), "sequence", apply=two_steps)
trained("SimpleCell", lambda r: nnx.SimpleCell(4, 3, rngs=r), "sequence", apply=two_steps)
trained("RNN", lambda r: nnx.RNN(nnx.SimpleCell(4, 3, rngs=r)), "sequence")
trained(
    "Bidirectional",
    lambda r: nnx.Bidirectional(
        nnx.RNN(nnx.SimpleCell(4, 3, rngs=r)), nnx.RNN(nnx.SimpleCell(4, 3, rngs=r)), rngs=r
    ),
    "sequence",
)
trained("LoRA with all parameters", lambda r: nnx.LoRA(4, 2, 3, rngs=r))
trained("a list of layers", Tower)
trained("scan and vmap over layers", Scanned)
trained("remat", Remat)
trained("a counter", Counting)
trained("a linen module", linen_module)
stateful("Optimizer", Tower)
stateful(
    "Optimizer with Adam and clipping",
    Tower,
    tx=jdp.replicated(optax.chain(optax.clip(1.0), optax.adam(1e-3))),
)
stateful("Optimizer and Dropout", with_dropout)
stateful("Optimizer of LoRA parameters", Adapted, wrt=nnx.LoRAParam)
stateful("ModelAndOptimizer", Tower, optimizer=nnx.ModelAndOptimizer)
stateful("jit inside of the step", Tower, apply=lambda module, x: nnx.jit(call)(module, x))
