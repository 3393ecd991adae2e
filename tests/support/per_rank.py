"""Running a function on every rank of a small mesh, and arrays whose ranks differ."""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdp import jax_compat
from jdp.collectives import call_order


def per_rank(mesh, fn, *args, replicated=(), check_vma=False):
    """Call `fn` on every rank: `args[i][r]` for rank r, `replicated` for all of them.

    Native calls of `fn` run in one order, as in a step. Two that do not wait for each other can
    take all threads of XLA, and ranks that take them in different orders then wait without end.

    Gives back the results, stacked: `result[r]` is rank r's.
    """
    axes = tuple(mesh.axis_names)

    def on_rank(args, replicated):
        result = fn(*jax.tree.map(lambda x: x[0], args), *replicated)
        return jax.tree.map(lambda x: jax.numpy.asarray(x)[None], result)

    mapped = jax_compat.shard_map(
        on_rank, mesh=mesh, in_specs=(P(axes), P()), out_specs=P(axes), check_vma=check_vma
    )
    with call_order.entered():
        results = jax.jit(mapped)(args, replicated)
    return jax.device_get(results)


def planted(mesh, value, other, ranks):
    """Return an array that is said to be the same everywhere, and holds `other` on some ranks."""
    sharding = NamedSharding(mesh, P())
    parts = [
        jax.device_put(other if rank in ranks else value, device)
        for rank, device in enumerate(mesh.devices.flat)
        if device.process_index == jax.process_index()
    ]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, parts)


def assert_equal_bits(tree):
    """Every rank got the same, NaN included."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        for rank in range(1, len(leaf)):
            assert np.asarray(leaf[rank]).tobytes() == np.asarray(leaf[0]).tobytes(), (
                f"rank {rank} differs in {jax.tree_util.keystr(path)}"
            )
