"""Train each rank alone on its rows: the step of `shard_map.py` without its reduction."""

import functools

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.compare.jax_task import TX, State
from benchmarks.compare.micro_batches import mean_gradient


def program(task):
    mesh = jax.make_mesh((task.num_ranks,), ("data",), (AxisType.Auto,), devices=task.devices)
    own = NamedSharding(mesh, P("data"))

    def split(x):
        return x.reshape(task.num_micro_batches, -1, *x.shape[1:])

    @functools.partial(jax.jit, donate_argnums=0)
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    def step(states, batch):
        state = jax.tree.map(lambda x: x[0], states)
        parts = jax.tree.map(split, batch)
        loss, grads = mean_gradient(task.loss_fn, state.params, parts)
        updates, opt_state = TX.update(grads, state.opt_state, state.params)
        state = State(optax.apply_updates(state.params, updates), opt_state)
        return jax.tree.map(lambda x: x[None], (state, loss))

    def start():
        params = task.params()
        state = State(params, TX.init(params))
        copies = jax.tree.map(lambda x: np.stack([x] * task.num_ranks), state)
        return jax.device_put(copies, own)

    return step, start, jax.device_put(task.batch, own)
