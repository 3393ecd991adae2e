"""Train with a hand-written `jax.shard_map`: each rank reduces its gradient once."""

import functools

import jax
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.compare.jax_task import TX, State
from benchmarks.compare.micro_batches import mean_gradient


def program(task):
    mesh = jax.make_mesh((task.num_ranks,), ("data",), (AxisType.Auto,), devices=task.devices)

    def split(x):
        return x.reshape(task.num_micro_batches, -1, *x.shape[1:])

    @functools.partial(jax.jit, donate_argnums=0)
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    def step(state, batch):
        parts = jax.tree.map(split, batch)
        loss, grads = mean_gradient(task.loss_fn, state.params, parts)
        loss, grads = jax.lax.pmean((loss, grads), "data")
        updates, opt_state = TX.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), loss

    def start():
        params = task.params()
        return jax.device_put(State(params, TX.init(params)), NamedSharding(mesh, P()))

    batch = jax.device_put(task.batch, NamedSharding(mesh, P("data")))
    return step, start, batch
