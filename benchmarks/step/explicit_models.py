"""The losses of models.py for JAX's explicit sharding, with weights of type `P(reduced={"data"})`.

A matmul with such a weight needs no change; `x + b`, `x * scale` and `table[rows]` are type errors,
and are rewritten below.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.harness import models


def _mlp_loss(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    x = batch["x"]
    for layer in params[:-1]:
        y = x @ layer["w"]
        x = jax.nn.gelu(y + _like(layer["b"], y))
    y = x @ params[-1]["w"]
    difference = y + _like(params[-1]["b"], y) - batch["y"]
    per_row = jnp.mean(jnp.square(difference.astype(jnp.float32)), axis=1)
    return jnp.mean(per_row), per_row


def _transformer_loss(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    inputs, targets = batch["text"][:, :-1], batch["text"][:, 1:]
    x = params["bytes"].at[inputs].get(out_sharding=P("data"))
    x = x + _like(params["positions"], x)
    for block in params["blocks"]:
        x = x + models.attention(block, _norm(x, block["norm1"]))
        x = x + jax.nn.gelu(_norm(x, block["norm2"]) @ block["up"]) @ block["down"]
    logits = (_norm(x, params["norm"]) @ params["head"]).astype(jnp.float32)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    per_row = -jnp.mean(picked, axis=(1, 2))
    return jnp.mean(per_row), per_row


def _conv_loss(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    x = batch["image"]
    for number, layer in enumerate(params["layers"]):
        y = _convolution(x, layer["w"], 1 + number % 2)
        x = jax.nn.silu(y + _like(layer["b"], y))
    logits = jnp.mean(x, axis=(1, 2)) @ params["head"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], axis=-1)
    per_row = -jnp.mean(picked, axis=1)
    return jnp.mean(per_row), per_row


# JAX has no rule for a convolution with weights of this type, so each rank calls its own.
def _convolution(x: jax.Array, weights: jax.Array, stride: int) -> jax.Array:
    return jax.shard_map(
        lambda x, weights: models.convolution(x, weights, stride),
        in_specs=(P("data"), P(reduced={"data"})),
        out_specs=P("data"),
    )(x, weights)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return x * lax.rsqrt(square + 1e-6).astype(x.dtype) * _like(scale, x)


# Each rank's rows get a copy, so that the gradient is summed over rows, not over ranks.
def _like(leaf: jax.Array, x: jax.Array) -> jax.Array:
    dims = tuple(range(x.ndim - leaf.ndim, x.ndim))
    return lax.broadcast_in_dim(leaf, x.shape, dims, out_sharding=jax.typeof(x).sharding)


# Converts a loss of models.py to `(params, batch) -> (loss, loss of each row)`: a mean inside the
# loop would be reduced in each micro-batch, while the losses of rows are summed locally.
LOSSES: dict[Any, Any] = {
    models.mlp_loss: _mlp_loss,
    models.conv_loss: _conv_loss,
    models.transformer_loss: _transformer_loss,
}

# The functions that were rewritten, with the ones that they replace.
REWRITTEN: dict[Any, list[tuple[Any, Any]]] = {
    models.mlp_loss: [(models.mlp_loss, _mlp_loss), (None, _like)],
    models.conv_loss: [(models.conv_loss, _conv_loss), (None, _convolution), (None, _like)],
    models.transformer_loss: [
        (models.transformer_loss, _transformer_loss),
        (models.rms_norm, _norm),
        (None, _like),
    ],
}
