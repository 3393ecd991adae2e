"""Manifests in examples/kubernetes fit the published schemas, and their pods find each other."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import kubeflow_trainer_api.models as schemas
import pytest
import yaml
from support.launcher import free_port

from jdp.distributed.cluster_env import find
from jdp.launch.options import parse
from jdp.worker.exit_codes import SAVED

ROOT = Path(__file__).parents[2]
FILES = (ROOT / "examples" / "kubernetes").glob("*.yaml")
MANIFESTS = {file.stem: [*yaml.safe_load_all(file.read_text())] for file in FILES}
LAUNCHED = ["indexed_job", "jobset"]
SCHEMAS = {
    "Service": schemas.IoK8sApiCoreV1Service,
    "Job": schemas.IoK8sApiBatchV1Job,
    "JobSet": schemas.JobsetV1alpha2JobSet,
    "ClusterTrainingRuntime": schemas.TrainerV1alpha1ClusterTrainingRuntime,
    "TrainJob": schemas.TrainerV1alpha1TrainJob,
}
DEADLINE_S = 120
TRAIN = """
import jax, jax.numpy as jnp, numpy as np, optax, jdp
mesh = jdp.init()
@jdp.train_step
def step(state, batch):
    grads = jax.grad(lambda w, batch: jnp.mean(batch["x"] @ w))(state.params, batch)
    return state.apply_gradients(grads), {}
state = jdp.TrainState.create(jnp.zeros(2), jdp.replicated(optax.sgd(1.0)))
x = np.array([[1, 0], [3, 4]], np.float32)
for batch in jdp.batches({"x": x}, 2, num_steps=1):
    state, _ = step(state, batch)
