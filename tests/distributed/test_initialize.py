"""`jdp.init()` finds the other processes, however they were started, and a failure ends all."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from jax._src.clusters import ClusterEnv
from support.processes import free_port

from jdp.distributed import cluster_env
from jdp.distributed.cluster_env import ProcessPlace, find
from jdp.launch.host import spawn

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0

# Variables by which a test run may itself be one of several processes.
FOREIGN = ("OMPI_", "PMIX_", "PMI_", "SLURM_", "KUBERNETES_", "JOB_COMPLETION_INDEX", "JDP_")
FOREIGN += ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "JAX_COORDINATOR", "TORCHELASTIC")
FOREIGN += ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS")
FOREIGN += ("http_proxy", "https_proxy", "grpc_proxy", "no_proxy", "no_grpc_proxy")

PROGRAM = """
import json, sys, time
import jax, jdp
from jdp.distributed import mesh
mesh.HEARTBEAT_TIMEOUT_S = 5
{before}
mesh = jdp.init()
me = jax.process_index()
jdp.init()  # a second one changes nothing
print(json.dumps([me, jax.process_count(), mesh.size]), flush=True)
{after}
"""


def program(before="", after=""):
    return [sys.executable, "-c", PROGRAM.format(before=before, after=after)]


# Each with variables of its own; the children die with us. Gives (exit code, output, errors).
def run(*commands, variables=None):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    inherited |= {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "2"}
    started = []
    try:
        for i, command in enumerate(commands):
            own = {} if variables is None else variables[i]
            started.append(spawn.spawn(command, {**inherited, **own}))
        ended = [process.communicate(timeout=DEADLINE_S) for process in started]
        return [
            (process.returncode, out.decode(), err.decode())
            for process, (out, err) in zip(started, ended, strict=True)
        ]
    finally:
        for process in started:
            spawn.kill(process)
            process.wait()


# What the processes printed, sorted. JAX prints its own lines between.
def found(*ended):
    lines = [line for _, out, _ in ended for line in out.splitlines()]
    return sorted(json.loads(line[line.rindex("[") :]) for line in lines if line.endswith("]"))


def torchrun(num, port):
    return [
        {
            **{"RANK": str(i), "WORLD_SIZE": str(num), "LOCAL_RANK": str(i)},
            **{"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)},
        }
        for i in range(num)
    ]


def jax_names(num, port):
    address = {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": str(num)}
    return [{**address, "JAX_PROCESS_ID": str(i)} for i in range(num)]


def slurm(num, port):
    return [
        {
            **{"SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "0"},
            **{"SLURM_STEP_NUM_TASKS": str(num), "SLURM_STEP_TASKS_PER_NODE": str(num)},
            **{"SLURM_NTASKS": str(num), "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)},
            "JAX_COORDINATOR_PORT": str(port),
        }
        for i in range(num)
    ]


mpiexec = pytest.mark.skipif(shutil.which("mpiexec") is None, reason="there is no mpiexec")
MPIEXEC = ["mpiexec", "--allow-run-as-root", "--oversubscribe", "-n", "2"]

several = pytest.mark.xdist_group("processes")
slow = pytest.mark.slow


@several
def test_processes_of_slurm_find_each_other():
    ended = run(program(), program(), variables=slurm(2, free_port()))
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert found(*ended) == [[0, 2, 4], [1, 2, 4]]


@several
@mpiexec
def test_processes_of_mpiexec_find_each_other():
    [ended] = run([*MPIEXEC, *program()])
    assert ended[0] == 0, ended
    assert found(ended) == [[0, 2, 4], [1, 2, 4]]


RAISE = "if me == 1: raise ValueError('no luck')\ntime.sleep(600)"
# Another hook than ours, and a loop that ends together at the exit.
REPLACED = f"""
sys.excepthook = sys.__excepthook__
loop = jdp.shard_batches(jax.numpy.zeros(2) for _ in range(9))
next(loop)
{RAISE}
"""
EXIT = "if me == 1: sys.exit('no luck')\ntime.sleep(600)"


@several
def test_processes_of_torchrun_find_each_other_and_end_when_one_raises():
    variables = torchrun(2, free_port())
    first, second = run(program(after=RAISE), program(after=RAISE), variables=variables)
    assert found(first, second) == [[0, 2, 4], [1, 2, 4]]
    assert first[0] == -signal.SIGABRT  # JAX's, once the other is silent
    assert second[0] == 1
    assert second[2].endswith("ValueError: no luck\n")


LOADER_RAISES = """
def rows():
    yield jax.numpy.zeros(2)
    if me == 1:
        raise ValueError("no luck")
    yield jax.numpy.zeros(2)
