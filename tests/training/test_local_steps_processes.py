"""`diloco` in several processes, and after some of them died."""

import jax
import optax
import pytest
from support import training
from support.training import assert_close, fetched
from training.test_local_steps import INNER, OUTER, simulated, streamed
from training.test_sharded_processes import placed, ranks, whole

import jdp

SCRIPT = """
import hashlib, os, signal
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, optax
import jdp

jdp.init()
rows = np.random.default_rng(0).normal(size=(48, 5)).astype("f")
batches = jdp.batches(rows, 4, num_steps=12, seed=0)
inner = optax.chain(optax.add_noise(0.01, 0.5, 3), optax.adamw(0.05))
tx = jdp.diloco(inner, every=4, streaming=STREAMING)
make = lambda: jdp.TrainState.create({"w": jnp.ones((5, 3))}, tx)
kills = dict(KILLS)  # the step -> the process

@jdp.train_step
def step(state, batch):
    loss = lambda p: (jnp.tanh(batch @ p["w"]) ** 2).mean()
    return state.apply_gradients(jax.grad(loss)(state.params)), {}

folder = Path(__file__).parent
with jdp.Checkpointer(folder / "run", commit_every=1) as ckpt:
    state = ckpt.restore(make, batches)
    for batch in batches:
        state, _ = step(state, batch)
        ckpt.step(state, batches)
        mark = folder / f"killed at {ckpt.steps}"
        if kills.get(ckpt.steps) == jax.process_index() and not mark.exists():
            ckpt._session._commits.wait()
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
data = jax.jit(lambda tree: jax.tree.map(
    lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree))
parts = [np.asarray(x.addressable_data(0)).tobytes() for x in jax.tree.leaves(data(state))]
print("end", jax.process_index(), hashlib.sha256(b"".join(parts)).hexdigest())
"""


def trained(streaming):
    """Train four ranks of two processes, and return what `simulated` does."""
    ranks()
    state = training.state(jdp.diloco(INNER["adamw"], every=4, streaming=streaming))
    step, losses = jdp.train_step(training.plain_step), []
    for i in range(9):
        state, metrics = step(state, placed(training.batch(i)))
        losses.append(metrics["loss"])
    jdp.check_replicas(state)
    replicate = jax.jit(lambda x: x, out_shardings=whole())
    own = replicate(state.opt_state.own_params.value)
    return fetched((state.params, own, losses))


def restored_state(path):
    """Save in the middle of a round, restore, and return the bits of both."""
    ranks()
    tx, step = jdp.diloco(optax.adamw(0.01), every=4), jdp.train_step(training.plain_step)
    with jdp.Checkpointer(path) as ckpt:
        state = ckpt.restore(lambda: training.state(tx))
        for i in range(6):
            state, _ = step(state, placed(training.batch(i)))
        ckpt.step(state)
    with jdp.Checkpointer(path, resume=True) as ckpt:
        again = ckpt.restore(lambda: training.state(tx))
    replicate = jax.jit(lambda x: x, out_shardings=whole())
    return [jax.tree.leaves(fetched(replicate(x))) for x in (state, again)]


@pytest.mark.parametrize("streaming", [False, True])
def test_two_processes_train_as_each_rank_alone(processes, streaming):
    right = streamed(4, OUTER, 4) if streaming else simulated(4, INNER["adamw"], OUTER, 4)
    for found in processes(2).run(trained, streaming):
        assert_close(found, right)


def test_two_processes_restore_equal_bits(processes, tmp_path):
    for state, again in processes(2).run(restored_state, str(tmp_path)):
        assert int(again[0]) == 6  # the steps
        assert_close(again, state, tolerance=0)


def ends_of(jdp_run, kills, *, streaming):
    script = SCRIPT.replace("KILLS", repr(kills)).replace("STREAMING", repr(streaming))
    one = jdp_run("--nproc-per-node=2", "--standbys=0", "--max-restarts=3", script=script)
    one.deadline_s = 120.0
    assert one.wait() == 0, one.output
    assert len(one.events("recovered")) == len(kills)
    return sorted(line.split("end ")[1] for line in one.output.splitlines() if " end " in line)


@pytest.mark.processes
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_with_kills_ends_with_the_bits_of_one_without(jdp_run, tmp_path, streaming):
    whole_run = ends_of(jdp_run, {}, streaming=streaming)
    for each in tmp_path.iterdir():
        each.rename(tmp_path.with_name(f"{tmp_path.name}-before-{each.name}"))
    assert len(whole_run) == 2
    kills = {6: 1, 8: 0}  # within a round, and after an outer update
    assert ends_of(jdp_run, kills, streaming=streaming) == whole_run
