"""Skipped updates in several processes, and after one of them died."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import sharded_training as model
from support.training import assert_close
from training.test_sharded_processes import placed, ranks

import jdp
from jdp.distributed import in_flight

SCRIPT = """
import os
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, optax
import jdp

jdp.init()
scaled = jdp.dynamic_loss_scale(optax.sgd(0.1, momentum=0.9), initial=8.0, growth_interval=3)
state = jdp.TrainState.create({"w": jnp.ones(3)}, jdp.WRAPPED)
rows = np.random.default_rng(0).normal(size=(48, 3)).astype("f")
rows[[9, 10, 30]] = np.nan  # steps 2, 7
batches = jdp.batches(rows, 4, num_steps=12, shuffle=False)

@jdp.train_step
def step(state, batch):
    loss = lambda p, x: ((x @ p["w"]) ** 2).mean() * state.opt_state.scale
    return state.apply_gradients(jdp.value_and_grad(loss)(state.params, batch)[1]), {}

with jdp.Checkpointer(Path(__file__).parent / "run", commit_every=1) as ckpt:
    state = ckpt.restore(state, batches)
    is_first = ckpt.steps == 0
    for batch in batches:
        state, _ = step(state, batch)
        ckpt.step(state, batches)
        if ckpt.steps == 5 and is_first:
            ckpt._session._commits.wait()
            os._exit(7)
where = jax.sharding.NamedSharding(jdp.init(), jax.sharding.PartitionSpec())
w = jax.jit(lambda x: x, out_shardings=where)(state.params["w"])
skips, scale = state.opt_state.num_skipped, state.opt_state.scale
print("end", is_first, int(skips), float(scale), *np.asarray(w))
"""


def trained(stage):
    """Train with a bad row on the last rank, and return what each process ends with."""
    ranks()
    tx = jdp.skip_nonfinite(model.clipped(), max_consecutive=2)
    state = jdp.TrainState.create(model.params(), model.optimizer(stage, tx))
    step = jdp.train_step(model.differentiated)
    good, bad = model.batch(0), model.batch(1)
    bad["x"][-1] = np.inf
    for rows in (good, bad, good, bad, bad):
        state, _ = step(state, placed(rows))
    with pytest.raises(RuntimeError, match="JDP217") as error:
        in_flight.drain()
    jdp.check_replicas(state)
    return int(state.opt_state.num_skipped), str(error.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_all_processes_skip_and_each_names_its_ranks(processes, stage):
    first, second = processes(2).run(trained, stage)
    assert (first[0], second[0]) == (3, 3)
    assert " of rank 3: " in second[1] and " of rank" not in first[1]


def on_one_device():
    rows = np.random.default_rng(0).normal(size=(48, 3)).astype("f")
    tx, w, scale, count = optax.sgd(0.1, momentum=0.9), jnp.ones(3), 8.0, 0
    opt_state = tx.init(w)
    for i in range(12):
        if i in (2, 7):
            scale, count = scale / 2, 0
            continue
        x = rows[4 * i : 4 * i + 4]
        updates, opt_state = tx.update(2 * x.T @ (x @ w) / 4, opt_state)
        w, count = w + updates, count + 1
        if count == 3:
            scale, count = scale * 2, 0
    return scale, w


@pytest.mark.processes
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("wrapped", ["replicated(scaled)", "sharded(scaled, stage=3, min_size=1)"])
def test_counts_and_scale_are_those_of_a_run_without_a_death(jdp_run, wrapped):
    script = SCRIPT.replace("WRAPPED", wrapped)
    one = jdp_run("--nproc-per-node=2", "--standbys=0", "--max-restarts=1", script=script)
    one.deadline_s = 120.0
    assert one.wait() == 0, one.output
    ends = [line.split() for line in one.output.splitlines() if "end False" in line]
    scale, w = on_one_device()
    assert len(ends) == 2, one.output
    for end in ends:
        end = end[end.index("end") :]
        assert (int(end[2]), float(end[3])) == (2, scale)
        assert_close(np.array(end[4:], np.float32), np.asarray(w), 1e-5)