for batch in jdp.shard_batches(rows()):
    pass
"""


@several
def test_the_traceback_of_a_loader_is_printed_before_the_other_process_ends_the_run():
    programs = [program(after=LOADER_RAISES)] * 2
    first, second = run(*programs, variables=torchrun(2, free_port()))
    assert second[0] == 1 and second[2].endswith("ValueError: no luck\n"), second
    assert first[0] == 1 and "no luck" in first[2] and "JDP208" in first[2], first


@pytest.fixture
def silent_proxy():
    """The address of a proxy that takes connections and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@several
def test_processes_do_not_look_for_each_other_behind_a_proxy(silent_proxy):
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), silent_proxy)
    keeps = program(after=f"import os\nassert {proxies!r}.items() <= os.environ.items()")
    ended = run(keeps, keeps, variables=[{**own, **proxies} for own in torchrun(2, free_port())])
    assert found(*ended) == [[0, 2, 4], [1, 2, 4]], ended
    assert [code for code, _, _ in ended] == [0, 0], ended


# Longer than PROGRAM's timeout for heartbeats.
LATER = "if me == 1: time.sleep(8)\nprint('went on')"


@several
def test_a_process_goes_on_after_process_0_has_ended():
    ended = run(*[program(after=LATER)] * 2, variables=jax_names(2, free_port()))
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert all(out.endswith("went on\n") for _, out, _ in ended), ended


@several
def test_a_process_waits_for_a_process_0_that_starts_late():
    programs = program("time.sleep(3)"), program()
    ended = run(*programs, variables=jax_names(2, free_port()))
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert found(*ended) == [[0, 2, 4], [1, 2, 4]]


FORKS = """
import os, signal
child = os.fork()
if not child:
    time.sleep(60)
    os._exit(0)
time.sleep(0.1)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


OWN_HANDLER = "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(7))"


@several
def test_children_that_processes_fork_end_at_sigterm_unless_their_author_handles_it():
    programs = program(after=FORKS), program(before=OWN_HANDLER, after=FORKS)
    ended = run(*programs, variables=torchrun(2, free_port()))
    assert [int(out.split()[-1]) for _, out, _ in ended] == [-signal.SIGTERM, 7], ended


@several
@mpiexec
@slow
def test_an_exception_in_one_process_ends_mpiexec():
    [(code, _, errors)] = run([*MPIEXEC, *program(after=RAISE)])
    assert code == 1
    assert "ValueError: no luck" in errors


@several
@pytest.mark.parametrize(
    ("after", "why"),
    [
        (RAISE, "ValueError: no luck"),
        pytest.param(EXIT, "SystemExit: no luck", marks=[slow]),
        pytest.param(REPLACED, "ValueError: no luck", marks=[slow]),
    ],
)
def test_a_failure_in_one_process_ends_jdp_run_with_the_cause_last(after, why, tmp_path):
    (tmp_path / "train.py").write_text(program(after=after)[-1])
    launch = [sys.executable, "-m", "jdp", "run", "--nproc-per-node", "2", "--max-restarts", "0"]
    [(code, out, errors)] = run(
        [*launch, "--local-ranks-filter", "all", str(tmp_path / "train.py")]
    )
    assert code == 1, errors
    assert [1, 2, 4] in found((code, out, errors))  # the other may not have come so far
    cause = errors[re.search("process 1 .*JDP301", errors).start() :]
    assert f"  {why}\n" in cause


# Process 0 holds the store, and does not answer any more.
STOPS = """
import os, pathlib, signal
from jdp.distributed import kv_store
kv_store.put(f"pid {me}", str(os.getpid()))
pid = kv_store.get(f"pid {1 - me}", timeout_s=60.0)
if me == 0:
    time.sleep(1.0)  # process 1 has its answer
    os.kill(os.getpid(), signal.SIGSTOP)
stat = pathlib.Path("/proc", pid, "stat")
while stat.read_text().rpartition(")")[2].split()[0] != "T":
    time.sleep(0.01)
