"""Jobs of a real Slurm, of two nodes on this machine, train the exact parameters of one process."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.processes import free_port
from support.slurm import NODES, Slurm, missing

from jdp.checkpoint import directory

ROOT = Path(__file__).parents[2]
DEADLINE_S = 150.0
STEPS = 12

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

# The columns of x are orthogonal and x.T @ x / 8 = 1, so that each step halves the distance to the
# solution. All numbers are exact in float32.
TRAIN = """
import json, os, sys, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, optax, jdp

folder, slow = Path(sys.argv[1]), len(sys.argv) > 2
mesh = jdp.init()
h = np.array([[1, 1], [1, -1]], "float32")
x = np.kron(np.kron(h, h), h)[:, :4]
rows = {"x": x, "y": x @ np.array([1, -2, 3, 5], "float32")}
state = jdp.TrainState.create({"w": jnp.zeros(4)}, jdp.replicated(optax.sgd(0.5)))

def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2) / 2

@jdp.train_step
def step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}

checkpoints = os.environ.get("JDP_TEST_CHECKPOINTS", folder / "checkpoints")
batches = jdp.batches(rows, batch_size=8, num_steps=12, seed=0)
with jdp.Checkpointer(checkpoints, save_every=100) as checkpointer:
    state = checkpointer.restore(state, batches)
    first = checkpointer.steps
    for batch in batches:
        state, metrics = step(state, batch)
        checkpointer.step(state, batches)
        if slow and first == 0:
            (folder / f"stepped-{jax.process_index()}").touch()
            time.sleep(1)
