"""The notebook runs from top to bottom while somebody presses stop. Needs `make test-notebook`."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
DEADLINE_S = 300

# Runs a notebook, and interrupts its kernel when the cell `train` says that it is in a step.
RUN = """
import asyncio, sys
import nbformat
from nbclient import NotebookClient

source, target = sys.argv[1:]
notebook = nbformat.read(source, as_version=4)
(cell,) = [cell for cell in notebook.cells if cell.id == "train"]

async def press_stop(client):
    while "in a step" not in str(cell.outputs):
        await asyncio.sleep(0.01)
    await client.km.interrupt_kernel()

async def run():
    client = NotebookClient(notebook, timeout=120)
    stopping = asyncio.create_task(press_stop(client))
    await client.async_execute()
    await stopping

try:
    asyncio.run(run())
finally:
    nbformat.write(notebook, target)
"""
# In the kernel, behind the cell of that id. The oracle is SGD on one device, without jdp's step.
BEHIND = {
    "batches": """
import time

from jdp.distributed import in_flight
from jdp.training.step import SHIELD

add = in_flight.add


def add_and_wait(call):  # when the old state is donated, and the new one is not returned yet
    add(call)
    if call.number == 250:
        print("in a step", flush=True)
        while not SHIELD._is_due:
            time.sleep(0.01)


in_flight.add = add_and_wait
""",
    "fewer": "on_two = jax.device_get(state)",
    "restore": "restored = jax.device_get(state)",
    "next-text": """
def plain(num_steps):
    sampler = jdp.Sampler(len(digits["label"]), BATCH_SIZE, seed=0)
    tx = optax.sgd(0.05, momentum=0.9)
    params = jax.device_get(new_state().params)

    @jax.jit
    def step(params, opt_state, image, label):
        def loss_fn(params):
            chosen = jnp.take_along_axis(jax.nn.log_softmax(scores(params, image)), label, 1)
            return -chosen.mean()

        updates, opt_state = tx.update(jax.grad(loss_fn)(params), opt_state)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    for i in range(num_steps):
        rows = sampler.rows_at(np.arange(BATCH_SIZE * i, BATCH_SIZE * (i + 1)))
        label = digits["label"][rows][:, None]
        params, opt_state = step(params, opt_state, digits["image"][rows], label)
    return params


assert int(restored.step) == 600 and int(on_two.step) == changed_at + 500
for found in (on_two, restored):
    expected = plain(int(found.step))
    for name, values in expected.items():
        np.testing.assert_allclose(found.params[name], values, atol=1e-4)
""",
}


def cells(path):
    """Return the cells by their ids."""
    return {cell["id"]: cell for cell in json.loads(path.read_text())["cells"]}


def printed(cell):
    """Return what the cell printed."""
    streams = (each for each in cell["outputs"] if each.get("name") == "stdout")
    return "".join("".join(each["text"]) for each in streams)


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    if importlib.util.find_spec("nbclient") is None:
        pytest.skip("nbclient is not installed: make test-notebook")
    folder = tmp_path_factory.mktemp("notebook")
    notebook = json.loads(NOTEBOOK.read_text())
    extended = []
    for cell in notebook["cells"]:
        extended.append(cell)
        if cell["id"] in BEHIND:
            ours = {"cell_type": "code", "id": f"behind-{cell['id']}", "metadata": {}}
            ours |= {"execution_count": None, "outputs": [], "source": BEHIND[cell["id"]]}
            extended.append(ours)
    source, target = folder / "source.ipynb", folder / "target.ipynb"
    source.write_text(json.dumps({**notebook, "cells": extended}))
    own = {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "IPYTHONDIR": str(folder)}
    own |= {"JUPYTER_RUNTIME_DIR": str(folder), "MPLCONFIGDIR": str(folder)}
    ended = subprocess.run(
        [sys.executable, "-c", RUN, source, target],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"} | own,
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return cells(target)


def test_outputs_are_committed_empty():
    code = [each for each in cells(NOTEBOOK).values() if each["cell_type"] == "code"]
    assert code and not any(each["outputs"] or each["execution_count"] for each in code)


def test_an_interrupted_training_continues_with_the_same_bits_and_as_plain_jax(executed):
    names = [each["ename"] for each in executed["train"]["outputs"] if "ename" in each]
    assert names == ["KeyboardInterrupt"]
    step = int(printed(executed["go-on"]).split()[3])
    assert 250 <= step < 10_000
    assert printed(executed["check"]) == f"equal after {step + 500} steps\n"


def test_the_kernel_draws_and_restores(executed):
    assert any("image/png" in each.get("data", {}) for each in executed["plot"]["outputs"])
    assert printed(executed["save"]) == "2 ranks, from step 0\n"
    assert printed(executed["restore"]) == "1 ranks, from step 300\n"
    assert float(printed(executed["load"]).split("%")[0]) > 85
