"""`jdp.log(..., state=)`: what the optimizer knows, as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.metrics import lines

import jdp
from jdp.distributed import metrics_log
from jdp.worker.progress import own

ROWS = np.random.default_rng(0).normal(size=(264, 9)).astype("float32")
SCHEDULE = optax.linear_schedule(0.1, 0.0, 10)


def optimizer():
    return optax.chain(
        optax.snapshot("gradient_norm", optax.tree.norm),
        optax.clip_by_global_norm(0.5),
        optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
    )


def sharded(stage):
    if not stage:
        return jdp.replicated(optimizer())
    return jdp.sharded(optimizer(), stage=stage, min_size=1)


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["x"][:, 0]) ** 2)


@jdp.train_step
def train(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


def on_one_device(num_steps, rows=ROWS, size=66):
    tx, params = optimizer(), {"w": np.full(rows.shape[1], 0.1, "float32")}
    opt_state, found = tx.init(params), []
    for i in range(num_steps):
        grads = jax.grad(loss_fn)(params, {"x": rows[size * i : size * (i + 1)]})
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        found.append((float(optax.tree.norm(grads)), float(SCHEDULE(i))))
    return np.array(found)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_learning_rate_and_gradient_norm_are_those_of_one_device(stage, num_ranks, path, make_mesh):
    jdp.init(make_mesh(num_ranks))
    tx = sharded(stage)
    state = jdp.TrainState.create({"w": np.full(9, 0.1, "float32")}, tx)
    batches = jdp.batches({"x": ROWS}, batch_size=66, num_steps=4, shuffle=False)
    for i, batch in enumerate(batches):
        state, metrics = train(state, batch)
        jdp.log(metrics, i, file=path, state=state)  # and the next step donates it
    found = [(line["gradient_norm"], line["learning_rate"]) for line in lines(path)]
    np.testing.assert_allclose(found, on_one_device(4), rtol=1e-5)
    counts = own.slot.read().counts
    assert (counts.gradient_norm, counts.learning_rate) == found[-1]


def log_from_here(stage, path):
    jdp.init()
    tx = sharded(stage)
    state = jdp.TrainState.create({"w": np.full(8, 0.1, "float32")}, tx)
    batches = jdp.batches({"x": ROWS[:, :8]}, batch_size=88, num_steps=3, shuffle=False)
    for i, batch in enumerate(batches):
        state, metrics = train(state, batch)
        jdp.log(metrics, i, file=path, state=state)
    metrics_log.flush()
    return state.params["w"].is_fully_replicated


@pytest.mark.parametrize("stage", [0, 3])
def test_process_0_writes_them_of_a_state_of_two_processes(stage, processes, path):
    assert processes(2).run(log_from_here, stage, path) == [not stage] * 2
    found = [(line["gradient_norm"], line["learning_rate"]) for line in lines(path)]
    np.testing.assert_allclose(found, on_one_device(3, ROWS[:, :8], 88), rtol=1e-5)


def test_labels_come_before_names_and_the_authors_metrics_win(path):
    injected = optax.inject_hyperparams(optax.sgd)
    tx = optax.multi_transform(
        {"head": injected(0.5), "rest": optax.chain(injected(0.25), injected(0.125))},
        {"a": "head", "b": "rest"},
    )
    state = jdp.TrainState.create({"a": np.ones(3), "b": np.ones(3)}, jdp.replicated(tx))
    jdp.log({"head/learning_rate": 9.0}, 0, file=path, state=state)
    [line] = lines(path)
    assert {name: line[name] for name in line if "rate" in name} == {
        "head/learning_rate": 9.0,
        "rest/learning_rate": 0.25,
        "rest/learning_rate 2": 0.125,
    }


def test_a_monitor_and_an_optimizer_of_nnx(path):
    measures = {"largest": optax.tree.max, "gradients": lambda tree: tree}
    tx, params = optax.monitor(measures), {"a": np.full(3, 0.5), "b": 0.25}
    _, state = tx.update(params, tx.init(params))
    jdp.log({}, 0, file=path, state=state)  # scalars alone
    injected = optax.inject_hyperparams(optax.sgd)(0.5)
    optimizer = nnx.Optimizer(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), injected, wrt=nnx.Param)
    jdp.log({}, 1, file=path, state=optimizer)
    first, second = lines(path)
    assert first.items() >= {"largest": 0.5, "gradients/b": 0.25}.items() and len(first) == 4
    assert second["learning_rate"] == 0.5 and len(second) == 3


def test_a_state_without_them_or_that_is_gone_is_refused(path, make_mesh):
    jdp.init(make_mesh(2))
    plain = jdp.TrainState.create({"w": np.ones(9, "float32")}, jdp.replicated(optax.sgd(0.1)))
    with pytest.raises(ValueError, match=r"no learning rate.*optax.snapshot\(\"gradient_norm\""):
        jdp.log({"loss": 1.0}, 0, file=path, state=plain)
    state = jdp.TrainState.create({"w": np.ones(9, "float32")}, jdp.replicated(optimizer()))
    state, metrics = train(state, {"x": ROWS[:8]})
    jax.tree.map(lambda leaf: leaf.delete(), state)  # as a step does that got it
    with pytest.raises(ValueError, match="donated"):
        jdp.log(metrics, 0, file=path, state=state)
    assert not path.exists()
