"""The ring between GPUs as two XLA calls: start and done."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jdp import axis
from jdp.analysis.marks import ALL_REDUCED, MEAN, SUMMED, mark
from jdp.axis import AxisName
from jdp.collectives import call_order
from jdp.collectives.xla import Scale

# A token from a start to its done; it only orders the calls.
TOKEN = jax.ShapeDtypeStruct((1,), jnp.float32)


def split(
    buckets: Sequence[Sequence[jax.Array]],
    axis_name: AxisName,
    *,
    scale: Scale = 1.0,
    mesh: Mesh | None = None,
) -> list[list[jax.Array]]:
    """Sum every leaf over `axis_name`, while the operations between start and done compute.

    XLA places each start after the last leaf of its bucket, and all dones after the last start. The
    backward pass between them hides the ring. The leaves are not packed.

    Args:
      buckets: lists of leaves, one dtype each; any shapes. Sums of bfloat16 and float16 are taken
        in float32.
      axis_name: a name, or a tuple of names, bound by `shard_map`, of GPUs.
      scale: multiplies the sum; a number, or `[]` float, equal on all ranks.
      mesh: unused.

    Returns:
      The same lists, summed and scaled, in each leaf's dtype.
    """
    numbers = [call_order.next_number(bucket) for bucket in buckets]
    return pairs(buckets, axis_name, scale=scale, numbers=numbers)


def pairs(
    buckets: Sequence[Sequence[jax.Array]],
    axis_name: AxisName,
    *,
    scale: Scale,
    numbers: Sequence[int],
    communicator: int = 0,
    between: Callable[[list[jax.Array]], list[jax.Array]] = lambda tokens: tokens,
) -> list[list[jax.Array]]:
    """Sum as `split` does."""
    names = axis.names(axis_name)
    tokens = [
        start(bucket, names, scale=scale, number=i, communicator=communicator)
        for i, bucket in zip(numbers, buckets, strict=True)
    ]
    # A done directly after its start would not overlap with other work.
    tokens = between(lax.optimization_barrier(tokens))
    results, after = [], None
    for i, token, bucket in zip(numbers, tokens, buckets, strict=True):
        # XLA might reorder them differently on each rank.
        after, leaves = done(
            token, bucket, names, after=after, scale=scale, number=i, communicator=communicator
        )
        results.append(leaves)
    return results


def start(
    bucket: Sequence[jax.Array],
    axis_name: AxisName,
    *,
    scale: Scale,
    number: int,
    communicator: int = 0,
) -> jax.Array:
    """Start the ring over a bucket, unchanged until `done` gets the token."""
    wide = jnp.float64 if bucket[0].dtype == jnp.float64 else jnp.float32
    call = jax.ffi.ffi_call(call_order.START, TOKEN)
    return call(jnp.asarray(scale, wide), *bucket, **_attributes(axis_name, number, communicator))


def done(
    token: jax.Array,
    bucket: Sequence[jax.Array],
    axis_name: AxisName,
    *,
    after: jax.Array | None,
    scale: Scale,
    number: int,
    communicator: int = 0,
) -> tuple[jax.Array, list[jax.Array]]:
    """Wait for the ring that `start` began."""
    names = axis.names(axis_name)
    shapes = [TOKEN, *(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in bucket)]
    aliases = {i + 1: i for i in range(len(shapes))}
    call = jax.ffi.ffi_call(call_order.DONE, shapes, input_output_aliases=aliases)
    after = token if after is None else after
    after, *leaves = call(token, after, *bucket, **_attributes(names, number, communicator))
    # The analysis assumes that a foreign call's results differ as its operands do.
    leaves = [mark(leaf, kind=ALL_REDUCED, path="", axes=names) for leaf in leaves]
    if not isinstance(scale, (int, float)) or scale != 1:
        is_mean = isinstance(scale, float) and scale == 1.0 / axis.size(axis_name)
        kind = MEAN if is_mean else SUMMED
        leaves = [mark(leaf, kind=kind, path="", axes=names) for leaf in leaves]
    return after, leaves


def _attributes(axis_name: AxisName, number: int, communicator: int) -> dict[str, np.integer]:
    num_ranks = axis.size(axis_name)
    return {
        "bucket": np.int32(number),
        "num_ranks": np.int32(num_ranks),
        "communicator": np.int64(communicator),
    }
