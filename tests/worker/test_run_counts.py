"""What a process counts for people who watch the run equals what it did."""

import time

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp.distributed import metrics_log
from jdp.worker.progress import own

ROWS = {"x": np.arange(10, dtype="float32")}


@pytest.fixture
def state():
    jdp.init(cpu_ranks=2)
    own.slot.counter.reset()
    return jdp.TrainState.create({"w": jnp.float32(1)}, jdp.replicated(optax.sgd(0.5)))


@jdp.train_step(weight=lambda batch: batch["mask"].sum())
def step(state, batch):
    def loss_fn(p, batch):
        return (p["w"] * batch["x"] * batch["mask"]).sum() / batch["mask"].sum()

    loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


@jdp.eval_step(weight=lambda batch: batch["mask"].sum())
def measure(state, batch):
    return {"x": (batch["x"] * batch["mask"]).sum() / batch["mask"].sum()}


def counts():
    return own.slot.read().counts


def test_rows_without_padding_count_once_a_step_was_called(state):
    counted = []
    for batch in jdp.batches(ROWS, 4, epochs=1):
        counted.append(counts().rows)
        state, _ = step(state, batch)
    assert [*counted, counts().rows] == [0, 4, 8, 10]
    step(state, {"x": np.ones(6, "float32"), "mask": np.ones(6, bool)})  # not handed out by jdp
    assert counts().rows == 10


def test_rows_of_an_evaluation_do_not_count(state):
    begun = own.num_steps
    for batch in jdp.batches(ROWS, 4, num_steps=2, mask=True):
        jdp.evaluate(measure, state, jdp.batches(ROWS, 6, epochs=1))
        state, _ = step(state, batch)
        assert counts().target == begun + 2
    assert counts().rows == 8


def test_the_target_is_that_of_the_loop_that_trains(state):
    begun, batches = own.num_steps, jdp.batches(ROWS, 4, num_steps=7, mask=True)
    for batch in batches:
        state, _ = step(state, batch)
        break
    for batch in batches:
        state, _ = step(state, batch)
        assert counts().target == begun + 7
    for batch in jdp.shard_batches([{"x": np.ones(6, "float32"), "mask": np.ones(6, bool)}]):
        state, _ = step(state, batch)
    assert counts().target == -1  # jdp does not know how many batches a loader has


def test_rows_of_a_loader_count_and_so_does_the_time_that_it_takes(state):
    def load():
        for _ in range(3):
            time.sleep(0.02)
            yield {"x": np.ones(6, "float32"), "mask": np.ones(6, bool)}

    for batch in jdp.shard_batches(load(), prefetch=0):
        state, _ = step(state, batch)
    assert counts().rows == 18 and counts().data_s >= 0.06


def test_a_checkpoint_and_the_logged_loss_are_those_of_their_steps(state, tmp_path):
    batches = jdp.batches(ROWS, 4, num_steps=5, mask=True, shuffle=False)
    with jdp.Checkpointer(tmp_path / "run", save_every=2) as ckpt:
        state = ckpt.restore(state, batches)
        for batch in batches:
            state, metrics = step(state, batch)
            if ckpt.steps < 3:
                jdp.log(metrics, ckpt.steps + 1, file=tmp_path / "metrics.jsonl")
                jdp.log({"other": 7}, ckpt.steps + 1, file=tmp_path / "metrics.jsonl")
            ckpt.step(state, batches)
    metrics_log.end()
    assert counts().checkpoint == 5 and counts().commit == -1  # no launcher
    # w * x.mean(): rows 8, 9, 0, 1, after the gradients 1.5 and 5.5 of the batches before.
    assert (counts().logged, counts().loss) == (3, (1 - 0.5 * (1.5 + 5.5)) * 4.5)
