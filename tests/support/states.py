"""States of every kind of leaf, and their bits before and after a commit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jdp.checkpoint.saved_leaves import describe, leaves_of, unpack
from jdp.checkpoint.snapshot import Snapshots
from jdp.collectives.cpu import runtime

needs_library = pytest.mark.skipif(
    runtime.why_missing() is not None, reason=str(runtime.why_missing())
)


def committed(memory):
    """The bytes of each leaf of the latest commit, by its name."""
    latest = memory.latest()
    leaves = leaves_of(latest.facts)
    values = unpack(memory.read(latest), leaves)
    return {leaf.name: x.tobytes() for leaf, x in zip(leaves, values, strict=True)}


def bits(state):
    """The bytes of each leaf as NumPy has them, by its name."""
    values = Snapshots().take_snapshot(state).fetch()
    return {leaf.name: x.tobytes() for leaf, x in zip(describe(state), values, strict=True)}


def random_bits(shape, dtype, seed=0):
    dtype = np.dtype(dtype)
    data = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return data.reshape(-1).view(dtype).reshape(shape)


# Primes from 0.1 to 30 MB, which no number of ranks divides, and all ways to hold an element.
def mixed_state(where):
    on = lambda x: jax.device_put(x, where)  # noqa: E731
    return {
        "30 MB": on(random_bits((7_499_981,), np.float32)),
        "9 MB": on(random_bits((3001, 1511), jnp.bfloat16)),
        "1 MB": on(random_bits((1_000_003,), np.int8)),
        "0.1 MB": on(random_bits((13, 983, 2), np.float32)),
        "half": on(random_bits((997,), np.float16)),
        "complex": on(random_bits((61,), np.complex64)),
        "float8": on(random_bits((7, 11), ml_dtypes.float8_e4m3fn)),
        "bool": on(np.arange(31) % 3 == 0),
        "int4": on(np.arange(-8, 7, dtype=ml_dtypes.int4)),
        "uint2": on(np.arange(3, dtype=ml_dtypes.uint2)),
        "empty": on(np.zeros((0, 5), np.float32)),
        "number": on(np.float32(-0.0)),
        "key": on(jax.random.key(3)),
        "numpy": np.arange(17.0),
        "python": (3, 2.5, True),
        "function": jnp.tanh,
    }
