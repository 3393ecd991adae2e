"""The models that are measured, beside those of `jdp.tools.models`."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jdp.tools.models import SmallModel as Problem
from jdp.tools.models import attention as attention
from jdp.tools.models import mlp as mlp
from jdp.tools.models import mlp_loss as mlp_loss
from jdp.tools.models import rms_norm as rms_norm
from jdp.tools.models import transformer as transformer
from jdp.tools.models import transformer_loss as transformer_loss

# The optimizer of all contestants.
TX = optax.sgd(0.1, momentum=0.9)


def many_leaves(num_leaves: int) -> Problem:
    """Make a model of `num_leaves` parameters of one number each."""
    params = {f"w{i}": np.float32(i) / num_leaves for i in range(num_leaves)}
    return Problem(f"{num_leaves} leaves", params, {"x": np.ones((8, 1), np.float32)}, _sum_loss)


def _sum_loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean(batch["x"]) * sum(jax.tree.leaves(params))


def conv_net(*, channels: int, num_layers: int, num_rows: int, size: int) -> Problem:
    """Make 3x3 convolutions of square images, every second one with stride 2, and 10 classes."""
    random = np.random.default_rng(0)
    wide = [3] + [channels] * num_layers

    def normal(*shape: int) -> np.ndarray:
        fan_in = np.prod(shape[:-1])
        return (random.standard_normal(shape, np.float32) / fan_in**0.5).astype(np.float32)

    layers = [
        {"w": normal(3, 3, c_in, c_out), "b": np.zeros(c_out, np.float32)}
        for c_in, c_out in itertools.pairwise(wide)
    ]
    batch = {
        "image": random.standard_normal((num_rows, size, size, 3), np.float32),
        "label": random.integers(0, 10, num_rows, dtype=np.int32),
    }
    params = {"head": normal(channels, 10), "layers": layers}
    return Problem("conv", params, batch, conv_loss)


def conv_loss(params: Any, batch: Any) -> jax.Array:
    """Return the mean cross-entropy of the classes, `[]`."""
    x = batch["image"]
    for number, layer in enumerate(params["layers"]):
        # Smooth: the gradient of a `relu` depends on the last digit of an input near 0.
        x = jax.nn.silu(convolution(x, layer["w"], 1 + number % 2) + layer["b"])
    logits = jnp.mean(x, axis=(1, 2)) @ params["head"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], axis=-1)
    return -jnp.mean(picked)


# r: rows, h and w: pixels, c: channels. The padding is that of PyTorch's `padding=1`.
def convolution(x: jax.Array, weights: jax.Array, stride: int) -> jax.Array:
    """Return the 3x3 convolution of `[r, h, w, c]`."""
    return lax.conv_general_dilated(
        x,
        weights,
        (stride, stride),
        [(1, 1), (1, 1)],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


# A step takes at least 20 ms on 2 cores; rows divide by 4 ranks times 8 micro-batches.
@functools.cache
def problem_of(name: str) -> Problem:
    """Return the model called "mlp" or "transformer", with its batch."""
    if name == "mlp":
        return mlp(width=512, num_layers=4, num_rows=512)
    return transformer(dim=128, num_layers=4, num_rows=32, length=32)
