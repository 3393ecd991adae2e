"""Train on one device."""

import functools

import jax
import optax

from benchmarks.compare.jax_task import TX, State
from benchmarks.compare.micro_batches import mean_gradient


def program(task):
    def split(x):
        return x.reshape(task.num_micro_batches, -1, *x.shape[1:])

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        parts = jax.tree.map(split, batch)
        loss, grads = mean_gradient(task.loss_fn, state.params, parts)
        updates, opt_state = TX.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), loss

    def start():
        params = task.params()
        return jax.device_put(State(params, TX.init(params)))

    batch = jax.device_put(task.batch)
    return step, start, batch
