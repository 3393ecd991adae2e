"""Train with `jax.pmap`, which is a `shard_map` today: state and batch have a dim for the ranks."""

import functools

import jax
import numpy as np
import optax

from benchmarks.compare.jax_task import TX, State
from benchmarks.compare.micro_batches import mean_gradient


def program(task):
    local = [x for x in task.devices if x.process_index == jax.process_index()]

    def split(x):
        return x.reshape(task.num_micro_batches, -1, *x.shape[1:])

    @functools.partial(jax.pmap, axis_name="data", devices=task.devices, donate_argnums=0)
    def step(state, batch):
        parts = jax.tree.map(split, batch)
        loss, grads = mean_gradient(task.loss_fn, state.params, parts)
        loss, grads = jax.lax.pmean((loss, grads), "data")
        updates, opt_state = TX.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), loss

    def start():
        params = task.params()
        state = State(params, TX.init(params))
        return jax.tree.map(lambda x: np.stack([x] * len(local)), state)

    def rows_of_process(x):
        rows = x.reshape(task.num_ranks, -1, *x.shape[1:])
        return rows[task.devices.index(local[0]) :][: len(local)]

    batch = jax.tree.map(rows_of_process, task.batch)
    return step, start, batch
