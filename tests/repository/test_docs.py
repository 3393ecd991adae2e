"""The code and the commands in README.md and docs/ run as they stand."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import free_port

from jdp.launch.options import flags, options

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = [
    *PAGES,
    ROOT / "examples" / "slurm.sh",
    *(ROOT / "examples" / "kubernetes").glob("*.yaml"),
]
DEADLINE_S = 120


def code_blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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
            values = {"$SLURM_NNODES": "2", "$first:29400": "host0:29400"}
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


def run_all(runs, folder, code=0, **variables):
    """Run `jdp run` with each of these arguments, at the same time, and give the outputs."""
    ours = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "jdp", "run", *arguments],
            cwd=folder,
            env={**inherited, "PYTHONPATH": str(ROOT), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for arguments in runs
    ]
    outputs = []
    try:
        for process in started:
            outputs.append(process.communicate(timeout=DEADLINE_S)[0])
            assert process.returncode == code, outputs[-1]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return outputs
