"""Layers and lifted transformations of Flax linen."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import jdp
from corpus.right.corpus import SGD, add, batch, distance, filled

EXAMPLE = batch()


def trained(name, module, *takes, combine=lambda stats: stats, runs=False, **call):
    """Train `module`, which takes these keys of the batch, with whatever else it carries."""
    takes = takes or ("rows",)

    def init():
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        return module.init(keys, *(EXAMPLE[key] for key in takes), **call)

    def make_state():
        variables = filled(init)
        return jdp.TrainState.create(variables.pop("params"), SGD, model_state=variables)

    def step(state, batch):
        def loss_fn(params):
            out, new = module.apply(
                {"params": params, **state.model_state},
                *(batch[key] for key in takes),
                rngs={"dropout": state.key},
                mutable=list(state.model_state),
                **call,
            )
            return distance(out), new

        (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads).replace(model_state=combine(new)), {"loss": loss}

    add(f"linen: {name}", step, make_state, runs=runs)


class Steps(nn.Module):
    """Two steps of a recurrent cell."""

    cell: nn.Module
    takes: str = "sequence"

    def __call__(self, x):
        carry = self.cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
        for t in range(2):
            carry, out = self.cell(carry, x[:, t])
        return carry, out


class Block(nn.Module):
    """A residual layer with the signature that nn.scan wants."""

    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.tanh(nn.Dense(4)(x)), None


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(4)(x)


class Function(nn.Module):
    """A module of one function `(module, *args)`, written where it is used."""

    function: Callable[..., Any]

    @nn.compact
    def __call__(self, *args):
        return self.function(self, *args)


def pooled(module, x):
    x = nn.relu(nn.Conv(3, (3, 3))(x))
    x = nn.max_pool(x, (2, 2), strides=(2, 2)) + nn.avg_pool(x, (2, 2), strides=(2, 2))
    return nn.Dense(2)(x.mean((1, 2)))


def tied_embedding(module, tokens):
    embed = nn.Embed(7, 4)
    return embed.attend(nn.Dense(4)(embed(tokens)))


def transformer(module, tokens):
    x = nn.Embed(7, 4)(tokens) + module.param("position", nn.initializers.normal(), (5, 4))
    mask = nn.make_causal_mask(tokens)
    attention = nn.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=False)
    x = x + attention(nn.LayerNorm()(x), mask=mask)
    x = x + nn.Dense(4)(nn.gelu(nn.Dense(8)(nn.LayerNorm()(x))))
    return nn.Dense(7)(nn.LayerNorm()(x))


def uniform_cond(module, x):
    gate = module.param("gate", nn.initializers.ones, ())
    small, large = nn.Dense(4, name="small"), nn.Dense(4, name="large")
    # Both branches make their parameters when the module is initialised.
    if module.is_initializing():
        return small(x) + large(x)
    predicate = jax.lax.stop_gradient(gate) > 0
    return gate * nn.cond(predicate, lambda m, x: small(x), lambda m, x: large(x), module, x)


def sown_penalty(module, x):
    y = nn.Dense(4)(x)
    module.sow("intermediates", "activity", jnp.mean(y**2))
    return y


def custom_gradient(module, x):
    dense = nn.Dense(4)
    clipped = nn.custom_vjp(
        lambda m, x: m(x),
        forward_fn=lambda m, x: nn.vjp(lambda m, x: m(x), m, x),
        backward_fn=lambda pullback, g: pullback(jnp.clip(g, -0.01, 0.01)),
    )
    return clipped(dense, x)


def unit_norm_kernel(module, x):
    def normalise(tree):
        return jax.tree.map(lambda p: p / (1e-3 + jnp.linalg.norm(p)), tree)

    return nn.map_variables(nn.Dense, "params", normalise, init=True)(4)(x)


BATCH_NORM = functools.partial(nn.BatchNorm, use_running_average=False)
SCANNED = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
SAVES_DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
HEADS = dict(num_heads=2, dropout_rate=0.1, deterministic=False)

trained("Dense", nn.Dense(3))
trained("Dense in bfloat16", nn.Dense(3, dtype=jnp.bfloat16))
trained("Dense with bfloat16 parameters", nn.Dense(3, param_dtype=jnp.bfloat16))
trained("DenseGeneral", nn.DenseGeneral((2, 3), axis=(-2, -1)), "sequence")
trained("Einsum", nn.Einsum((4, 3, 2), "...a,abc->...bc"))
trained("Embed", nn.Embed(7, 3), "tokens")
trained("Embed tied to the output", Function(tied_embedding), "tokens")
trained("Conv", nn.Conv(3, (2, 2), strides=2), "image")
trained(
    "Conv of groups, dilated", nn.Conv(4, (2, 2), feature_group_count=2, kernel_dilation=2), "image"
)
trained("Conv, circular", nn.Conv(3, (3,), padding="CIRCULAR"), "sequence")
trained("Conv in three dims", nn.Conv(3, (2, 2, 2)), "volume")
trained("ConvLocal", nn.ConvLocal(3, (2, 2)), "image")
trained("ConvTranspose", nn.ConvTranspose(3, (2, 2), strides=(2, 2)), "image")
trained("pooling", Function(pooled), "image")
trained("LayerNorm", nn.LayerNorm())
trained("RMSNorm", nn.RMSNorm())
trained("GroupNorm", nn.GroupNorm(2))
trained("InstanceNorm", nn.InstanceNorm(), "image")
trained("WeightNorm", nn.WeightNorm(nn.Dense(3)))
trained("SpectralNorm", nn.SpectralNorm(nn.Dense(3)), update_stats=True)
trained("BatchNorm of the global batch", BATCH_NORM(axis_name="data"))
trained("BatchNorm, slow variance", BATCH_NORM(axis_name="data", use_fast_variance=False))
trained("BatchNorm with mean statistics", BATCH_NORM(), combine=jdp.mean_over_ranks)
trained(
    "BatchNorm of pairs of ranks",
    BATCH_NORM(axis_name="data", axis_index_groups=((0, 1), (2, 3))),
    combine=jdp.mean_over_ranks,
)
trained("BatchNorm with running statistics", nn.BatchNorm(use_running_average=True))
trained("PReLU", nn.PReLU())
trained("Sequential", nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(2)]))
trained("Dropout", nn.Sequential([nn.Dense(4), nn.Dropout(0.5, deterministic=False)]))
trained(
    "MultiHeadDotProductAttention", nn.MultiHeadDotProductAttention(**HEADS), "sequence", "sequence"
)
trained("MultiHeadAttention, normalised", nn.MultiHeadAttention(2, normalize_qk=True), "sequence")
trained("a transformer with dropout", Function(transformer), "tokens")
trained("SimpleCell", Steps(nn.SimpleCell(3)), "sequence")
trained("LSTMCell", Steps(nn.LSTMCell(3)), "sequence")
trained("OptimizedLSTMCell", Steps(nn.OptimizedLSTMCell(3)), "sequence")
trained("GRUCell", Steps(nn.GRUCell(3)), "sequence")
trained("MGUCell", Steps(nn.MGUCell(3)), "sequence")
trained("ConvLSTMCell", Steps(nn.ConvLSTMCell(2, (2, 2))), "volume")
trained("RNN", nn.RNN(nn.LSTMCell(3), return_carry=True), "sequence")
trained("RNN, reversed", nn.RNN(nn.SimpleCell(3), reverse=True, keep_order=True), "sequence")
trained(
    "Bidirectional",
    nn.Bidirectional(nn.RNN(nn.SimpleCell(2)), nn.RNN(nn.SimpleCell(2))),
    "sequence",
)
trained("scan over layers", SCANNED(), runs=True)
trained("remat", nn.remat(Block)())
trained("remat with a policy", nn.remat(Block, policy=SAVES_DOTS)())
trained("remat_scan", nn.remat_scan(Residual, lengths=(2, 2))())
trained(
    "vmap over models",
    nn.vmap(nn.Dense, {"params": 0}, {"params": True}, in_axes=None, axis_size=2)(3),
)
trained("jit", nn.jit(nn.Dense)(3))
trained("cond on a parameter", Function(uniform_cond))
trained("sow", Function(sown_penalty))
trained("custom_vjp", Function(custom_gradient))
trained("map_variables", Function(unit_norm_kernel))
trained(
    "parameters with partitioning",
    nn.Dense(3, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, None))),
)
