"""A run says once that its processes compile modules, and how to write their bytecode."""

import functools
import os
import signal

import pytest
from support.launcher import free_port

# What the test imports takes no time to compile.
ANY_TIME = """
from jdp.worker import bytecode
bytecode.SLOW_START_S = 0.0
"""
ADVICE = " -m compileall -q -j0 "


def recovered(jdp_run, *flags, **variables):
    """A run of 2 processes, of which one was killed and replaced."""
    run = jdp_run("--nproc-per-node=2", *flags, before=ANY_TIME, **variables)
    os.kill(run.pids(0, 2)[1], signal.SIGKILL)
    run.until("recovered")
    assert run.finish() == 0, run.output
    return run


@pytest.mark.parametrize("standbys", [0, 1])
def test_modules_without_bytecode_are_said_once_in_a_run(jdp_run, tmp_path, standbys):
    cache = str(tmp_path / "cache")
    without = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": cache}
    run = recovered(jdp_run, f"--standbys={standbys}", **without)
    [event] = run.events("compiled_imports")
    assert (event["generation"], event["process_id"]) == (0, 0)
    assert event["modules"] == event["without"] > 0 and event["s"] > 0
    [line] = [line for line in run.output.splitlines() if ADVICE in line]
    assert "process 0 needed " in line and line.endswith(event["command"])
    assert f"{event['without']} of {event['modules']} modules of packages have no bytecode" in line


def test_nothing_is_said_where_the_first_import_has_written_bytecode(jdp_run, tmp_path):
    written = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path / "cache")}
    run = recovered(jdp_run, "--standbys=0", **written)
    assert run.events("compiled_imports") == []
    assert ADVICE not in run.output


def test_a_start_that_is_quick_is_not_said(jdp_run, tmp_path):
    without = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": str(tmp_path / "cache")}
    run = jdp_run(**without)
    assert run.finish(0, 1) == 0
    assert run.events("compiled_imports") == []


def test_each_host_tells_and_the_leader_says_it_once(jdp_run, tmp_path):
    without = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": str(tmp_path / "cache")}
    where = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--nproc-per-node=2"]
    start = functools.partial(jdp_run, *where, before=ANY_TIME, JDP_TOKEN="a secret", **without)
    leads, follows = start("--node-rank=0"), start("--node-rank=1")
    leads.pids(0, 4)
    assert {leads.finish(), follows.finish()} == {0}
    assert [it["process_id"] % 2 for it in leads.events("compiled_imports")] == [0, 0]
    assert (leads.output.count(ADVICE), follows.output.count(ADVICE)) == (1, 0)