each = [np.asarray(s.data).tolist() for s in state.params["w"].addressable_shards]
facts = {"ranks": mesh.size, "processes": jax.process_count(), "first": first, "w": each}
job = os.environ["SLURM_JOB_ID"]
(folder / f"ended-{job}-{jax.process_index()}").write_text(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    reason = missing()
    if reason:
        pytest.skip(reason)
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.fixture
def variables():
    path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/bin"
    own = {"PATH": path, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "2"}
    return {**own, "JAX_PLATFORMS": "cpu"}


# Two tasks of a node are processes that find each other at the port which JAX takes from the job.
def command(folder, *more):
    return [sys.executable, folder / "train.py", folder, *more]


def facts_of(folder, num_processes, num_jobs=1):
    ended = [json.loads(file.read_text()) for file in sorted(folder.glob("ended-*"))]
    assert len(ended) == num_processes * num_jobs
    for each in ended:
        assert (each["processes"], each["ranks"]) == (num_processes, 2 * num_processes)
        # A rank's copy is exact: the distance to the solution was halved STEPS times.
        exact = np.array([1, -2, 3, 5], "float32") * np.float32(1 - 0.5**STEPS)
        assert each["w"] == [exact.tolist()] * 2
    return ended


def wait_for(condition, slurm):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, slurm.command("scontrol", "show", "jobs")
        time.sleep(0.2)


def test_tasks_of_srun_on_two_nodes_are_the_processes_of_one_run(slurm, folder, variables):
    ended = slurm.run("srun", "-N2", "-n4", *command(folder), variables=variables)
    assert ended.returncode == 0, ended.stderr
    facts_of(folder, num_processes=4)


# On one node: with PMIx, Slurm 22.05 could not start tasks on two nodes of one host.
def test_tasks_of_srun_with_pmix_are_the_processes_of_one_run(slurm, folder, variables):
    loads = slurm.run("srun", "-N1", "-n1", "--mpi=pmix", "printenv", "PMIX_RANK")
    if loads.returncode != 0 and "load" in loads.stderr:
        pytest.skip(f"Slurm cannot load PMIx: {loads.stderr}")
    assert loads.stdout == "0\n", loads.stderr
    arguments = ("-N1", "-n2", "--mpi=pmix", *command(folder))
    ended = slurm.run("srun", *arguments, variables=variables)
    assert ended.returncode == 0, ended.stderr
    facts_of(folder, num_processes=2)


GPUS = """
import json, os
from jdp.distributed.cluster_env import find
visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
numbers = find(os.environ).devices(len(visible), os.environ)
print(json.dumps([visible[i] for i in numbers] or visible))
"""


# The scheduler binds two GPUs to each task, or all tasks see all four.
@pytest.mark.parametrize("flags", [("--gpus-per-task=2",), ("--gpus-per-node=4",)])
def test_tasks_of_a_node_take_different_gpus(slurm, variables, flags):
    arguments = ("-N1", "-n2", *flags, sys.executable, "-c", GPUS)
    ended = slurm.run("srun", *arguments, variables=variables)
    assert ended.returncode == 0, ended.stderr
    taken = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [len(each) for each in taken] == [2, 2]
    assert len({gpu for each in taken for gpu in each}) == 4


def test_a_script_without_srun_trains_alone(slurm, folder, variables):
    # The batch script sees SLURM_NTASKS=4, and three tasks that nobody starts.
    script = folder / "job.sh"
    words = " ".join(map(str, command(folder)))
    script.write_text(f"#!/bin/bash\necho tasks $SLURM_NTASKS\nexec {words}\n")
    output = folder / "output"
    ended = slurm.run(
        *("sbatch", "--wait", "-N2", "-n4", f"--output={output}", script), variables=variables
    )
    assert ended.returncode == 0, output.read_text()
    assert "tasks 4" in output.read_text()
    facts_of(folder, num_processes=1)


# They run at the same time on the same node, where JAX would take one port for both.
def test_steps_of_a_job_train_apart(slurm, folder, variables):
    words, steps = " ".join(map(str, command(folder)[:2])), []
    for name in "ab":
        (folder / name).mkdir()
        steps.append(f"srun --overlap -N1 -n2 {words} {folder}/{name} || touch {folder}/failed &")
    script = folder / "job.sh"
    script.write_text("\n".join(["#!/bin/bash", *steps, "wait"]))
    arguments = ("sbatch", "--wait", "-N1", "-n4", f"--output={folder}/output", script)
    ended = slurm.run(*arguments, variables=variables)
    assert ended.returncode == 0 and not (folder / "failed").exists(), (
        folder / "output"
    ).read_text()
    for name in "ab":
        facts_of(folder / name, num_processes=2)


def test_jobs_of_an_array_train_apart(slurm, folder, variables):
    script = folder / "job.sh"
    words = " ".join(map(str, command(folder)))
    checkpoints = f"export JDP_TEST_CHECKPOINTS={folder}/checkpoints-$SLURM_ARRAY_TASK_ID"
    script.write_text(f"#!/bin/bash\n{checkpoints}\nsrun {words}\n")
    ended = slurm.run(
        *("sbatch", "--wait", "--array=0-1", "-N1", "-n2", "-c1"),
        *(f"--output={folder}/output-%a", script),
        variables=variables,
    )
    outputs = [file.read_text() for file in sorted(folder.glob("output-*"))]
    assert ended.returncode == 0, outputs
    facts_of(folder, num_processes=2, num_jobs=2)


# srun hands SIGUSR1 on; at SIGTERM it kills its tasks.
HANDS_ON = """#!/bin/bash
trap 'kill -USR1 $step' USR1
srun --kill-on-bad-exit=0 {words} &
step=$!
wait $step  # until the signal
wait $step
"""


@pytest.mark.parametrize("to", [(), ("--batch",)], ids=["tasks", "batch script"])
def test_tasks_of_srun_save_at_sigusr1(slurm, folder, variables, to):
    script = folder / "job.sh"
    script.write_text(HANDS_ON.format(words=" ".join(map(str, command(folder, "slow")))))
    arguments = ("sbatch", "--parsable", "-N2", "-n2", f"--output={folder}/output", script)
    number = slurm.run(*arguments, variables=variables).stdout.strip()
    wait_for(lambda: len([*folder.glob("stepped-*")]) == len(NODES), slurm)
    slurm.run("scancel", "--signal=USR1", *to, number)
    show = ("scontrol", "show", "job", number)
    wait_for(lambda: "JobState=RUNNING" not in slurm.command(*show), slurm)
    assert "ExitCode=75:0" in slurm.command(*show), (folder / "output").read_text()
    (saved,) = directory.Folder(folder / "checkpoints").checkpoints()
    assert 0 < saved.step < STEPS


def test_the_example_is_requeued_after_sigterm_and_resumes(slurm, folder, variables):
    text = (ROOT / "examples" / "slurm.sh").read_text()
    assert "$first:$port" in text
    text = text.replace("$first:$port", f"$first:{free_port()}")
    (folder / "slurm.sh").write_text(text.replace(" train.py\n", f" train.py {folder} slow\n"))
    python = Path(sys.executable)
    (folder / "jdp").write_text(f'#!/bin/sh\nexec {python} -m jdp "$@"\n')
    (folder / "jdp").chmod(0o755)
    variables["PATH"] = f"{folder}:{variables['PATH']}"
    output = folder / "output"
    job = slurm.run(
        *("sbatch", "--parsable", f"--output={output}", "--open-mode=append", "slurm.sh"),
        variables=variables,
        cwd=folder,
    )
    assert job.returncode == 0, job.stderr
    number = job.stdout.strip()
    wait_for(lambda: len([*folder.glob("stepped-*")]) == len(NODES), slurm)
    # To the launchers alone, as Slurm does before the time limit.
    slurm.run("scancel", "--signal=TERM", number)
    show = ("scontrol", "show", "job", number)
    wait_for(lambda: "JobState=COMPLETED" in slurm.command(*show), slurm)
    assert "Restarts=1" in slurm.command(*show)
    assert all(0 < each["first"] < STEPS for each in facts_of(folder, len(NODES)))
