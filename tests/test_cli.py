"""`jdp run` understands a command for torchrun, and says what is wrong with a wrong one."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from jdp.__main__ import main
from jdp.launch.options import Options, parse
from jdp.worker import launcher_client
from jdp.worker.local_devices import num_cpus, num_gpus

EXAMPLES = Path(__file__).parents[1] / "examples"


def parsed(line, **environment):
    return parse(line.split(), environment)


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--nproc-per-node 2", "nproc_per_node", (2, 2)),
        ("--nproc-per-node 1:4", "nproc_per_node", (1, 4)),
        ("--max-restarts 0", "max_restarts", 0),
        ("--standbys 1", "standbys", 1),
        ("--timeout-s 1.5", "timeout_s", 1.5),
        ("--join-timeout-s 2", "join_timeout_s", 2.0),
        ("--last-call-timeout-s 2", "last_call_timeout_s", 2.0),
        ("--heartbeat-timeout-s 2", "heartbeat_timeout_s", 2.0),
        ("--shutdown-timeout 2", "shutdown_timeout_s", 2.0),
        ("--shutdown-timeout-s 2", "shutdown_timeout_s", 2.0),
        ("--rdzv-conf join_timeout=3,last_call_timeout=1", "join_timeout_s", 3.0),
        ("--rdzv-conf join_timeout=3 --join-timeout-s 4", "join_timeout_s", 4.0),
        ("--rdzv-id name", "rdzv_id", "name"),
        ("--rdzv-endpoint host0", "rdzv_endpoint", "host0:29400"),
        ("--rdzv-endpoint [fe80::1]:7", "rdzv_endpoint", "[fe80::1]:7"),
        ("--master-addr host0 --master-port 7", "rdzv_endpoint", "host0:7"),
        ("--master-addr host0", "rdzv_endpoint", "host0:29500"),
        ("--rdzv-backend c10d", "command", ("train.py",)),
        ("--rdzv-backend static", "command", ("train.py",)),
        ("--local-addr 10.0.0.2", "local_addr", "10.0.0.2"),
        ("--log-dir logs", "log_dir", Path("logs")),
        ("--log-dir logs --redirects 3", "redirects", {-1: 3}),
        ("--tee 0:1,1:2", "tee", {0: 1, 1: 2}),
        ("--local-ranks-filter 0,2", "local_ranks_filter", {0, 2}),
        ("--local-ranks-filter all", "local_ranks_filter", None),
        ("--standalone", "standalone", True),
        ("--resume", "resume", True),
        ("--no-python", "no_python", True),
        ("--module", "module", True),
    ],
)
def test_flags_are_understood_in_both_spellings(line, name, value):
    assert getattr(parsed(f"{line} train.py"), name) == value
    flags = " ".join(w.replace("-", "_") if w[:2] == "--" else w for w in line.split())
    flags = " ".join("--" + w[2:] if w[:2] == "__" else w for w in flags.split())
    assert getattr(parsed(f"{flags} train.py"), name) == value


def test_nothing_is_needed_but_the_program():
    assert parsed("train.py") == Options(("train.py",))


@pytest.mark.parametrize(
    ("line", "argv"),
    [
        ("train.py --nnodes 3 -m -- x", [sys.executable, *"train.py --nnodes 3 -m -- x".split()]),
        ("-- train.py -- --x", [sys.executable, "train.py", "--", "--x"]),
        ("-m pkg.train --lr 1", [sys.executable, "-m", "pkg.train", "--lr", "1"]),
        ("--no-python ls -l", ["ls", "-l"]),
    ],
)
def test_what_follows_the_program_is_its_own(line, argv):
    assert parsed(line).argv() == argv


def test_the_command_line_comes_before_jdp_variables_and_these_before_torchruns():
    environment = {"PET_MAX_RESTARTS": "1", "PET_STANDBYS": "7", "JDP_MAX_RESTARTS": "2"}
    options = parsed("train.py", **environment, JDP_RESUME="1", JDP_STANDALONE="0")
    assert (options.max_restarts, options.standbys) == (2, 7)
    assert options.resume and not options.standalone
    assert parsed("--max-restarts 3 train.py", **environment).max_restarts == 3


@pytest.mark.parametrize(
    ("value", "resumes"), [("1", True), ("True", True), ("on", True), ("no", False), ("0", False)]
)
def test_a_launcher_reads_a_switch_as_its_processes_do(monkeypatch, value, resumes):
    monkeypatch.setenv("JDP_RESUME", value)
    assert parsed("train.py", JDP_RESUME=value).resume == resumes
    assert launcher_client.is_asked_to_resume() == resumes


def test_a_wrong_variable_is_named():
    with pytest.raises(ValueError, match="PET_NNODES='two': --nnodes"):
        parsed("train.py", PET_NNODES="two")


SEVERAL = "--nnodes 3 --rdzv-endpoint host0 train.py"


@pytest.mark.parametrize(
    "variable", ["JOB_COMPLETION_INDEX", "SLURM_NODEID", "GROUP_RANK", "JDP_NODE_RANK"]
)
def test_a_host_has_the_number_that_its_scheduler_gives_it(variable):
    environment = {"JDP_TOKEN": "secret", variable: "2"}
    assert parsed(SEVERAL, **environment).node_rank == 2
    assert parsed(f"--node-rank 1 {SEVERAL}", **environment).node_rank == 1
    assert parsed("train.py", SLURM_NODEID="2").node_rank is None


# Two hosts of Slurm, and this one of two tasks of the second.
STEP = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}
STEP |= {"SLURM_PROCID": "1", "JDP_TOKEN": "secret"}


def test_in_a_step_on_one_host_the_number_of_slurm_says_nothing():
    # Two launchers in an interactive shell, or a step for each host: all have number 0.
    alone = {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
    assert parsed(SEVERAL, **alone).node_rank is None
    assert parsed(SEVERAL, **STEP).node_rank == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, "4 launchers on 2 hosts.* --ntasks-per-node=1"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID=3, .* 0 to 2, .* at most 3"),
        ({"SLURM_NODEID": "one"}, "SLURM_NODEID=one"),
        ({"JOB_COMPLETION_INDEX": "7"}, "JOB_COMPLETION_INDEX=7.* Kubernetes"),
    ],
)
def test_launchers_that_a_scheduler_cannot_have_meant_are_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        parsed(SEVERAL, **{**STEP, **changes})


@pytest.mark.parametrize(
    ("line", "changes", "warns"),
    [
        ("train.py", {"SLURM_PROCID": "0"}, True),
        ("train.py", {}, False),  # once is enough
        ("--standalone train.py", {"SLURM_PROCID": "0"}, False),
        (SEVERAL, {"SLURM_PROCID": "0"}, False),
        ("train.py", {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),
    ],
)
def test_a_launcher_says_that_the_other_tasks_of_slurm_train_apart(line, changes, warns, capsys):
    parsed(line, **{**STEP, **changes})
    assert ("--nnodes" in capsys.readouterr().err) == warns


def test_standalone_is_one_host_whatever_the_environment_says():
    options = parsed(
        "--standalone train.py", JDP_NNODES="4", JDP_RDZV_ENDPOINT="host0", JDP_NODE_RANK="3"
    )
    assert (options.nnodes, options.rdzv_endpoint, options.node_rank) == ((1, 1), None, None)


def test_the_token_comes_from_a_file_or_a_variable(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    line = f"--token-file {tmp_path}/token {SEVERAL}"
    assert parsed(line, JDP_TOKEN="another").token == "secret"
    assert parsed(SEVERAL, JDP_TOKEN="another").token == "another"


@pytest.mark.parametrize(
    ("line", "num"), [("", 2), ("--standbys 0", 0), ("--standbys 5", 5), ("--max-restarts 0", 0)]
)
def test_as_many_stand_by_as_run_unless_nothing_is_restarted(line, num):
    assert parsed(f"--nproc-per-node 1:2 {line} train.py").num_standbys == num


def test_processes_are_counted_by_what_the_host_has(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    cpus = (num_cpus(), num_cpus())
    for word, number in (("gpu", (3, 3)), ("auto", (3, 3)), ("cpu", cpus)):
        assert parsed(f"--nproc-per-node {word} train.py").nproc_per_node == number
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert parsed("--nproc-per-node auto train.py").nproc_per_node == cpus
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES"):
        parsed("--nproc-per-node gpu train.py")


def test_gpus_are_the_devices_of_the_driver(tmp_path):
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert num_gpus({}, tmp_path) == 2


# CUDA stops at the first name that is not a device. Slurm before 21 hid all GPUs by NoDevFiles.
@pytest.mark.parametrize(
    ("visible", "num"),
    [
        *(("-1", 0), ("-1,0", 0), ("0,,1", 1), ("1, 0", 2), ("1,0,x", 2), ("1,2,0", 1)),
        *(("NoDevFiles", 0), ("none", 0), ("0,1,0", 0), ("00,0", 0), ("", 0), (" 1 ", 1)),
        *(("0 ,1", 2), ("0 1", 1), ("0x0", 1), ("+0,1", 2), ("\t0", 1), ("0x,0", 0)),
        *((" GPU-61c0", 0), ("GPU-61c0, GPU-8932f937", 1), ("GPU-61c0 ,GPU-8932f937", 2)),
        *(("GPU-8932f937,GPU-61c0", 2), ("GPU-61c0,1", 1), ("GPU-61c0,GPU-61c0", 0)),
        # CUDA uses one part of a GPU in a process, whatever is listed.
        *(("MIG-GPU-8932f937/1/2,MIG-GPU-8932f937/1/3", 1), ("MIG-61c0", 1)),
    ],
)
def test_gpus_are_those_that_cuda_sees(visible, num, tmp_path):
    for name in ("nvidia2", "nvidia5", "nvidiactl"):
        (tmp_path / name).touch()
    assert num_gpus({"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == num


def test_numbers_of_gpus_count_where_no_device_file_says_how_many_there_are(tmp_path):
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "2,3"}, tmp_path) == 2  # as under WSL


@pytest.mark.parametrize(
    ("platforms", "num"),
    [("cpu", 0), ("tpu,cpu", 0), ("CPU", 0), ("", 1), ("cuda,cpu", 1), ("cpu, gpu", 1)],
)
def test_a_process_that_jax_keeps_on_cpus_has_no_gpu(platforms, num, tmp_path):
    (tmp_path / "nvidia0").touch()
    assert num_gpus({"JAX_PLATFORMS": platforms}, tmp_path) == num


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "jdp run train.py"),
        ("--nnodes 0 x", "--nnodes.*'0'.* 1:4"),
        ("--nnodes 4:1 x", "--nnodes.*'4:1'"),
        ("--nproc-per-node many x", "--nproc-per-node.*'many'"),
        ("--max-restarts -1 x", "--max-restarts.*'-1'.* 0"),
        ("--timeout-s 0 x", "--timeout-s.*'0'.* 30$"),
        ("--timeout-s nan x", "--timeout-s.*'nan'"),
        ("--rdzv-endpoint host:99999 x", "--rdzv-endpoint.*'host:99999'.*address:port"),
        ("--master-port 99999 x", "--master-port.*'99999'.* 1 to 65535"),
        ("--rdzv-endpoint fe80::1 x", "'fe80::1'.*\\[fe80::1\\]:29400"),
        ("--rdzv-backend etcd x", "'etcd'"),
        ("--rdzv-conf read_timeout=3 x", "'read_timeout'.*join_timeout"),
        ("--tee 4 x", "--tee.*'4'.*0:1,1:2"),
        ("--local-ranks-filter one x", "'one'.* 0,2"),
        ("--redirects 3 x", "--redirects.*--log-dir logs"),
        ("-m --no-python x", "--no-python.* -m "),
        ("--standalone --nnodes 2 x", "--standalone.*--nnodes.* 2"),
        ("--nnodes 2 x", "2 hosts.*--rdzv-endpoint FIRST_HOST:29400"),
        ("--nnodes 2 --rdzv-endpoint a x", "--token-file token.*JDP_TOKEN"),
        ("--node-rank 1 x", "--node-rank 1 .* 0 to 0, .*--nnodes 1"),
        ("--token-file /no/such/file x", "--token-file.*/no/such/file"),
        ("--token-file /dev/null x", "/dev/null.*openssl rand"),
        (f"--token-file {sys.executable} x", "python.* not text.*openssl rand"),
        ("--lr 3 train.py", "--lr.*--help"),
        ("--run-path x", "--run-path"),
        ("--virtual-local-rank x", "--virtual-local-rank"),
        ("--numa-binding node x", "--numa-binding"),
    ],
)
def test_a_wrong_command_says_what_to_write(line, said):
    with pytest.raises(ValueError, match=said):
        parsed(line)


def test_flags_that_mean_nothing_here_are_accepted_with_the_reason(capsys):
    options = parsed("--signals-to-handle=SIGTERM --monitor-interval 0.1 --role trainer train.py")
    assert options == Options(("train.py",))
    said = capsys.readouterr().err.splitlines()
    assert [" ".join(line.split()[:3]) for line in said] == [
        f"jdp run: --{flag}" for flag in ("monitor-interval", "signals-to-handle", "role")
    ]


def test_the_exit_code_of_a_wrong_command_is_2(capsys):
    assert main(["run", "--nnodes", "0", "train.py"]) == 2
    assert capsys.readouterr().err.startswith("jdp run: --nnodes: '0'")
    assert main(["walk"]) == 2
    assert capsys.readouterr().err.endswith("\njdp: the command 'walk' does not exist.\n")
    assert main([]) == 0
    assert "jdp COMMAND" in capsys.readouterr().out


def imported(*arguments):
    """The modules that a Python imports: -X importtime writes a line for each."""
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
    found = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "jdp" in found
    return found


@pytest.mark.parametrize("imports", ["jdp.launch.run", "jdp"])
def test_the_launcher_needs_no_jax(imports):
    assert not {"jax", "numpy", "flax"} & imported("-c", f"import {imports}")


def test_help_imports_what_it_prints_alone():
    unused = {"jax", "numpy", "flax", "socket", "threading", "json", "hashlib", "inspect", "ast"}
    assert not unused & imported("-m", "jdp", "run", "--help")


def test_the_command_for_slurm_is_one_that_jdp_understands(tmp_path):
    stubs = {
        "scontrol": "[ $1 = show ] && printf 'host0\\nhost1\\n' || echo $* >> requeued",
        "srun": 'shift; "$@"',
        "jdp": "printf '%s\\n' \"$@\" > arguments; echo $JDP_TOKEN > token; exit 75",
    }
    for name, text in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "host[0-1]", "SLURM_JOB_ID": "7"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", EXAMPLES / "slurm.sh"], cwd=tmp_path, env={**slurm, "PATH": path}, timeout=240
    )
    command, *arguments = (tmp_path / "arguments").read_text().splitlines()
    token = (tmp_path / "token").read_text().strip()
    options = parse(arguments, {"SLURM_NODEID": "1", "JDP_TOKEN": token})
    assert (command, options.nnodes, options.node_rank) == ("run", (2, 2), 1)
    assert (options.rdzv_endpoint, options.resume) == ("host0:20007", True)
    assert len(token) == 32
    # What was saved is gone on with.
    assert ended.returncode == 75
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def test_the_version_is_that_of_the_installed_package():
    program = "import jdp, sys; print(jdp.__version__, 'jax' in sys.modules)"
    shown, named = (
        subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, check=True, timeout=240
        ).stdout.split()
        for command in (["-m", "jdp", "--version"], ["-c", program])
    )
    try:
        right = metadata.version("jdp")
    except metadata.PackageNotFoundError:
        right = "0+unknown"
    assert shown == ["jdp", right] and named == [right, "False"]


@pytest.mark.parametrize(
    "command", ["--help", "explain-error --help", "plan --model params=1e9,layers=4,tokens=64"]
)
def test_a_reader_that_closes_the_output_ends_a_command_without_a_traceback(command):
    command = [sys.executable, "-m", "jdp", *command.split()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(timeout=240)
    assert (process.returncode, errors) == (141, b"")


def test_a_command_whose_output_is_closed_ends_without_a_traceback():
    command = f"'{sys.executable}' -m jdp explain-error JDP101 >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, timeout=240)
    assert (done.returncode, done.stderr) == (0, b"")