raise ValueError("no luck")
"""


@several
def test_a_traceback_is_shown_though_process_0_has_stopped():
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    inherited |= {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "2"}
    command = program(before="mesh.HEARTBEAT_TIMEOUT_S = 600", after=STOPS)
    started = [spawn.spawn(command, inherited | own) for own in torchrun(2, free_port())]
    try:
        _, errors = started[1].communicate(timeout=DEADLINE_S)
        assert started[1].returncode == 1 and b"ValueError: no luck" in errors, errors
    finally:
        for process in started:
            spawn.kill(process)
            process.wait()
            process.stdout.close()
            process.stderr.close()


# Process 1 has the batch, and takes no step with it; process 0 never asks for another one.
LEAVES = """
import jax.numpy as jnp, numpy as np, optax
@jdp.train_step
def step(state, rows):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((rows @ w - 1) ** 2))(state.params)
    return state.apply_gradients(grads), jdp.mean_over_ranks(loss)
state = jdp.TrainState.create(jnp.zeros(4), jdp.replicated(optax.sgd(0.1)))
for i, rows in enumerate(jdp.batches(np.ones((12, 4), np.float32), 12, num_steps=9)):
    if me == 1 and i == 3:
        break
    state, loss = step(state, rows)
    float(loss)
"""


@several
def test_a_script_that_ends_before_a_step_of_the_others_is_named_while_they_wait_in_it(tmp_path):
    (tmp_path / "train.py").write_text(program(after=LEAVES)[-1])
    launch = [sys.executable, "-m", "jdp", "run", "--nproc-per-node", "2", "--max-restarts", "0"]
    [(code, _, errors)] = run([*launch, "--shutdown-timeout-s", "1", str(tmp_path / "train.py")])
    cause = re.search("process 1 .*process 0 .* 1 s .*JDP304", errors)
    assert code == 1 and cause, errors


JUMPS = """
import os, pathlib
file, before = pathlib.Path(os.environ["CLOCK_JUMP"]), time.time()
if me == 0:
    file.touch()
    assert time.time() > before + 3600
while not file.exists():
    time.sleep(0.1)
time.sleep(10)
print([me, int(jax.jit(lambda x: x.sum())(jax.numpy.ones(mesh.size)))], flush=True)
"""


@several
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_jump_of_the_wall_clock_ends_no_process_under_jdp_run(tmp_path):
    library = tmp_path / "clock_jump.so"
    source = Path(__file__).with_name("clock_jump.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    (tmp_path / "train.py").write_text(program(after=JUMPS)[-1])
    launch = [sys.executable, "-m", "jdp", "run", "--nproc-per-node", "2", "--max-restarts", "0"]
    variables = {"LD_PRELOAD": str(library), "CLOCK_JUMP": str(tmp_path / "jump")}
    [ended] = run(
        [*launch, "--local-ranks-filter", "all", str(tmp_path / "train.py")], variables=[variables]
    )
    assert ended[0] == 0, ended
    assert [[0, 4], [1, 4]] == [line for line in found(ended) if len(line) == 2]


# What becomes of a SystemExit shows in the exit code of one process alone. Its children are forks,
# since importing JAX takes longest.
LEAVE = """
import _thread, os, sys, threading, time
from jdp.distributed import fail_fast
fail_fast._leave = lambda code, why: os._exit(7)
fail_fast.fail_fast()
for source in sys.argv[1:]:
    if not os.fork():
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]))
else:
    os._exit(0)
