"""Train with jdp, the state split over the ranks at stage 1, 2 or 3."""

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from benchmarks.compare.jax_task import TX


def program(task):
    mesh = jdp.init(devices=task.devices)
    tx = jdp.sharded(TX, stage=task.stage)

    @jdp.train_step
    def step(state, batch):
        differentiate = jdp.value_and_grad(task.loss_fn, accumulate=task.num_micro_batches)
        loss, grads = differentiate(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    def start():
        return jdp.TrainState.create(task.params(), tx)

    batch = jax.device_put(task.batch, NamedSharding(mesh, P("data")))
    return step, start, batch
