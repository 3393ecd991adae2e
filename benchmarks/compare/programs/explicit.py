"""Train with JAX's explicit sharding: types say that a sum over the ranks is pending."""

import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.compare.jax_task import TX, State
from benchmarks.step import explicit_models


def program(task):
    mesh = jax.make_mesh((task.num_ranks,), ("data",), (AxisType.Explicit,), devices=task.devices)
    num_parts, spread = task.num_micro_batches, P(None, "data")
    differentiate = jax.grad(explicit_models.LOSSES[task.loss_fn], has_aux=True)

    # Each rank's rows stay where they are.
    def split(x):
        shape = (task.num_ranks, num_parts, -1, *x.shape[1:])
        parts = x.reshape(shape, out_sharding=P("data")).swapaxes(0, 1)
        return parts.reshape(num_parts, -1, *x.shape[1:], out_sharding=spread)

    def summed(params, batch):
        if num_parts == 1:
            return differentiate(params, batch)
        parts = jax.tree.map(split, batch)
        losses = jax.reshard(jnp.zeros(jax.tree.leaves(parts)[0].shape[1]), P("data"))
        zeros = jax.tree.map(jnp.zeros_like, params)
        zeros = jax.reshard(zeros, jax.tree.map(lambda _: P(unreduced={"data"}), params))

        def add(sums, part):
            return jax.tree.map(jnp.add, sums, differentiate(params, part)), None

        return jax.lax.scan(add, (zeros, losses), parts)[0]

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        params = jax.tree.map(lambda x: jax.reshard(x, P(reduced={"data"})), state.params)
        grads, losses = summed(params, batch)
        grads = jax.tree.map(lambda x: jax.reshard(x, P()) / num_parts, grads)
        updates, opt_state = TX.update(grads, state.opt_state, state.params)
        new = State(optax.apply_updates(state.params, updates), opt_state)
        return new, jnp.mean(losses) / num_parts

    def step_in_mesh(state, batch):
        with jax.set_mesh(mesh):
            return step(state, batch)

    def start():
        params = task.params()
        return jax.device_put(State(params, TX.init(params)), NamedSharding(mesh, P()))

    batch = jax.device_put(task.batch, NamedSharding(mesh, P("data")))
    return step_in_mesh, start, batch
