"""The values that processes of a run begin with after a recovery, on every rank."""

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


# A table that a callback returns lies on the first device of process 0 alone.
WITH_TABLE = """
import os
from pathlib import Path
import jax, numpy as np
import jdp

where = jax.sharding.NamedSharding(jdp.init(), jax.sharding.PartitionSpec())
step = jdp.train_step(lambda state, batch: ({"n": state["n"] + 1}, {}))

@jax.jit
def table(n):
    shape = jax.ShapeDtypeStruct((1009,), np.float32)
    return jax.pure_callback(lambda n: np.full(1009, 10 * n, np.float32), shape, n)

batches = jdp.batches(np.zeros((4, 1)), 4, num_steps=3)
state = {"n": jax.device_put(np.float32(0), where)}
with jdp.Checkpointer(Path(__file__).parent / "run", commit_every=1) as ckpt:
    whole = {**state, "table": jax.device_put(np.zeros(1009, np.float32), where)}
    whole = ckpt.restore(whole, batches)
    if ckpt.steps == 3:
        print("rank", jax.process_index(), *{float(x) for x in np.asarray(whole["table"])})
    state = {"n": whole["n"]}
    for batch in batches:
        state, _ = step(state, batch)
        ckpt.step({**state, "table": table(state["n"])}, batches)
        if ckpt.steps == 3:
            ckpt._session._commits.wait()
            os._exit(7)
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


def test_what_a_callback_returned_is_recovered_on_every_rank(jdp_run):
    one = jdp_run("--nproc-per-node=2", "--standbys=0", "--max-restarts=1", script=WITH_TABLE)
    one.deadline_s = 120.0
    assert one.wait() == 0, one.output
    for rank in (0, 1):
        assert f"rank {rank} 30.0\n" in one.output
