"""One training step, written in the usual ways in JAX, and with jdp.

Each takes `(state, batch)`, donates the state, accumulates over `k` micro-batches and returns
`(state, {"loss": loss})`; all use the same optimizer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from benchmarks.harness import models
from benchmarks.step import explicit_models

# A decorated or jitted function, which also has `lower`.
Step = Any
LossFn = Callable[[Any, Any], jax.Array]

EXPLICIT = "explicit, unreduced"


class State(NamedTuple):
    """The state of the steps without jdp."""

    params: Any
    opt_state: Any


def jdp_step(loss_fn: LossFn, mesh: Mesh, k: int) -> Step:
    @jdp.train_step
    def step(state: jdp.TrainState, batch: Any) -> Any:
        loss, grads = jdp.value_and_grad(loss_fn, accumulate=k)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    return step


# The usual way: the batch is sharded, so the compiler divides the work.
def jit_natural(loss_fn: LossFn, mesh: Mesh, k: int) -> Step:
    def split(batch: Any) -> Any:
        return jax.tree.map(lambda x: x.reshape(k, -1, *x.shape[1:]), batch)

    return _jit(loss_fn, k, split)


# The same, with a constraint that spreads every micro-batch over all ranks.
def jit_constraint(loss_fn: LossFn, mesh: Mesh, k: int) -> Step:
    where = NamedSharding(mesh, P(None, "data"))

    def split(batch: Any) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(k, -1, *x.shape[1:]), batch)
        return lax.with_sharding_constraint(parts, where)

    return _jit(loss_fn, k, split)


# A micro-batch takes every k-th row, so that no row moves to another rank.
def jit_whole_shards(loss_fn: LossFn, mesh: Mesh, k: int) -> Step:
    def split(batch: Any) -> Any:
        return jax.tree.map(lambda x: x.reshape(-1, k, *x.shape[1:]).swapaxes(0, 1), batch)

    return _jit(loss_fn, k, split)


# The gradient has a dim for the ranks, which is summed after the loop, so that the loop has no
# reduction.
def jit_rank_dim(loss_fn: LossFn, mesh: Mesh, k: int) -> Step:
    by_rank = NamedSharding(mesh, P("data"))

    def step(state: State, batch: Any) -> Any:
        def split(x: jax.Array) -> jax.Array:
            return x.reshape(mesh.size, k, -1, *x.shape[1:]).swapaxes(0, 1)

        def differentiate(params: Any, batch: Any) -> Any:
            found = jax.vmap(jax.value_and_grad(loss_fn), in_axes=(None, 0))(params, batch)
            return lax.with_sharding_constraint(found, by_rank)

        micro_batches = jax.tree.map(split, batch)
        means = _accumulated(differentiate, state.params, micro_batches, k)
        loss, grads = jax.tree.map(lambda x: x.mean(0), means)
        return _updated(state, grads), {"loss": loss}

    return jax.jit(step, donate_argnums=0)


# Written by hand for one rank: the local gradient of all micro-batches, then one psum.
def shard_map(loss_fn: LossFn, mesh: Mesh, k: int) -> Step:
    differentiate = jax.value_and_grad(loss_fn)

    def step(state: State, batch: Any) -> Any:
        if k == 1:
            found = differentiate(state.params, batch)
        else:
            parts = jax.tree.map(lambda x: x.reshape(k, -1, *x.shape[1:]), batch)
            found = _accumulated(differentiate, state.params, parts, k)
        loss, grads = lax.pmean(found, "data")
        return _updated(state, grads), {"loss": loss}

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    return jax.jit(mapped, donate_argnums=0)


# JAX's explicit sharding: types record that a sum over the ranks is pending, and one reshard after
# the loop computes it. It cannot use `loss_fn` itself: see explicit_models.py.
def explicit(loss_fn: LossFn, mesh: Mesh, k: int) -> Step:
    mesh, ranks = explicit_mesh(mesh), frozenset(mesh.axis_names)
    differentiate = jax.grad(explicit_models.LOSSES[loss_fn], has_aux=True)

    # Each rank's rows stay where they are, as with shard_map.
    def split(x: jax.Array) -> jax.Array:
        parts = x.reshape(mesh.size, k, -1, *x.shape[1:], out_sharding=P("data")).swapaxes(0, 1)
        return parts.reshape(k, -1, *x.shape[1:], out_sharding=P(None, "data"))

    def summed(params: Any, batch: Any) -> Any:
        if k == 1:
            return differentiate(params, batch)
        parts = jax.tree.map(split, batch)
        num_rows = jax.tree.leaves(parts)[0].shape[1]
        losses = jax.reshard(jnp.zeros(num_rows), P("data"))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        zeros = jax.reshard(zeros, jax.tree.map(lambda _: P(unreduced=ranks), params))

        def add(sums: Any, micro_batch: Any) -> tuple[Any, None]:
            grads, losses = differentiate(params, micro_batch)
            grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
            return jax.tree.map(jnp.add, sums, (grads, losses)), None

        return lax.scan(add, (zeros, losses), parts)[0]

    def step(state: State, batch: Any) -> Any:
        params = jax.tree.map(lambda x: jax.reshard(x, P(reduced=ranks)), state.params)
        grads, losses = summed(params, batch)
        # Sent in the dtype of the parameters. JAX refuses to divide a pending sum.
        grads = jax.tree.map(lambda g, x: jax.reshard(g.astype(x.dtype), P()), grads, params)
        grads = jax.tree.map(lambda g: g / k, grads)
        return _updated(state, grads), {"loss": jnp.mean(losses) / k}

    return _InMesh(jax.jit(step, donate_argnums=0), mesh)


def explicit_mesh(mesh: Mesh) -> Mesh:
    """Return a mesh of the same devices whose arrays have their sharding in their types."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,))


