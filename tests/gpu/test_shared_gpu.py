"""Two processes on one GPU, under `jdp run`: sums, deaths and a hang.

NCCL refuses two ranks on one GPU unless it is 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from support import profiled

from jdp.tools.profiling import trace_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1",
        reason="needs NCCL 2.30 or newer, and NCCL_MULTI_RANK_GPU_ENABLE=1",
    ),
]

SHAPES = ("a", "b", "c", "d", "e")
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


def test_two_processes_take_no_more_memory_than_one_where_the_variable_is_empty(two, tmp_path):
    run = two("xla", "--standbys=0", XLA_CLIENT_MEM_FRACTION="")
    assert run.wait() == 0, run.output
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    total = 2**20 * float(subprocess.check_output(query, text=True).splitlines()[0])
    assert sum(each["memory_bytes"] for each in reports(tmp_path, 2)) <= 0.8 * total


# On GPUs the native kernels are those of jdp's split pair.
@pytest.mark.parametrize(
    ("variant", "algorithm"), [("xla", "xla"), ("native", "split"), ("stage3", "xla")]
)
def test_each_sum_in_a_profile_has_the_names_of_its_leaves(variant, algorithm, two, tmp_path):
    (tmp_path / "profile").mkdir()
    run = two(variant, "--standbys=0")
    assert run.wait() == 0, run.output
    require_named(tmp_path / "profile", algorithm)


def require_named(folder, algorithm):
    for rank in range(2):
        trace = profiled.read(folder, rank)
        steps = [each.facts["step"] for each in profiled.of_rank(trace, rank, trace_file.STEP)]
        assert steps == [4, 5] and not trace.facts["notes"]
        sent = profiled.of_rank(trace, rank, trace_file.COMMUNICATION)
        assert not [each.name for each in sent if "collective" not in each.facts]
        sums = [x for x in sent if x.facts["collective"] in ("all-reduce", "reduce-scatter")]
        leaves = {leaf for each in sums for leaf in each.facts["leaves"]}
        assert leaves >= {f"grads['{name}']" for name in SHAPES}, leaves
        large = [x for x in sums if x.facts["bytes"] > 1000]
        assert {each.facts["algorithm"] for each in large} == {algorithm}
