"""The code and the commands in README.md and docs/ run as they stand."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.launcher import free_port

from jdp.launch import flags, options

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Without Python, and with a script that is run by its command alone.
OTHERS = (
    *("not_proved.md", "quickstart.md", "slow_processes.md", "surprises.md"),
    *("results.md", "why.md"),
)
COMMANDS = [
    *PAGES,
    ROOT / "examples" / "slurm.sh",
    *(ROOT / "examples" / "kubernetes").glob("*.yaml"),
]
DEADLINE_S = 120


def code_blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in OTHERS], ids=lambda page: page.name
)
def test_code_blocks_run_one_after_the_other(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = code_blocks(page, "python")
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_public_name_that_is_mentioned_exists(page):
    import jdp

    for name in re.findall(r"`jdp\.(\w+)", page.read_text()):
        assert name in jdp.__all__, name


def test_the_reference_has_every_public_name_once():
    import jdp

    page = (ROOT / "docs" / "reference" / "index.md").read_text()
    public = {f"jdp.{name}" for name in jdp.__all__}
    public |= {f"jdp.collectives.{name}" for name in jdp.collectives.__all__ if name != "AllReduce"}
    public |= {f"jdp.debug.{name}" for name in jdp.debug.__all__}
    assert sorted(re.findall(r"^::: (\S+)", page, re.M)) == sorted(public)


# The arguments of each `jdp run` in a text: in shell, Markdown or a YAML list.
def jdp_runs(text):
    text = re.sub(r"\\\n\s*", " ", text)
    listed = re.search(r"- jdp\n((?:\s+- \S+\n)+)", text)
    if listed:
        yield re.findall(r"- (\S+)", listed[1])[1:]
    for line in re.findall(r"^\s*(?:srun .*)?jdp run (.+)$", text, re.M):
        yield shlex.split(line, comments=True)


def test_every_command_is_understood(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("token").write_text("secret")
    found = 0
    for path in COMMANDS:
        for arguments in jdp_runs(path.read_text()):
            values = {"$SLURM_NNODES": "2", "$first:$port": "host0:29400"}
            arguments = [values.get(argument, argument) for argument in arguments]
            chosen = options.parse(arguments, {"JDP_TOKEN": "secret"})
            assert chosen.command[0].endswith(".py") or chosen.module, arguments
            found += 1
    assert found >= 5


def test_every_flag_that_running_mentions_exists():
    page = (ROOT / "docs" / "running.md").read_text()
    known = {name for flag in flags.Parser().flags for name in flag.option_strings}
    mentioned = {*re.findall(r"`(--[a-z-]+)", page)}
    assert len(mentioned) > 20 and mentioned <= known, mentioned - known


@pytest.mark.thorough
@pytest.mark.xdist_group("processes")
def test_the_script_of_running_runs_by_its_commands(tmp_path):
    page = ROOT / "docs" / "running.md"
    (tmp_path / "train.py").write_text(code_blocks(page, "python")[0])
    (tmp_path / "token").write_text("secret")
    one_host, both_hosts = [*jdp_runs(page.read_text())][:2]

    (alone,) = run_all([one_host], tmp_path)
    assert "2 ranks, step 200: " in alone
    assert re.search("step 200 .*--resume", run_all([one_host], tmp_path, code=1)[0])

    endpoint = both_hosts.index("--rdzv-endpoint") + 1
    both_hosts[endpoint] = f"localhost:{free_port()}"
    outputs = run_all([["--resume", *both_hosts]] * 2, tmp_path, JDP_STANDBYS="0")
    assert f"host {socket.gethostname()} joined: 2 of 2" in "".join(outputs)


@pytest.mark.thorough
@pytest.mark.xdist_group("processes")
def test_the_quickstart_goes_on_when_a_process_is_killed(tmp_path):
    page = ROOT / "docs" / "quickstart.md"
    script = code_blocks(page, "python")[0]
    assert "num_steps=4000" in script
    (tmp_path / "train.py").write_text(script.replace("num_steps=4000", "num_steps=1000"))
    (command,) = [*jdp_runs(page.read_text())]
    metrics, killed = tmp_path / "metrics.jsonl", []

    def kill_one(run):
        while run.poll() is None and not killed:
            time.sleep(0.01)
            if metrics.exists() and metrics.read_text().count("\n") >= 2:
                pid = re.search(r"pid (\d+) begins after step 0", (tmp_path / "out").read_text())
                os.kill(int(pid[1]), signal.SIGKILL)
                killed.append(pid[1])

    with (tmp_path / "out").open("w") as out, started(command, tmp_path, stdout=out) as run:
        kill_one(run)
        assert run.wait(DEADLINE_S) == 0
    output = (tmp_path / "out").read_text()
    assert killed and f"pid {killed[0]} " in output and "training again" in output, output
    assert [int(n) for n in re.findall(r"begins after step (\d+)", output)][1] >= 190
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == [*range(100, 1001, 100)]
    resumed = run_all([["--resume", *command]], tmp_path)
    assert "begins after step 1000" in resumed[0]
    assert "--resume" in run_all([command], tmp_path, code=1)[0]


@contextlib.contextmanager
def started(arguments, folder, **streams):
    """A `jdp run` with these arguments, which ends with the context."""
    ours = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    process = subprocess.Popen(
        [sys.executable, "-m", "jdp", "run", *arguments],
        cwd=folder,
        env={**inherited, "PYTHONPATH": str(ROOT), **streams.pop("variables", {})},
        stderr=subprocess.STDOUT,
        text=True,
        **streams,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def run_all(runs, folder, code=0, **variables):
    """Run `jdp run` with each of these arguments, at the same time, and give the outputs."""
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(
                started(arguments, folder, stdout=subprocess.PIPE, variables=variables)
            )
            for arguments in runs
        ]
        outputs = []
        for process in running:
            outputs.append(process.communicate(timeout=DEADLINE_S)[0])
            assert process.returncode == code, outputs[-1]
    return outputs