class _InMesh:
    def __init__(self, step: Any, mesh: Mesh):
        self._step, self._mesh = step, mesh

    def __call__(self, state: Any, batch: Any) -> Any:
        with jax.set_mesh(self._mesh):
            return self._step(state, batch)

    def lower(self, state: Any, batch: Any) -> Any:
        with jax.set_mesh(self._mesh):
            return self._step.lower(state, batch)


def rivals(k: int) -> dict[str, Callable[[LossFn, Mesh, int], Step]]:
    """Return the rivals of jdp; without accumulation all variants of `jit` are the same."""
    if k == 1:
        return {"jit": jit_natural, EXPLICIT: explicit, "shard_map": shard_map}
    return {
        "jit": jit_natural,
        "jit, constraint": jit_constraint,
        "jit, whole shards": jit_whole_shards,
        "jit, rank dim": jit_rank_dim,
        EXPLICIT: explicit,
        "shard_map": shard_map,
    }


def _jit(loss_fn: LossFn, k: int, split: Callable[[Any], Any]) -> Step:
    differentiate = jax.value_and_grad(loss_fn)

    def step(state: State, batch: Any) -> Any:
        if k == 1:
            loss, grads = differentiate(state.params, batch)
        else:
            loss, grads = _accumulated(differentiate, state.params, split(batch), k)
        return _updated(state, grads), {"loss": loss}

    return jax.jit(step, donate_argnums=0)


def _accumulated(differentiate: Callable[..., Any], params: Any, micro_batches: Any, k: int) -> Any:
    first = jax.tree.map(lambda x: x[0], micro_batches)
    like = jax.eval_shape(differentiate, params, first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)

    def add(sums: Any, micro_batch: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, differentiate(params, micro_batch)), None

    sums, _ = lax.scan(add, zeros, micro_batches)
    return jax.tree.map(lambda s, x: (s / k).astype(x.dtype), sums, like)


def _updated(state: State, grads: Any) -> State:
    updates, opt_state = models.TX.update(grads, state.opt_state, state.params)
    return State(optax.apply_updates(state.params, updates), opt_state)
