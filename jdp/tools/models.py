"""Small models with seeded data, for benchmarks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class SmallModel(NamedTuple):
    """A model and its data."""

    name: str
    params: Any  # tree of numpy arrays
    batch: dict[str, np.ndarray]  # first dim: rows of the global batch
    loss_fn: Callable[[Any, Any], jax.Array]  # (params, batch) -> [], the mean over rows


def mlp(*, width: int, num_layers: int, num_rows: int, dtype: Any = np.float32) -> SmallModel:
    """Make square layers, and a regression with random targets."""
    random = np.random.default_rng(0)
    params = [
        {"w": _normal(random, (width, width), width, dtype), "b": np.zeros(width, dtype)}
        for _ in range(num_layers)
    ]
    batch = {name: _normal(random, (num_rows, width), 1, dtype) for name in ("x", "y")}
    return SmallModel("mlp", params, batch, mlp_loss)


def mlp_loss(params: Any, batch: Any) -> jax.Array:
    """Return the mean squared error, `[]`; `batch` has `x` and `y`, `[r, width]`."""
    x = batch["x"]
    for layer in params[:-1]:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    difference = x @ params[-1]["w"] + params[-1]["b"] - batch["y"]
    return jnp.mean(jnp.square(difference.astype(jnp.float32)))


def transformer(
    *, dim: int, num_layers: int, num_rows: int, length: int, dtype: Any = np.float32
) -> SmallModel:
    """Make a decoder of bytes (pre-norm, heads of 32), and random text of `length + 1`."""
    random = np.random.default_rng(0)
    blocks = [
        {
            "norm1": np.ones(dim, dtype),
            "qkv": _normal(random, (dim, 3 * dim), dim, dtype),
            "out": _normal(random, (dim, dim), dim, dtype),
            "norm2": np.ones(dim, dtype),
            "up": _normal(random, (dim, 4 * dim), dim, dtype),
            "down": _normal(random, (4 * dim, dim), 4 * dim, dtype),
        }
        for _ in range(num_layers)
    ]
    params = {
        "bytes": _normal(random, (256, dim), dim, dtype),
        "positions": _normal(random, (length, dim), dim, dtype),
        "blocks": blocks,
        "norm": np.ones(dim, dtype),
        "head": _normal(random, (dim, 256), dim, dtype),
    }
    text = random.integers(0, 256, (num_rows, length + 1), dtype=np.int32)
    return SmallModel(f"transformer-{num_layers}", params, {"text": text}, transformer_loss)


def transformer_loss(params: Any, batch: Any) -> jax.Array:
    """Return the next byte's mean cross-entropy; `text`: `[r, length + 1]` int32, 0 to 255."""
    inputs, targets = batch["text"][:, :-1], batch["text"][:, 1:]
    x = params["bytes"][inputs] + params["positions"]
    for block in params["blocks"]:
        x = x + attention(block, rms_norm(x, block["norm1"]))
        x = x + jax.nn.gelu(rms_norm(x, block["norm2"]) @ block["up"]) @ block["down"]
    logits = (rms_norm(x, params["norm"]) @ params["head"]).astype(jnp.float32)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -jnp.mean(picked)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return `x` over the root of its mean square, times `scale`, `[..., d]`."""
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(square + 1e-6).astype(x.dtype) * scale


# r: rows, t and s: positions, h: heads, d: a head's dim.
def attention(block: Any, x: jax.Array) -> jax.Array:
    """Return causal attention, heads of 32, `[r, t, d]`; `qkv` is `[d, 3 d]`, `out` `[d, d]`."""
    num_rows, length, dim = x.shape
    heads = (num_rows, length, dim // 32, 32)
    q, k, v = (part.reshape(heads) for part in jnp.split(x @ block["qkv"], 3, axis=-1))
    scores = jnp.einsum("rthd,rshd->rhts", q, k).astype(jnp.float32) / 32**0.5
    scores = jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    return jnp.einsum("rhts,rshd->rthd", weights, v).reshape(x.shape) @ block["out"]


def _normal(random: Any, shape: tuple[int, ...], fan_in: int, dtype: Any) -> np.ndarray:
    return (random.standard_normal(shape, np.float32) / fan_in**0.5).astype(dtype)
