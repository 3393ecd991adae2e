"""An all-reduce that sends 8 or 4 bits for each number."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jdp import axis
from jdp.axis import AxisName, FurtherSpec
from jdp.collectives import xla_shards
from jdp.collectives.ring import require_untyped
from jdp.collectives.xla import Scale, Wire, exchanged, xla
from jdp.collectives.xla_shards import Further
from jdp.validation import int_at_least

# Of each dtype on the wire, the largest magnitude.
_LARGEST = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_QUANTIZED = ("float32", "bfloat16", "float16")
# Smaller leaves, such as biases and norms, would save few bytes.
_MIN_SIZE = 4096


def quantized(
    buckets: Sequence[Sequence[jax.Array]],
    axis_name: AxisName,
    *,
    scale: Scale = 1.0,
    mesh: Mesh | None = None,
    dtype: Any = jnp.int8,
    block: int = 256,
) -> list[list[jax.Array]]:
    """Sum every leaf over `axis_name`, with 8 or 4 bits for each number on the wire.

    For slow links: int8 sends a quarter of the bytes of float32 and half of bfloat16, but rounds
    each number twice, by at most 1/254 of the largest in its block (int4: 1/14). Each rank
    quantizes its leaves and sends each other rank a chunk. That rank sums its chunk in float32,
    quantizes the sum, and sends it to all, as Wang et al. 2023, https://arxiv.org/abs/2306.10209,
    between hosts.
    Arrays of fewer than 4,096 numbers or one block for each rank, and wider or integer ones, are
    summed by `collectives.xla`.

    Args:
      buckets: lists of leaves, one dtype each; any shapes.
      axis_name: a name, or a tuple of names, bound by `shard_map` or `pmap`.
      scale: multiplies the sum; a number, or `[]` float, equal on all ranks.
      mesh: the ranks' mesh; None: JAX's default devices.
      dtype: on the wire: int8, int4, float8_e4m3fn or float8_e5m2.
      block: numbers that share a float32 scale, >= 16, even with int4. A block with NaN or
        infinity becomes NaN, one with a subnormal scale becomes 0.

    Returns:
      The same lists, summed and scaled, in each leaf's dtype; equal bits on every rank.

    Raises:
      ValueError: another `dtype`, `block` below 16 or odd with int4, or inside
        `shard_map(check_vma=True)`.

    >>> import functools, jax, jax.numpy as jnp, jdp
    >>> int8 = functools.partial(jdp.collectives.quantized, block=128)
    >>> local = jnp.stack([jnp.full(4096, 1.0), jnp.full(4096, 3.0)])  # a row for each of two ranks
    >>> mean = lambda x: jdp.sync_gradients(x, all_reduce=int8)
    >>> jax.vmap(mean, axis_name="data")(local)[:, 0]
    Array([2., 2.], dtype=float32)
    """
    require_untyped(axis_name, "quantized", "all_gather")
    axes = axis.in_mesh_order(axis_name)
    dims = [[None] * len(bucket) for bucket in buckets]
    return summed_shards(buckets, dims, axes, scale=scale, mesh=mesh, **_checked(dtype, block))


def options_of(all_reduce: Any) -> dict[str, Any] | None:
    """Return the options of `summed_shards` if an algorithm is `quantized` or its partial."""
    given: dict[str, Any] = {}
    while isinstance(all_reduce, functools.partial):
        given = {**all_reduce.keywords, **given}
        all_reduce = all_reduce.func
    return _checked(**given) if all_reduce is quantized else None


def _checked(dtype: Any = jnp.int8, block: int = 256) -> dict[str, Any]:
    name = np.dtype(dtype).name
    if name not in _LARGEST:
        raise ValueError(
            f"dtype={name} cannot be sent by collectives.quantized. Write one of "
            f"{', '.join(_LARGEST)}, or reduce_dtype=jnp.bfloat16 for 16 bits."
        )
    block = int_at_least("block", block, least=16)
    if name == "int4" and block % 2:
        raise ValueError(
            f"block must be even with dtype=int4, two numbers in a byte, got {block}. Write "
            f"block={block + 1}."
        )
    return {"name": name, "block": block}


def summed_shards(
    buckets: Sequence[Sequence[jax.Array]],
    dims: Sequence[Sequence[int | None]],
    axes: tuple[str, ...],
    *,
    scale: Scale,
    mesh: Mesh | None,
    further: Further = None,
    name: str,
    block: int,
) -> list[list[jax.Array]]:
    """Sum leaves as `quantized` does, and keep this rank's shard of those with a dim."""
    if axis.size(axes) == 1:
        return xla(buckets, axes, scale=scale, mesh=mesh)
    wire = Wire(
        functools.partial(_packed, name=name, block=block),
        functools.partial(_unpacked, name=name, block=block),
        block,
    )
    # Padding to a block for each rank would cost more than 8 bits save.
    least = max(_MIN_SIZE, axis.size(axes) * block)

    def is_sent(leaf: jax.Array, _: Any, spec: FurtherSpec) -> bool:
        return not spec and leaf.dtype.name in _QUANTIZED and leaf.size >= least

    results = []
    for each in zip(buckets, dims, xla_shards.specs_of(further, dims), strict=True):
        leaves = [*zip(*each, strict=True)]
        sent = [leaf[:2] for leaf in leaves if is_sent(*leaf)]
        rounded = iter(exchanged(sent, axes, scale=scale, wire=wire) if sent else [])
        exact = [leaf for leaf in leaves if not is_sent(*leaf)]
        sums: list[jax.Array] = []
        if exact:
            bucket, own_dims, specs = zip(*exact, strict=True)
            options: Any = {"scale": scale, "mesh": mesh, "further": [specs]}
            [sums] = xla_shards.reduce_scatter([bucket], [own_dims], axes, **options)
        others = iter(sums)
        results.append([next(rounded if is_sent(*leaf) else others) for leaf in leaves])
    return results


