"""Running a function on every rank of a small mesh, and looking at what each rank got."""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P


def per_rank(mesh, fn, *args, replicated=(), check_vma=False):
    """Call `fn` on every rank: `args[i][r]` for rank r, `replicated` for all of them.

    Gives back the results, stacked: `result[r]` is rank r's.
    """
    axes = tuple(mesh.axis_names)

    def on_rank(args, replicated):
        result = fn(*jax.tree.map(lambda x: x[0], args), *replicated)
        return jax.tree.map(lambda x: jax.numpy.asarray(x)[None], result)

    mapped = jax.shard_map(
        on_rank, mesh=mesh, in_specs=(P(axes), P()), out_specs=P(axes), check_vma=check_vma
    )
    return jax.device_get(jax.jit(mapped)(args, replicated))


def assert_equal_bits(tree):
    """Every rank got the same, NaN included."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        for rank in range(1, len(leaf)):
            assert np.asarray(leaf[rank]).tobytes() == np.asarray(leaf[0]).tobytes(), (
                f"rank {rank} differs in {jax.tree_util.keystr(path)}"
            )
