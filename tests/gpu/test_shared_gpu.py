"""Two processes on one GPU, under `jdp run`: sums, deaths and a hang.

NCCL refuses two ranks on one GPU unless it is 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

import json
import os
import signal
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1",
        reason="needs NCCL 2.30 or newer, and NCCL_MULTI_RANK_GPU_ENABLE=1",
    ),
]

SCRIPT = Path(__file__).with_name("whole_numbers.py").read_text()


@pytest.fixture
def two(jdp_run, tmp_path):
    """two(variant, *flags): `jdp run` of two processes on the GPU."""

    def two(variant, *flags, steps=12, **environment):
        arguments = {"before": variant, "init": str(tmp_path), "after": str(steps)}
        return jdp_run("--nproc-per-node=2", *flags, script=SCRIPT, **arguments, **environment)

    return two


def reports(folder, num):
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    assert len(found) == num
    assert {each["platform"] for each in found} == {"gpu"}
    return found


@pytest.mark.parametrize("variant", ["xla", "native", "stage1", "stage2", "stage3"])
def test_sums_over_two_processes_are_exact(variant, two, tmp_path):
    run = two(variant, "--standbys=0", "--max-restarts=0")
    assert run.wait() == 0, run.output
    for each in reports(tmp_path, 2):
        assert (each["wrong"], each["processes"]) == (0, 2), run.output


@pytest.mark.parametrize("variant", ["xla", "native", "stage3"])
def test_after_a_kill_the_parameters_are_exact(variant, two, tmp_path):
    (tmp_path / "pause").touch()
    run = two(variant)
    victim = run.pids(0, 2)[1]
    run.until("ready", generation=0)
    os.kill(victim, signal.SIGKILL)
    (tmp_path / "pause").unlink()
    assert run.wait() == 0, run.output
    for each in reports(tmp_path, 2):
        assert each["wrong"] == 0, run.output
        assert each["restored"] > 0, run.output


def test_a_hang_ends_the_run_with_nccls_own_report(two, tmp_path):
    (tmp_path / "pause").touch()
    run = two("xla", "--timeout-s=15", "--standbys=0", "--max-restarts=0")
    assert run.wait() == 124, run.output
    assert "the report of NCCL's RAS service" in run.output
