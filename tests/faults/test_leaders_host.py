"""The leader's host of three is lost, and then that of the next leader: the last one goes on."""

import contextlib
import json
import subprocess

import numpy as np
import pytest
from support.launcher import PatientLauncher
from support.namespaces import several_hosts, why_no_namespaces

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.slow]

PORT = 29400
NUM_STEPS, NUM_ROWS, BATCH_SIZE = 36, 36, 12

# All sums and means of gradients are exact on 1, 2 and 3 ranks, so the result is that of any order.
SCRIPT = f"""
import json, sys, time
from functools import partial
from pathlib import Path
import jax, numpy as np, optax
import jdp

folder, optimizer = Path(sys.argv[1]), optax.sgd(0.5)
kind = jdp.replicated if sys.argv[2] == "replicated" else partial(jdp.sharded, stage=3, min_size=1)
x = np.load(folder / "x.npy")


@jdp.train_step
def step(state, batch):
    loss_fn = lambda params, batch: (batch["x"] @ params["w"]).sum() + params["v"].sum()
    loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
    grads = jax.tree.map(lambda leaf: leaf / batch["x"].shape[0], grads)
    return state.apply_gradients(grads), {{"loss": loss}}


mesh = jdp.init()
params = {{"w": np.zeros(6, "float32"), "v": np.zeros(5, "float32")}}  # 6 is split over 2 and 3
state = jdp.TrainState.create(params, kind(optimizer))
batches = jdp.batches({{"x": x}}, {BATCH_SIZE}, num_steps={NUM_STEPS})
with jdp.Checkpointer(folder / "checkpoints", commit_every=1) as checkpointer:
    state = checkpointer.restore(state, batches)
    for batch in batches:
        while checkpointer.steps >= int((folder / "leash").read_text()):
            time.sleep(0.01)
        state, _ = step(state, batch)
        checkpointer.step(state, batches)
        (folder / f"{{mesh.size}} ranks at {{checkpointer.steps}}").touch()
np.save(folder / "final.npy", state.params["w"])
(folder / "sizes").write_text(json.dumps(mesh.size))
"""


def start(folder, rank, within, kind):
    own = folder / f"host{rank}"
    own.mkdir()
    endpoints = ",".join(f"10.83.0.{i + 1}:{PORT}" for i in range(3))
    return PatientLauncher(
        own,
        *("--nnodes=1:3", f"--rdzv-endpoint={endpoints}", f"--node-rank={rank}"),
        *("--standbys=0", "--heartbeat-timeout-s=2"),
        script=SCRIPT,
        before=str(folder),
        init=kind,
        within=within,
        JAX_NUM_CPU_DEVICES="1",
        JDP_TOKEN="a secret",
    )


@pytest.mark.parametrize(
    "kind", [pytest.param("replicated", marks=pytest.mark.thorough), "sharded"]
)
def test_the_loss_of_two_leaders_costs_no_bits(tmp_path, kind):
    if reason := why_no_namespaces():
        pytest.skip(reason)
    x = 36.0 * np.random.default_rng(0).integers(-8, 8, size=(NUM_ROWS, 6)).astype("float32")
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "leash").write_text("9")
    with several_hosts(3) as within, contextlib.ExitStack() as stack:
        first, second, third = hosts = [start(tmp_path, i, within[i], kind) for i in range(3)]
        for host in hosts:
            stack.callback(host.close)
        first.until_true((tmp_path / "3 ranks at 9").exists, "step 9 of all hosts")

        # Nobody is told that a wire is cut. The others are a majority, and the leader is not.
        subprocess.run([*within[0], "ip", "link", "set", "wire", "down"], check=True)
        (tmp_path / "leash").write_text("20")
        second.until_true((tmp_path / "2 ranks at 20").exists, "step 20 of two hosts")
        [ended], [formed] = first.until("generation ended"), second.events("formed")
        assert ended["at"] < formed["at"], "processes of two generations ran at the same time"
        assert not first.alive() and len(first.events("formed")) == 1
        first.process.kill()

        second.until("recovered")
        second.process.kill()
        (tmp_path / "leash").write_text(str(NUM_STEPS))
        assert third.wait() == 0, third.output
        assert [event["num_processes"] for event in third.events("formed")] == [1]
        [recovered] = third.events("recovered")
        assert recovered["lost_steps"] <= 1 and "JDP311" in recovered["error_codes"]
        assert third.events("progress")[-1]["recoveries"] == 2
    assert json.loads((tmp_path / "sizes").read_text()) == 1
    num_epochs = NUM_STEPS * BATCH_SIZE // NUM_ROWS
    expected = -0.5 * num_epochs * x.sum(0) / BATCH_SIZE
    assert np.load(tmp_path / "final.npy").tobytes() == expected.tobytes()
