"""Decoders at the sizes of published training runs, as `jdp.train_step`s."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.gpu import attention

import jdp


class Decoder(NamedTuple):
    """The sizes of a decoder.

    Attributes:
      layers: number of layers.
      dim: of the residual stream.
      hidden: of the feed-forward layers.
      heads: of queries, of `dim / heads` numbers.
      kv_heads: of keys and values.
      vocabulary: number of tokens.
      length: tokens in a row.
      gated: SwiGLU, root mean squares and an output matrix (LLaMA), or GELU, layer norms, learned
        positions and the embedding as output matrix (GPT).
      saves: what the backward pass finds in memory of the forward pass, and does not compute again:
        "dots", its products and the attention; "qkv", queries, keys and values; or "nothing".
    """

    layers: int
    dim: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    length: int
    gated: bool
    saves: str = "dots"


def shapes(sizes: Decoder) -> Any:
    """Return the parameters of a decoder as float32 shapes."""
    dim, head = sizes.dim, sizes.dim // sizes.heads
    layer = {
        "q": (dim, dim),
        "k": (dim, sizes.kv_heads * head),
        "v": (dim, sizes.kv_heads * head),
        "o": (dim, dim),
        "up": (dim, sizes.hidden),
        "down": (sizes.hidden, dim),
        "norm1": (dim,),
        "norm2": (dim,),
    }
    others = {"tokens": (sizes.vocabulary, dim), "norm": (dim,)}
    if sizes.gated:
        layer |= {"gate": (dim, sizes.hidden)}
        others |= {"out": (dim, sizes.vocabulary)}
    else:
        others |= {"positions": (sizes.length, dim)}
    tree = others | {"layers": [layer] * sizes.layers}
    return jax.tree.map(
        lambda dims: jax.ShapeDtypeStruct(dims, jnp.float32),
        tree,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def loss_fn(sizes: Decoder, params: Any, tokens: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of the next token, `[]`.

    Args:
      sizes: of the decoder.
      params: arrays of `shapes`.
      tokens: `[rows, length]` int32.
    """
    x = params["tokens"].astype(jnp.bfloat16)[tokens]
    if not sizes.gated:
        x = x + params["positions"].astype(jnp.bfloat16)
    layer = jax.checkpoint(functools.partial(_layer, sizes), policy=_policy(sizes.saves))
    for block in params["layers"]:
        x = layer(x, block)
    x = _norm(sizes, x, params["norm"])
    out = params["out"] if sizes.gated else params["tokens"].T
    logits = jnp.einsum("rtd,dv->rtv", x, out.astype(jnp.bfloat16))
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def _policy(saves: str) -> Any:
    policies = jax.checkpoint_policies
    if saves == "nothing":
        return policies.nothing_saveable
    if saves == "qkv":  # MaxText's "save_qkv_proj"
        return policies.save_only_these_names("qkv")
    # MaxText's "minimal_flash": what comes cheaply from the products is computed again.
    return policies.save_from_both_policies(
        policies.checkpoint_dots_with_no_batch_dims, policies.save_only_these_names("context")
    )


def _layer(sizes: Decoder, x: jax.Array, block: Any) -> jax.Array:
    block = jax.tree.map(lambda w: w.astype(jnp.bfloat16), block)
    inside = _norm(sizes, x, block["norm1"])
    rows, length, dim = x.shape
    head = dim // sizes.heads
    q, k, v = (checkpoint_name(inside @ block[name], "qkv") for name in "qkv")
    q, k, v = (y.reshape(rows, length, -1, head) for y in (q, k, v))
    k, v = (jnp.repeat(y, sizes.heads // sizes.kv_heads, axis=2) for y in (k, v))
    context = attention.mha(q, k, v, None, causal=True, sm_scale=head**-0.5).reshape(x.shape)
    x = x + checkpoint_name(context, "context") @ block["o"]
    inside = _norm(sizes, x, block["norm2"])
    hidden = inside @ block["up"]
    hidden = jax.nn.silu(inside @ block["gate"]) * hidden if sizes.gated else jax.nn.gelu(hidden)
    return x + hidden @ block["down"]


@contextmanager
def stated_costs(sizes: Decoder, rows: int) -> Iterator[None]:
    """Let the attention of JAX state its cost, which its kernels leave out.

    A causal product of `[length, d]` and `[d, length]` has half of its operations: the forward pass
    takes two products, the backward pass five.
    """
    once = rows * sizes.dim * sizes.length**2
    array = 2 * rows * sizes.length * sizes.dim
    costs = {
        "mha_forward": (2 * once, 4 * array),
        "mha_preprocess_backward": (0, 2 * array),
        "mha_backward": (5 * once, 8 * array),
    }
    pallas_call = pl.pallas_call

    def stated(kernel: Any, *args: Any, **options: Any) -> Any:
        if options.get("name") in costs:
            flops, num_bytes = costs[options["name"]]
            options["cost_estimate"] = pl.CostEstimate(
                flops=flops, transcendentals=0, bytes_accessed=num_bytes
            )
        return pallas_call(kernel, *args, **options)

    with mock.patch.object(pl, "pallas_call", stated):
        yield


def _norm(sizes: Decoder, x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    if not sizes.gated:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(square + 1e-5)).astype(x.dtype) * scale.astype(x.dtype)


def training(sizes: Decoder, stage: int) -> tuple[Any, Callable[[Any], Any]]:
    """Return the step of a decoder under Adam, and a function that makes its state.

    Args:
      sizes: of the decoder.
      stage: of `jdp.sharded`; 0 is `jdp.replicated`.

    Returns:
      The step, and `make(params) -> state`. Under `jax.eval_shape`, `shapes` are enough.
    """
    adam = optax.adamw(1e-4, b2=0.95, weight_decay=0.1)
    bfloat16 = jnp.bfloat16
    if stage:
        gathered: Any = {"gather_dtype": bfloat16} if stage == 3 else {}
        tx = jdp.sharded(adam, stage=stage, reduce_dtype=bfloat16, **gathered)
    else:
        tx = jdp.replicated(adam, reduce_dtype=bfloat16)

    @jdp.train_step
    def step(state: Any, tokens: Any) -> Any:
        loss, grads = jdp.value_and_grad(functools.partial(loss_fn, sizes))(state.params, tokens)
        return state.apply_gradients(grads), {"loss": loss}

    return step, lambda params: jdp.TrainState.create(params, tx)
