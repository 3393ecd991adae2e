"""The ring between GPUs: a call that starts it and a call that waits for it, as XLA sees them."""

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

# What a start gives to its done. It holds nothing: it is there to be waited for.
TOKEN = jax.ShapeDtypeStruct((1,), jnp.float32)


def split(
    buckets: Sequence[Sequence[jax.Array]],
    axis_name: AxisName,
    *,
    scale: Scale = 1.0,
    mesh: Mesh | None = None,
) -> list[list[jax.Array]]:
    """Sum every leaf over `axis_name` while what stands between start and done computes.

    XLA places each start behind the last leaf of its bucket, and all dones behind the last
    start: what runs there besides, the rest of a backward pass, hides the ring. Nothing is packed.

    Args:
      buckets: lists of leaves, one dtype each; any shapes. Sums of bfloat16 and float16 are taken
        in float32.
      axis_name: a name, or a tuple of names, bound by `shard_map`, of GPUs.
      scale: multiplies the sum; a number, or `[]` float, the same on every rank.
      mesh: not needed: XLA knows where its GPUs are.

    Returns:
      The same lists, summed and scaled, in the dtype of each leaf.
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
    """Do what `split` does.

    Args:
      buckets: as there.
      axis_name: as there.
      scale: as there.
      numbers: of the buckets, see `call_order.next_number`.
      communicator: key under which the GPUs find each other.
      between: `between(tokens) -> tokens`, what must run after all starts and before all dones.
    """
    names = axis.names(axis_name)
    tokens = [
        start(bucket, names, scale=scale, number=i, communicator=communicator)
        for i, bucket in zip(numbers, buckets, strict=True)
    ]
    # A done that stood right behind its start would hide nothing.
    tokens = between(lax.optimization_barrier(tokens))
    results, after = [], None
    for i, token, bucket in zip(numbers, tokens, buckets, strict=True):
        # In one order on every rank: XLA would turn them round.
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
    """Start the ring over one bucket.

    Args:
      bucket: leaves of one dtype. They must stay as they are until `done` has them.
      axis_name: the ranks.
      scale: multiplies the sum.
      number: of this bucket in the program, see `call_order.next_number`.
      communicator: key under which the GPUs find each other.

    Returns:
      The token that `done` takes.
    """
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
    """Wait for the ring over one bucket.

    Args:
      token: what `start` gave.
      bucket: what `start` got.
      axis_name: the ranks.
      after: the token of the `done` that comes before this one; None for the first.
      scale: as in `start`.
      number: as in `start`.
      communicator: as in `start`.

    Returns:
      A token for the next `done`, and the leaves, summed and scaled.
    """
    names = axis.names(axis_name)
    shapes = [TOKEN, *(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in bucket)]
    aliases = {i + 1: i for i in range(len(shapes))}
    call = jax.ffi.ffi_call(call_order.DONE, shapes, input_output_aliases=aliases)
    after = token if after is None else after
    after, *leaves = call(token, after, *bucket, **_attributes(names, number, communicator))
    # To the analysis a foreign call is anything of its operands, which differ.
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
