"""Buckets: gradient leaves reduced together."""

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdp.validation import int_at_least

MiB = 2**20


def plan(leaves: Sequence[jax.Array | jax.ShapeDtypeStruct], bucket_bytes: int) -> list[list[int]]:
    """Group leaves into buckets of at most `bucket_bytes`, last leaf first.

    Backpropagation finishes the last layer first, so the first bucket can be sent during the
    backward pass of earlier layers (Li et al. 2020, section 3.2.3,
    https://arxiv.org/abs/2006.15704).
    """
    bucket_bytes = int_at_least("bucket_bytes", bucket_bytes, least=1)
    buckets: list[list[int]] = []
    filling: dict[np.dtype, tuple[list[int], int]] = {}  # dtype -> (bucket, its bytes)
    for i in reversed(range(len(leaves))):
        dtype = leaves[i].dtype
        num_bytes = math.prod(leaves[i].shape) * dtype.itemsize
        bucket, used = filling.get(dtype, (None, 0))
        if bucket is None or used + num_bytes > bucket_bytes:
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(i)
        filling[dtype] = bucket, used + num_bytes
    # Of several dtypes, the first bucket may complete last.
    return sorted(buckets, key=lambda bucket: bucket[-1], reverse=True)


def plan_with(
    leaves: Sequence[jax.Array], bucket_bytes: int, further: Sequence[jax.Array]
) -> list[list[int]]:
    """Return the buckets of `plan`, with small `further` arrays in their dtype's last."""
    buckets = plan(leaves, bucket_bytes)
    dtypes = [leaf.dtype for leaf in (*leaves, *further)]
    for i in range(len(leaves), len(dtypes)):
        of_dtype = [bucket for bucket in buckets if dtypes[bucket[0]] == dtypes[i]]
        if of_dtype:
            of_dtype[-1].append(i)
        else:
            buckets.append([i])
    return buckets


def summed(
    leaves: Sequence[jax.Array],
    bucket_bytes: int,
    all_reduce: Callable[[list[list[jax.Array]], tuple[str, ...]], list[list[jax.Array]]],
    axes: tuple[str, ...],
    further: Sequence[jax.Array] = (),
) -> list[jax.Array]:
    """Sum leaves, then `further` arrays, over ranks, in the buckets of `plan_with`."""
    given = [*leaves, *further]
    sent = list(map(parts, given))
    buckets = plan_with(sent[: len(leaves)], bucket_bytes, sent[len(leaves) :])
    sums = all_reduce([[sent[i] for i in bucket] for bucket in buckets], axes)
    return list(map(joined, in_order(sums, buckets), given))


def in_order(planned: Sequence[Sequence[Any]], plan: Sequence[Sequence[int]]) -> list[Any]:
    """Return the leaves of planned buckets in the order of their positions."""
    found = zip(itertools.chain(*plan), itertools.chain(*planned), strict=True)
    return [leaf for _, leaf in sorted(found, key=operator.itemgetter(0))]


def parts(leaf: jax.Array) -> jax.Array:
    """Return real and imaginary parts of a complex array, `[2, ...]`; others unchanged."""
    if not jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return leaf
    return jnp.stack([lax.real(leaf), lax.imag(leaf)])


def joined(summed: jax.Array, like: jax.Array) -> jax.Array:
    """Invert `parts`, given sums of the parts of `like`."""
    if not jnp.issubdtype(like.dtype, jnp.complexfloating):
        return summed
    return lax.complex(summed[0], summed[1])


def pack(bucket: Sequence[jax.Array]) -> jax.Array:
    """Concatenate a bucket's leaves."""
    return jnp.concatenate([leaf.ravel() for leaf in bucket])


def unpack(vector: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Invert `pack`, given shapes in `like`."""
    ends = np.cumsum([leaf.size for leaf in like])
    pieces = jnp.split(vector, ends[:-1])
    return [piece.reshape(leaf.shape) for piece, leaf in zip(pieces, like, strict=True)]
