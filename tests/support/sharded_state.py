"""States whose leaves are split over the ranks, in numbers that floats hold exactly."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jdp

# What is split, by stage: nothing, the optimizer's state, also the parameters.
STAGES = {"replicated": (), "optimizer": ("mu",), "all": ("mu", "w", "h")}

# 24 divides by 1, 2, 3, 4 and 8.
SPECS = {"mu": ("data",), "w": (None, "data"), "h": (None, None, "data")}


def values_at(step, rows=5):
    """The values after `step` steps, each of other bits than at any other step."""
    return {
        "w": np.arange(rows * 24, dtype=np.float32).reshape(rows, 24) - step,
        "h": np.asarray(jnp.arange(48).reshape(1, 2, 24) % 7 + step, jnp.bfloat16),
        "mu": np.where(np.eye(24, 7) > 0, -0.0, step % 2).astype(np.float32),
        "bias": np.array([1.5, -0.0, np.nan, step], np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "n": np.array(step, np.int32),
    }


def state_at(step, mesh, stage, rows=5, has_rule=True):
    """The state after `step` steps, placed as `stage` says; the last two belong to the ranks."""
    state = {}
    for name, value in values_at(step, rows).items():
        spec = SPECS[name] if name in STAGES[stage] else ()
        state[name] = on(mesh, value, *spec)
    key = jax.random.key_data(jax.random.key(step))
    state["key"] = jax.random.wrap_key_data(on(mesh, np.asarray(key)))
    own = on(mesh, np.arange(24, dtype=np.float32) + step, "data")
    state["own"] = jdp.per_rank(own)
    if has_rule:
        state["ruled"] = jdp.per_rank(own, resize=total)
    return state


def total(saved, like):
    """The rule for rows of lost hosts."""
    return np.full(like.shape, saved.sum(), like.dtype)


def on(mesh, value, *spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def differences(state, other):
    """The paths of leaves of which some shard of this process has other bits, or another place."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(other), strict=True)
    return [jax.tree_util.keystr(path) for (path, x), y in pairs if shards(x) != shards(y)]


def shards(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    parts = {
        shard.device.id: (str(shard.index), np.asarray(shard.data).tobytes())
        for shard in x.addressable_shards
    }
    return x.dtype, x.shape, x.sharding, parts
