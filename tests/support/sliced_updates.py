"""Training with an optimizer whose update runs on slices, and on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from jdp.reduction.partition import Piece, partitioned
from support.optimizers import extra_args


def params(dtype=np.float32, seed=0):
    """Dims that divide by 2, 3 and 8 stand first, in the middle, last, and nowhere."""
    draw = np.random.default_rng(seed).normal
    shapes = {"bias": (24,), "layers": (3, 24, 5), "out": (7, 24), "scale": ()}
    return {name: np.asarray(draw(size=shape), dtype) for name, shape in shapes.items()}


def gradients(like, num_steps):
    draws = [params(np.float32, seed) for seed in range(1, num_steps + 1)]
    return [{name: draw[name].astype(x.dtype) for name, x in like.items()} for draw in draws]


def dim_of(x, n):
    """The largest dim that divides; of keys and integers none."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return None
    dims = [i for i, size in enumerate(x.shape) if size % n == 0 and size >= n]
    return max(dims, key=lambda i: x.shape[i], default=None)


def dims_of(tree, n):
    return [dim_of(x, n) for x in jax.tree.leaves(tree)]


def specs(tree, n):
    leaves, treedef = jax.tree.flatten(tree)
    dims = [dim_of(x, n) for x in leaves]
    return treedef.unflatten([P() if d is None else P(*[None] * d, "data") for d in dims])


def update(tx, name=""):
    def update(grads, state, params):
        updates, state = tx.update(grads, state, params, **extra_args(name, params, grads))
        return optax.apply_updates(params, updates), state

    return update


def sliced_step(tx, mesh, grads, params, state, name=""):
    """A jitted step on slices, and the list of what it gathers, filled when it is traced."""
    n, found = mesh.size, []
    args = grads, state, params
    treedef, result = jax.tree.structure(args), jax.tree.structure((params, state))

    def flat(*leaves):
        return jax.tree.leaves(update(tx, name)(*treedef.unflatten(leaves)))

    def on_rank(*local):
        dims = dims_of(args, n)
        pieces = [Piece(x, d) for x, d in zip(jax.tree.leaves(local), dims, strict=True)]
        outs, gathers, _ = partitioned(flat, pieces, ("data",), dims_of((params, state), n))
        found.extend(gathers)
        return result.unflatten([out.value for out in outs])

    split = tuple(specs(tree, n) for tree in args)
    mapped = jax.shard_map(
        on_rank, mesh=mesh, in_specs=split, out_specs=(split[2], split[1]), check_vma=False
    )
    return jax.jit(mapped), found


def whole_step(tx, mesh=None, name=""):
    """The same step on whole arrays: on one device, or on every rank of `mesh`."""
    if mesh is None:
        return jax.jit(update(tx, name))
    mapped = jax.shard_map(
        update(tx, name), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    return jax.jit(mapped)


def train(step, params, state, all_grads):
    for grads in all_grads:
        params, state = step(grads, state, params)
    return jax.device_get((params, state))