def _packed(rows: jax.Array, name: str, block: int) -> jax.Array:
    """Quantize `[..., size]` float32 of whole blocks; return uint8 numbers, then scales, of all."""
    # Else each pass over them computes them again.
    blocks = lax.optimization_barrier(rows).reshape(*rows.shape[:-1], -1, block)
    # The sum is 0 or NaN: XLA:CPU's maximum drops a NaN.
    largest = jnp.abs(blocks).max(-1, keepdims=True) + (blocks * 0).sum(-1, keepdims=True)
    scale = largest / _LARGEST[name]
    # 1 / scale would overflow if it is subnormal.
    divided = blocks * jnp.where(scale < jnp.finfo(jnp.float32).tiny, 0.0, 1 / scale)
    if name == "int4":
        low, high = jnp.split(jnp.round(divided).astype(jnp.int8), 2, -1)
        numbers = (low & 15) | (high << 4)
    else:
        numbers = (jnp.round(divided) if name == "int8" else divided).astype(name)
    sent = [lax.bitcast_convert_type(x, jnp.uint8) for x in (numbers, scale)]
    sent = lax.optimization_barrier(sent)  # XLA:CPU would choose for each byte where it is from
    return jnp.concatenate([x.reshape(*rows.shape[:-1], -1) for x in sent], -1)


def _unpacked(sent: jax.Array, name: str, block: int) -> jax.Array:
    size = block // 2 if name == "int4" else block
    shape = (*sent.shape[:-1], sent.shape[-1] // (size + 4))
    end = shape[-1] * size
    numbers = sent[..., :end].reshape(*shape, size)
    if name == "int4":
        pairs = lax.bitcast_convert_type(numbers, jnp.int8)
        numbers = jnp.concatenate([pairs << 4 >> 4, pairs >> 4], -1)
    else:
        numbers = lax.bitcast_convert_type(numbers, jnp.dtype(name))
    scale = lax.bitcast_convert_type(sent[..., end:].reshape(*shape, 1, 4), jnp.float32)
    return (numbers.astype(jnp.float32) * scale).reshape(*sent.shape[:-1], -1)
