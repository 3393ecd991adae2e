"""After a recovery `restore` replaces initial values unseen; the first step compares the rest."""

import re

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("processes")]

# Process 1 dies after step 3. In the next life each process begins with values of its own.
SCRIPT = """
import os
from pathlib import Path
import jax, numpy as np, optax
import jdp

jdp.init()
rank, is_recovery = jax.process_index(), os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
own = 100.0 * rank if is_recovery else 0.0

@jdp.train_step
def step(state, batch):
    grads = jax.grad(lambda params: (batch * (params["w"] + params["v"])).mean())(state.params)
    return state.apply_gradients(grads), {}

def kept(state):
    return {name: state.params[name] for name in KEPT}

batches = jdp.batches(np.full((4, 7), 7.0, np.float32), 4, num_steps=5)
params = {"w": np.full(7, own, np.float32), "v": np.full(7, own, np.float32)}
state = jdp.TrainState.create(params, jdp.replicated(optax.sgd(1.0)))
with jdp.Checkpointer(Path(__file__).parent / "run", commit_every=1) as ckpt:
    restored = ckpt.restore({**state.params}, batches, missing="keep")
    state = state.replace(params=restored)
    for batch in batches:
        state, _ = step(state, batch)
        ckpt.step(kept(state), batches)
        if ckpt.steps == 3 and not is_recovery:
            ckpt._session._commits.wait()
            if rank == 1:
                os._exit(7)
for name, value in state.params.items():
    print("rank", rank, name, *{float(x) for x in value.addressable_data(0)})
"""


def run(jdp_run, kept):
    script = SCRIPT.replace("KEPT", repr(kept))
    one = jdp_run("--nproc-per-node=2", "--standbys=0", "--max-restarts=1", script=script)
    one.deadline_s = 120.0
    return one


def test_initial_values_that_differ_after_a_recovery_are_replaced(jdp_run):
    one = run(jdp_run, ["w", "v"])
    assert one.wait() == 0, one.output
    assert len(one.events("formed")) == 2
    for rank in (0, 1):
        for name in "wv":
            assert f"rank {rank} {name} -5.0\n" in one.output


def test_values_that_were_not_restored_are_compared_by_the_first_step(jdp_run):
    one = run(jdp_run, ["w"])
    assert one.wait() != 0
    assert len(one.events("formed")) == 2
    error = re.search(r"ValueError: (.*JDP204.*)", one.output)[1]
    assert "params['v']" in error and "params['w']" not in error
