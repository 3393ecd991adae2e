"""SIGTERM at an odd moment: all processes save after one step, and --resume loses none."""

import signal

import pytest

SCRIPT = """
import time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, optax
import jdp
from jdp.checkpoint.directory import Folder
folder = Path(__file__).parent
jdp.init()
me = jax.process_index()

# The work that the signal interrupts: in the first life it takes longer, once, than JAX takes to
# notice a signal, which is a second.
def long_work(name):
    works = folder / f"works {me}"
    if name == MOMENT and not works.exists() and not (folder / "resumes").exists():
        works.touch()
        time.sleep(2.5)

def loss_fn(w, batch):
    return jnp.mean((batch["x"] @ w - 1) ** 2)

@jdp.train_step
def step(state, batch):
    long_work("compile")  # while the step is traced
    grads = jax.grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads), {}

@jdp.eval_step
def measure(params, batch):
    return {"loss": loss_fn(params, batch)}

def slowly(batches):
    for batch in batches:
        long_work("evaluate")
        yield batch

write = Folder.write
def write_slowly(*args):
    long_work("save")
    return write(*args)
Folder.write = write_slowly

x = np.random.default_rng(0).normal(size=(42, 5)).astype("float32")
batches = jdp.batches({"x": x}, 6, num_steps=60)
held_out = jdp.batches({"x": x}, 6, epochs=1, shuffle=False, tail="drop")
state = jdp.TrainState.create(jnp.zeros(5), jdp.replicated(optax.sgd(0.1)))
with jdp.Checkpointer(folder / MOMENT, commit_every=3, save_every=5) as checkpointer:
    state = checkpointer.restore(state, batches)
    print("began at", checkpointer.steps)
    for batch in batches:
        state, _ = step(state, batch)
        checkpointer.step(state, batches)
        if checkpointer.steps == 4:
            jdp.evaluate(measure, state.params, slowly(held_out))
        if MOMENT and not (folder / "resumes").exists():
            time.sleep(0.1)
if me == 0:
    print("ended with", np.asarray(state.params).tobytes().hex())
"""


def run_of(jdp_run, moment, *flags):
    script = f"MOMENT = {moment!r}\n{SCRIPT}"
    return jdp_run(
        *("--nproc-per-node=2", "--shutdown-timeout-s=60", *flags),
        **{"script": script, "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"},
    )


def end_of(run):
    [line] = [line for line in run.output.splitlines() if "ended with" in line]
    return line


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.xdist_group("processes")
def test_sigterm_in_the_first_compile_in_evaluate_and_in_a_save_costs_no_step(jdp_run):
    oracle = run_of(jdp_run, "", "--standbys=0")
    assert oracle.wait() == 0, oracle.output
    (oracle.folder / "resumes").touch()
    for moment in "compile", "evaluate", "save":
        (oracle.folder / "resumes").unlink()
        run = run_of(jdp_run, moment, "--standbys=0")
        run.until_true((run.folder / "works 0").exists, f"work: {moment}")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 75, run.output
        assert "--resume" in run.output.splitlines()[-1], run.output
        (run.folder / "resumes").touch()
        again = run_of(jdp_run, moment, "--standbys=0", "--resume")
        assert again.wait() == 0, again.output
        assert "began at 0" not in again.output
        assert end_of(again) == end_of(oracle)
        for mark in run.folder.glob("works *"):
            mark.unlink()
