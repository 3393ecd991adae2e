"""What a callback returned is committed and recovered, though JAX puts it on one device alone."""

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("processes")]

# JAX calls the table fully replicated, and only the first device of process 0 has the values.
SCRIPT = """
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


def test_what_a_callback_returned_is_recovered_on_every_rank(jdp_run):
    one = jdp_run("--nproc-per-node=2", "--standbys=0", "--max-restarts=1", script=SCRIPT)
    one.deadline_s = 120.0
    assert one.wait() == 0, one.output
    for rank in (0, 1):
        assert f"rank {rank} 30.0\n" in one.output
