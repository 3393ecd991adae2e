"""`jdp.sharded` over two processes of two devices each: every process ends with the same state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import sharded_training as model
from support.training import assert_close, fetched

import jdp

# Leaves of 0.1 to 8 MB, of prime sizes along the dims that are not split.
SHAPES = {"a": (1009, 2004), "b": (4, 6007), "c": (101, 4, 67), "d": (7919,), "e": (31, 40)}


def ranks():
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    return jdp.init(devices=devices[:4])


def placed(rows):
    """The rows of a global batch, which every process knows as a whole, on all ranks."""
    where = jax.sharding.NamedSharding(ranks(), jax.sharding.PartitionSpec("data"))

    def place(x):
        return jax.make_array_from_callback(x.shape, where, lambda index: x[index])

    return jax.tree.map(place, rows)


def wide_loss(params, rows):
    pairs = zip(jax.tree.leaves(params), range(5), strict=True)
    return jnp.mean(sum(jnp.vdot(p, p) * rows["x"][:, i] for p, i in pairs))


def wide_step(state, rows):
    loss, grads = jdp.value_and_grad(wide_loss)(state.params, rows)
    return state.apply_gradients(grads), {"loss": loss}


def accumulated(state, rows):
    loss, grads = jdp.value_and_grad(model.loss_fn, accumulate=3)(state.params, rows)
    return state.apply_gradients(grads), {"loss": loss}


def wide(stage, num_steps=3):
    """Train large leaves on whole numbers, where every sum is exact in any order."""
    ranks()
    draw = np.random.default_rng(3).integers
    params = {name: draw(-8, 8, shape).astype("f") for name, shape in SHAPES.items()}
    tx = model.optimizer(stage, optax.sgd(0.25, momentum=0.5))
    state = jdp.TrainState.create(params, tx)
    step, metrics = jdp.train_step(wide_step), {}
    for i in range(num_steps):
        rows = {"x": np.random.default_rng(i).integers(-1, 2, (8, 5)).astype("f")}
        state, metrics = step(state, placed(rows))
    jdp.check_replicas(state)
    replicate = jax.jit(lambda x: x, out_shardings=whole())
    return fetched(replicate(state.params)), float(metrics["loss"])


def whole():
    return jax.sharding.NamedSharding(ranks(), jax.sharding.PartitionSpec())


def small(stage, program=model.differentiated):
    ranks()
    step, state, metrics = jdp.train_step(program), model.make_state(stage), {}
    for i in range(3):
        state, metrics = step(state, placed(model.batch(i)))
    jdp.check_replicas(state)
    replicate = jax.jit(lambda x: x, out_shardings=whole())
    return fetched(replicate((state.params, state.opt_state))), float(metrics["loss"])


def measured(stage):
    """Evaluate with split parameters."""
    ranks()
    step = jdp.eval_step(lambda params, rows: {"loss": model.loss_fn(params, rows)})
    return float(
        jdp.evaluate(step, model.make_state(stage).params, [placed(model.batch(0))])["loss"]
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_large_leaves_of_odd_sizes_get_the_bits_of_replicated(processes, stage):
    want = processes(2).run(wide, 0)[0]
    for params, loss in processes(2).run(wide, stage):
        assert loss == want[1]
        for name, leaf in want[0].items():
            np.testing.assert_array_equal(params[name], leaf)


@pytest.mark.parametrize("stage", [1, 3])
def test_two_processes_train_as_replicated_does(processes, stage):
    want = processes(2).run(small, 0)[0]
    for found in processes(2).run(small, stage):
        assert_close(found, want, 1e-6)


def test_two_processes_add_up_parts_of_gradients_as_replicated_does(processes):
    want = processes(2).run(small, 0, accumulated)[0]
    for found in processes(2).run(small, 2, accumulated):
        assert_close(found, want, 1e-6)


def test_two_processes_evaluate_split_parameters(processes):
    assert set(processes(2).run(measured, 3)) == set(processes(2).run(measured, 0))
