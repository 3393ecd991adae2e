"""Ray starts the processes of a run, on two nodes, and replaces them. Needs `make test-ray`."""

import contextlib
import importlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from support.launcher import free_port
from support.threads import wait_until

import jdp
from jdp.checkpoint import directory

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: make test-ray", allow_module_level=True)

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240
STEPS = 2000
OPTIONS = [f"--steps={STEPS}", "--save-every=100"]

# Two nodes of one CPU each, until the standard input is closed.
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

node = {"num_cpus": 1, "object_store_memory": 100 << 20}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
cluster.add_node(**node)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture
def folder():
    # The path of a socket of Ray's has about 60 characters below this folder, and at most 107.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        yield folder


@pytest.fixture
def environment(folder):
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    own = {"PYTHONPATH": paths, "JAX_NUM_CPU_DEVICES": "1", "RAY_TMPDIR": folder}
    own |= {"PYTHONDONTWRITEBYTECODE": "1", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}
    return inherited | own | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}


@pytest.fixture
def cluster(folder, environment):
    """The environment of a program that uses a Ray of two nodes."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    nodes = subprocess.Popen([sys.executable, "-c", CLUSTER], env=environment, **pipes)
    try:
        yield environment | {"RAY_ADDRESS": nodes.stdout.readline().strip()}
        nodes.communicate(timeout=240)
        wait_until(lambda: not processes_with(folder), DEADLINE_S)
    finally:
        for pid in processes_with(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def processes_with(text):
    """Return the numbers of the processes that have this text in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


class Run:
    """One run of an example on the nodes."""

    def __init__(self, environment, storage, example="ray_train.py", options=OPTIONS):
        self.checkpoints, self._output = storage / "checkpoints", storage.with_suffix(".out")
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, ROOT / "examples" / example, f"--storage={storage}", *options],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def begins(self):
        """Return `(process, pid, node, step)` of each process that began, in order."""
        line = r"process (\d), pid (\d+) on node (\w+) begins after step (\d+)"
        found = re.findall(line, self.output())
        return [(int(process), int(pid), node, int(step)) for process, pid, node, step in found]

    def output(self):
        return self._output.read_text()

    def saved(self):
        """Return the step of the newest checkpoint, 0 if there is none."""
        folder = directory.Folder(self.checkpoints)
        return max((key.step for key in folder.checkpoints()), default=0)

    def signal(self, process, number):
        """Signal a process of the first generation, when that has saved a checkpoint."""
        self.until(lambda: len(self.begins()) == 2 and self.saved())
        (pid,) = (pid for i, pid, *_ in self.begins() if i == process)
        os.kill(pid, number)

    def until(self, condition):
        wait_until(lambda: condition() or self.process.poll() is not None, DEADLINE_S)
        assert condition(), self.output()

    def finish(self):
        assert self.process.wait(DEADLINE_S) == 0, self.output()
        return jdp.load(self.checkpoints)


# Two processes of one device, as the run has, and no Ray.
WITHOUT = f"""
import sys
import jax, numpy as np, optax, jdp, ray_train
jdp.init()
state = jdp.TrainState.create(ray_train.new_params(), jdp.replicated(optax.sgd(0.05)))
for batch in jdp.batches(ray_train.new_rows(), ray_train.BATCH_SIZE, num_steps={STEPS}, mask=True):
    state, _ = ray_train.step(state, batch)
np.savez(sys.argv[1], **{{name: leaf.addressable_data(0) for name, leaf in state.params.items()}})
"""


@pytest.fixture
def without_ray(environment, tmp_path):
    """The parameters of processes that start by themselves, and of which none dies."""
    coordinator, files = f"127.0.0.1:{free_port()}", [tmp_path / f"{i}.npz" for i in range(2)]
    started = []
    try:
        for i, file in enumerate(files):
            place = {"JAX_COORDINATOR_ADDRESS": coordinator, "JAX_NUM_PROCESSES": "2"}
            place |= {"JAX_PROCESS_ID": str(i)}
            command = [sys.executable, "-c", WITHOUT, file]
            started.append(subprocess.Popen(command, env=environment | place))
        assert [process.wait(DEADLINE_S) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
            process.wait()
    found = [dict(np.load(file)) for file in files]
    jax.tree.map(np.testing.assert_array_equal, *found)
    return found[0]


def on_one_device(example):
    """Return the parameters that the example trains, by SGD without jdp's step."""
    rows, params = example.new_rows(), example.new_params()
    sampler = jdp.Sampler(len(rows["y"]), example.BATCH_SIZE, seed=0)
    grad = jax.jit(jax.grad(lambda params, batch: example.loss_fn(params, {**batch, "mask": True})))
    for _ in range(STEPS):
        chosen = next(sampler)
        grads = grad(params, {name: each[chosen] for name, each in rows.items()})
        params = {name: params[name] - 0.05 * grads[name] for name in params}
    return params


def test_a_run_with_a_killed_process_ends_with_the_bits_of_one_without(
    without_ray, cluster, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(ROOT / "examples")
    example = importlib.import_module("ray_train")
    with Run(cluster, tmp_path / "run") as run:
        run.signal(0, signal.SIGKILL)  # which holds JAX's coordinator, and writes the checkpoints
        found = run.finish()["params"]
    begins = run.begins()
    assert len({node for *_, node, _ in begins[:2]}) == 2
    steps = [[step for i, *_, step in begins if i == process] for process in (0, 1)]
    assert steps[0] == steps[1] and len(steps[0]) == 2, run.output()
    assert 0 == steps[0][0] < steps[0][1] < STEPS
    jax.tree.map(np.testing.assert_array_equal, found, without_ray)
    for name, values in on_one_device(example).items():
        np.testing.assert_allclose(found[name], values, atol=1e-5)


def test_processes_save_at_sigusr1_to_one_and_continue_from_there(cluster, tmp_path):
    with Run(cluster, tmp_path / "run") as run:
        run.signal(1, signal.SIGUSR1)
        run.finish()
    steps = [step for *_, step in run.begins()]
    assert steps[:2] == [0, 0] and steps[2] == steps[3] > 0, run.output()
    assert f"step {steps[2]} is saved" in run.output()


def test_a_killed_actor_and_a_killed_learner_are_replaced_and_rows_are_counted(cluster, tmp_path):
    def new_actors(learner):
        line = rf"pid {learner}\) has the new actors \[(.*)\] after"
        return [int(pid) for found in re.findall(line, run.output()) for pid in found.split(",")]

    with Run(cluster, tmp_path / "run", "ray_actors.py", ["--steps=400"]) as run:
        run.until(lambda: new_actors(r"\d+"))
        learner = re.search(r"pid (\d+)\) has the new actors", run.output())[1]
        os.kill(new_actors(learner)[0], signal.SIGKILL)
        run.until(lambda: len(new_actors(learner)) == 3 and run.saved())
        os.kill(int(learner), signal.SIGKILL)
        assert run.finish()["step"] == 400
    ((rows, steps),) = set(re.findall(r"([\d,]+) rows in (\d+) steps", run.output()))
    assert 0 < int(steps) < 400 and int(steps) % 10 == 0, run.output()
    assert int(rows.replace(",", "")) == int(steps) * 512 * 2


def test_a_wrong_number_ends_the_example_before_ray_starts(environment, tmp_path):
    example = ROOT / "examples" / "ray_train.py"
    command = [sys.executable, example, f"--storage={tmp_path}/run", "--steps=0"]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert ended.returncode == 2 and "--steps" in ended.stderr, ended.stderr
    assert not (tmp_path / "run").exists()