print("found", jax.process_index(), "of", mesh.size, state.params.tolist())
"""


class Pod(NamedTuple):
    """A pod as a controller makes it."""

    address: str  # by which the other pods of the namespace reach it
    environment: dict[str, str]
    command: list[str]
    job: dict  # the specification of its Job


# What each controller does with its manifests, by its documentation.
def pods_of(name):
    *others, last = copy.deepcopy(MANIFESTS[name])
    own_name, spec = last["metadata"]["name"], last["spec"]
    if last["kind"] == "Job":
        return pods_of_job(own_name, spec, spec["template"]["spec"]["subdomain"])
    variables = {}
    if last["kind"] == "TrainJob":
        [runtime] = others
        assert spec["runtimeRef"]["name"] == runtime["metadata"]["name"]
        num = str(spec["trainer"]["numNodes"])
        address = {"JAX_COORDINATOR_ADDRESS": f"{own_name}-node-0-0.{own_name}:29400"}
        variables = {"JAX_NUM_PROCESSES": num, "JAX_PROCESS_ID": None, **address}
        trainer, spec = spec["trainer"], runtime["spec"]["template"]["spec"]
        [replicated] = spec["replicatedJobs"]
        [container] = replicated["template"]["spec"]["template"]["spec"]["containers"]
        assert replicated["name"] == container["name"] == "node"
        replicated["template"]["spec"] |= {"completions": int(num), "parallelism": int(num)}
        container |= {"command": trainer["command"]}
    [replicated] = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    return pods_of_job(f"{own_name}-{replicated['name']}-0", job, own_name, variables)


def pods_of_job(name, job, subdomain, variables=None):
    assert job["completions"] == job["parallelism"]
    [container] = job["template"]["spec"]["containers"]
    pods = []
    for i in range(job["completions"]):
        indexed = {
            key: str(i) if value is None else value for key, value in (variables or {}).items()
        }
        own = {each["name"]: each.get("value", "secret") for each in container.get("env", ())}
        environment = {**own, **indexed, "JOB_COMPLETION_INDEX": str(i)}
        environment |= {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
        pods.append(Pod(f"{name}-{i}.{subdomain}", environment, container["command"], job))
    return pods


# The models drop the fields that they do not know.
@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_have_the_fields_and_types_of_the_published_schemas(name):
    for manifest in MANIFESTS[name]:
        assert SCHEMAS[manifest["kind"]].from_dict(manifest).to_dict() == manifest


def test_an_unknown_field_and_a_wrong_type_do_not_fit():
    _, job = copy.deepcopy(MANIFESTS["indexed_job"])
    job["spec"]["backoffLimits"] = 4
    assert SCHEMAS["Job"].from_dict(job).to_dict() != job
    job["spec"]["backoffLimit"] = "4"
    with pytest.raises(ValueError, match="backoffLimit"):
        SCHEMAS["Job"].from_dict(job)


@pytest.mark.parametrize("name", LAUNCHED)
def test_launchers_meet_at_the_first_pod_and_save_within_the_grace_period(name):
    pods = pods_of(name)
    for i, pod in enumerate(pods):
        assert pod.command[:2] == ["jdp", "run"]
        options = parse(pod.command[2:], pod.environment)
        assert (options.nnodes, options.node_rank) == ((len(pods), len(pods)), i)
        assert options.rdzv_endpoint == f"{pods[0].address}:29400"
        assert options.resume
        grace_s = pod.job["template"]["spec"]["terminationGracePeriodSeconds"]
        assert options.shutdown_timeout_s < grace_s


def test_what_the_page_says_for_going_on_without_pod_0_fits_the_indexed_job():
    page = (ROOT / "docs" / "running.md").read_text()
    (flags,) = re.findall(r"`(--nnodes=1:2 [^`]*)`", page)
    (policy,) = re.findall(r"`(successPolicy: [^`]*)`", page)
    pods = pods_of("indexed_job")
    options = parse([*flags.split(), "train.py"], pods[1].environment)
    assert options.endpoints == [(pod.address, 29400) for pod in pods]
    assert (options.nnodes, options.node_rank) == ((1, 2), 1)
    job = copy.deepcopy(MANIFESTS["indexed_job"][-1])
    job["spec"] |= yaml.safe_load(policy)
    assert SCHEMAS["Job"].from_dict(job).to_dict() == job


def test_the_service_of_an_indexed_job_gives_its_pods_names_before_they_are_ready():
    service, job = MANIFESTS["indexed_job"]
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == (
        "None",
        True,
    )


def test_processes_of_kubeflow_are_numbered_by_its_variables():
    pods = pods_of("kubeflow")
    assert [find(pod.environment).process_id for pod in pods] == [0, 1]
    for pod in pods:
        place = find(pod.environment)
        assert (place.num_processes, place.coordinator) == (2, f"{pods[0].address}:29400")
        assert pod.environment["JDP_RESUME"] == "1"


@pytest.mark.parametrize("name", MANIFESTS)
def test_an_eviction_and_the_saves_that_follow_it_do_not_count_as_failures(name):
    job = pods_of(name)[0].job
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    evicted, saved, *_ = job["podFailurePolicy"]["rules"]
    assert pod["restartPolicy"] == "Never"  # Kubernetes refuses a podFailurePolicy otherwise
    assert evicted == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    assert (saved["action"], saved["onExitCodes"]["values"]) == ("Ignore", [SAVED])
    assert saved["onExitCodes"]["containerName"] == container["name"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_pods_have_gpus_and_shared_memory(name):
    pod = pods_of(name)[0].job["template"]["spec"]
    [container] = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] > 0
    [volume] = [x["name"] for x in container["volumeMounts"] if x["mountPath"] == "/dev/shm"]
    [shared] = [each["emptyDir"] for each in pod["volumes"] if each["name"] == volume]
    assert shared["medium"] == "Memory"


# JobSet's pods run the command of the Indexed Job, but for the address.
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("name", ["indexed_job", "kubeflow"])
def test_pods_train_together_in_the_environment_of_the_manifest(name, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    pods, port = pods_of(name), str(free_port())

    # All names lead to this machine, where each pod has a folder of its own.
    def here(text, i):
        for pod in pods:
            text = text.replace(pod.address, "localhost")
        return text.replace("29400", port).replace("/logs", f"{tmp_path}/logs_{i}")

    jdp = {"jdp": [sys.executable, "-m", "jdp"], "python": [sys.executable]}
    ours = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PYTHONPATH": str(ROOT)}
    ours |= {"JAX_PLATFORMS": "cpu", "JDP_STANDBYS": "0"}
    started = []
    try:
        for i, (_, variables, (first, *rest), _) in enumerate(pods):
            environment = ours | {key: here(value, i) for key, value in variables.items()}
            command = [*jdp[first], *(here(argument, i) for argument in rest)]
            started.append(
                subprocess.Popen(
                    command,
                    cwd=tmp_path,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0, 0], outputs
    for i, output in enumerate(outputs):
        assert f"found {i} of 2 [-2.0, -2.0]" in output, outputs
    if name == "indexed_job":
        [container] = pods[0].job["template"]["spec"]["containers"]
        *shell, text = container["readinessProbe"]["exec"]["command"]
        for i in range(2):
            subprocess.run([*shell, here(text, i)], check=True, timeout=240)
        assert subprocess.run([*shell, here(text, 2)], timeout=240).returncode