exec(source)
"""


def test_only_an_uncaught_exit_with_a_failure_leaves_at_once():
    codes = {
        "sys.exit()": 0,
        "sys.exit(0)": 0,
        "sys.exit(3)": 7,
        "sys.exit(75)": 75,  # all of them do
        "sys.exit('text')": 7,
        "try: sys.exit(3)\nexcept SystemExit: pass": 0,
        "def f():\n  try: sys.exit(3)\n  finally: pass\nf()": 7,
        "threading.Thread(target=sys.exit, args=(3,)).start()": 0,
        "_thread.start_new_thread(sys.exit, (3,)); time.sleep(0.1)": 0,
        "raise ValueError": 7,
        "sys.excepthook = lambda *_: None; raise ValueError": 7,  # as rich.traceback.install() does
        "sys.excepthook = lambda *_: None": 0,
    }
    [(_, out, errors)] = run([sys.executable, "-c", LEAVE, *codes])
    assert dict(zip(codes, map(int, out.split()), strict=True)) == codes, errors


def test_a_process_without_variables_is_alone():
    # An allocation of Slurm without srun: others were never started.
    alone = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "localhost"}
    [ended] = run(program(), variables=[alone])
    assert found(ended) == [[0, 1, 2]], ended


def test_joining_after_jax_has_started_names_the_line_to_move():
    before = "jax.numpy.zeros(1)"
    [(code, _, errors)] = run(program(before), variables=torchrun(2, free_port())[:1])
    assert code == 1
    assert errors.splitlines()[-1].startswith("RuntimeError: jdp.init() ")


def test_a_first_process_that_does_not_come_is_named():
    port = free_port()
    before = "mesh.JOIN_TIMEOUT_S = 0.2"
    [(code, _, errors)] = run(program(before), variables=torchrun(2, port)[1:])
    assert code == 1
    error = errors.splitlines()[-1]
    assert error.startswith("TimeoutError: process 0 ")
    assert "0.2 s" in error and f"localhost:{port}" in error


@several
def test_processes_whose_last_one_does_not_come_end_with_the_address_where_they_meet():
    port = free_port()
    before = "mesh.JOIN_TIMEOUT_S = 4"
    ended = run(*[program(before)] * 2, variables=jax_names(3, port)[:2])
    for process_id, (code, _, errors) in enumerate(ended):
        assert code == 1, errors
        error = errors.splitlines()[-1]
        assert error.startswith(f"TimeoutError: process {process_id} "), errors
        assert "all 3 " in error and "4 s" in error and f"localhost:{port}" in error


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, None),
        ({"WORLD_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "2"}, None),
        (torchrun(2, 7)[1], ProcessPlace("deactivate", 2, 1, "localhost:7", 1)),
        (jax_names(2, 7)[1], ProcessPlace("deactivate", 2, 1, "localhost:7")),
        (jax_names(1, 7)[0], None),
        # One process of Ray, on a host where srun started Ray.
        ({**slurm(2, 7)[1], **jax_names(1, 7)[0]}, None),
        ({"JAX_COORDINATOR_ADDRESS": "a:7"}, None),
        (slurm(2, 7)[1], ProcessPlace("deactivate", 2, 1, "localhost:7", 1, 2)),
        # MPI of Slurm itself, by srun --mpi=pmi2.
        (
            {**slurm(2, 7)[1], "PMI_SIZE": "2", "PMI_RANK": "1"},
            ProcessPlace("deactivate", 2, 1, "localhost:7", 1, 2),
        ),
        (dict.fromkeys([*torchrun(2, 7)[0], *slurm(2, 7)[0]], ""), None),
        (
            {**torchrun(2, 7)[1], "MASTER_ADDR": "fe80::1"},
            ProcessPlace("deactivate", 2, 1, "[fe80::1]:7", 1),
        ),
        ({**slurm(1, 7)[0], "SLURM_NTASKS": "4"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, None),
        ({**slurm(1, 7)[0], "PMIX_RANK": "0"}, None),
    ],
)
def test_a_place_follows_from_the_variables(variables, place):
    assert find(variables) == place


OPEN_MPI = dict(zip(cluster_env._OPEN_MPI, "4302", strict=True))
PMI = dict(zip(cluster_env._PMI, "4312", strict=True))


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (
            {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "1.0;tcp://a:1"},
            ProcessPlace("ompi", 4, 3, None, 0, 2),
        ),
        # Since version 5 only MPI itself knows where the first process is.
        (OPEN_MPI, ProcessPlace("mpi4py", 4, 3, None, 0, 2)),
        (PMI, ProcessPlace("mpi4py", 4, 3, None, 1, 2)),
        # mpiexec in a job of Slurm starts its daemons by srun, one on each host.
        ({**slurm(2, 7)[0], **OPEN_MPI}, ProcessPlace("mpi4py", 4, 3, None, 0, 2)),
        ({**slurm(2, 7)[0], **PMI}, ProcessPlace("mpi4py", 4, 3, None, 1, 2)),
        (
            {"KUBERNETES_SERVICE_HOST": "a", "JOB_COMPLETION_INDEX": "3"},
            ProcessPlace(None, None, 3),
        ),
        ({"KUBERNETES_SERVICE_HOST": "a"}, None),
    ],
)
def test_a_place_follows_from_the_variables_if_the_package_is_installed(
    variables, place, tmp_path, monkeypatch
):
    for package in ("mpi4py", "kubernetes"):
        (tmp_path / f"{package}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert find(variables) == place
    assert place is None or place.method in {
        None,
        *(each.name for each in ClusterEnv._cluster_types),
    }


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "a"}, "WORLD_SIZE=4 .* RANK, MASTER_PORT"),
        (
            {**torchrun(2, 7)[0], "TORCHELASTIC_USE_AGENT_STORE": "True"},
            "MASTER_PORT=7, .* jdp run",
        ),
        (
            {"JAX_NUM_PROCESSES": "4", "JAX_COORDINATOR_ADDRESS": "a:7"},
            "JAX_NUM_PROCESSES=4 .* without JAX_PROCESS_ID",
        ),
        (PMI, "PMI_SIZE=4 .* pip install mpi4py"),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}, "=4 .* SLURM_STEP_NODELIST, SLURM_"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1 .* mpiexec or jdp run"),
        ({**jax_names(2, 7)[0], "JAX_PROCESS_ID": "one"}, "JAX_PROCESS_ID='one'"),
        ({**jax_names(2, 7)[0], "JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID=2 .* 0 to 1, .*=2"),
        ({**jax_names(2, 7)[0], "JAX_COORDINATOR_ADDRESS": "a"}, "=a has no port.* a:29400"),
        ({**torchrun(2, 7)[0], "MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        ({**slurm(2, 7)[0], "SLURM_NODEID": "-1"}, "SLURM_NODEID='-1'"),
        (
            {"KUBERNETES_SERVICE_HOST": "a", "JOB_COMPLETION_INDEX": "3"},
            "JOB_COMPLETION_INDEX=3 .* jdp run --nnodes.* examples/kubernetes/indexed_job.yaml",
        ),
    ],
)
def test_one_of_several_processes_never_trains_alone(variables, text, monkeypatch):
    monkeypatch.setattr(cluster_env.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=text):
        find(variables)


@pytest.mark.parametrize(
    ("local_id", "num_local", "num_gpus", "variables", "devices"),
    [
        (0, 1, 8, {}, []),  # all of them
        (1, 2, 8, {}, [4, 5, 6, 7]),
        (7, 8, 8, {}, [7]),
        (1, 4, 1, {}, []),  # shared, or its own already
        (1, 4, 0, {}, []),
        (1, 2, 4, {"SLURM_GPUS_ON_NODE": "4"}, [2, 3]),
        (1, 2, 8, {"JAX_LOCAL_DEVICE_IDS": "2,3"}, [2, 3]),
        (1, 2, 2, {"SLURM_GPUS_ON_NODE": "4"}, []),  # Slurm gave it two of the four
    ],
)
def test_processes_of_a_host_share_its_gpus(local_id, num_local, num_gpus, variables, devices):
    place = ProcessPlace("slurm", local_id=local_id, num_local=num_local)
    assert place.devices(num_gpus, variables) == devices


@pytest.mark.parametrize("listed", ["all", "0;1", "-1"])
def test_local_devices_that_are_not_numbers_are_refused(listed):
    with pytest.raises(RuntimeError, match=f"JAX_LOCAL_DEVICE_IDS='{listed}'.* 0,1"):
        ProcessPlace("deactivate").devices(8, {"JAX_LOCAL_DEVICE_IDS": listed})


@pytest.mark.parametrize(
    ("tasks", "host", "num"), [("4", 0, 4), ("4(x2),3", 1, 4), ("4(x2),3", 2, 3)]
)
def test_the_number_of_processes_of_a_host_is_that_of_slurm(tasks, host, num):
    variables = {**slurm(2, 7)[0], "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(host)}
    assert find(variables).num_local == num


# As Slurm writes the hosts of a step.
@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        *(("node7", "node7"), ("a,b[1-2]", "a"), ("n[01-03,7]", "n01"), ("n[5]", "n5")),
        *(("node[007,010-015],login", "node007"), ("rack1-n[2-3]-ib,x", "rack1-n2-ib")),
        *(("r[1-2]n[3-4]", "r1n3"), ("10.0.0.[1-4]", "10.0.0.1")),
    ],
)
def test_process_0_listens_on_the_first_host_of_the_step(hosts, first):
    variables = {**slurm(2, 7)[0], "SLURM_STEP_NODELIST": hosts}
    assert find(variables).coordinator == f"{first}:7"


def test_steps_and_jobs_of_slurm_have_ports_of_their_own():
    def port(job, step):
        own = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        variables = {k: v for k, v in slurm(2, 7)[0].items() if k != "JAX_COORDINATOR_PORT"}
        return int(find({**variables, **own}).coordinator.rpartition(":")[2])

    ports = [port(job, step) for job in range(4000, 4200) for step in range(4)]
    assert len({*ports}) == len(ports)
    assert 61440 <= min(ports) and max(ports) <= 65535
    assert port(77, 0) == 61517  # JAX's own
