"""What a callback returned is saved only where each of its devices has the values."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jdp

COMMITTING_A_TABLE = """
import os
from pathlib import Path
import jax, numpy as np
import jdp

where = jax.sharding.NamedSharding(jdp.init(), jax.sharding.PartitionSpec())
step = jdp.train_step(lambda state, batch: ({"n": state["n"] + 1}, {}))

def table(n):
    shape = jax.ShapeDtypeStruct((1009,), np.float32)
    return jax.pure_callback(lambda n: np.full(1009, 10 * n, np.float32), shape, n)

table = jax.jit(tableOPTIONS)
batches = jdp.batches(np.zeros((4, 1)), 4, num_steps=3)
state = {"n": jax.device_put(np.float32(0), where)}
with jdp.Checkpointer(Path(__file__).parent / "run", commit_every=1) as ckpt:
    whole = {**state, "table": jax.device_put(np.zeros(1009, np.float32), where)}
    whole = ckpt.restore(whole, batches)
    if ckpt.steps == 3:
        for shard in whole["table"].addressable_shards:
            print("rank", jax.process_index(), *{float(x) for x in np.asarray(shard.data)})
    state = {"n": whole["n"]}
    for batch in batches:
        state, _ = step(state, batch)
        ckpt.step({**state, "table": table(state["n"])}, batches)
        if ckpt.steps == 3:
            ckpt._session._commits.wait()
            os._exit(7)
"""


def run(jdp_run, options=""):
    script = COMMITTING_A_TABLE.replace("OPTIONS", options)
    one = jdp_run("--nproc-per-node=2", "--standbys=0", "--max-restarts=1", script=script)
    one.deadline_s = 120.0
    return one


@pytest.mark.processes
@pytest.mark.xdist_group("processes")
def test_processes_refuse_to_commit_values_that_only_one_device_has(jdp_run):
    one = run(jdp_run)
    assert one.wait() != 0
    assert "ValueError: `['table']` is on 2 devices" in one.output


@pytest.mark.processes
@pytest.mark.xdist_group("processes")
def test_values_with_the_sharding_that_the_error_asks_for_are_recovered_on_every_rank(jdp_run):
    one = run(jdp_run, ", out_shardings=where")
    assert one.wait() == 0, one.output
    for rank in (0, 1):
        assert f"rank {rank} 30.0\n" in one.output


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_checkpoint_refuses_values_that_only_one_device_has(order, tmp_path):
    def ones(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: np.ones(x.shape, x.dtype), shape, x)

    where = NamedSharding(Mesh([jax.devices()[i] for i in order], "data"), PartitionSpec())
    zeros = jax.device_put(np.zeros(5, np.float32), where)
    with pytest.raises(ValueError, match=r"`\['table'\]` is on 3 devices, .*out_shardings"):
        with jdp.Checkpointer(tmp_path, save_every=1) as ckpt:
            ckpt.restore({"table": zeros})
            ckpt.step({"table": jax.jit(ones)(zeros)})
    with jdp.Checkpointer(tmp_path / "other", save_every=1) as ckpt:
        ckpt.restore({"table": zeros})
        ckpt.step({"table": jax.jit(ones, out_shardings=where)(zeros)})
    np.testing.assert_array_equal(jdp.load(tmp_path / "other", part="table"), np.ones(5))
