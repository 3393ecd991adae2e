"""The source of the CUDA kernels on host threads, under ThreadSanitizer, against numpy bit by bit.

`benchmarks/gpu/run_all.sh` runs the tests that need a GPU.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CUDA = Path(__file__).parent / "cuda"
sys.path.insert(0, str(CUDA))

import ring_cases  # noqa: E402 - the folder has no package: another one is called cuda, too

CXX = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
DEADLINE_S = 120


def compiled(folder, name, *flags):
    program = folder / Path(name).stem
    command = [*CXX.split(), "-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror"]
    command += [f"-I{ROOT / 'jdp' / 'csrc'}", f"-I{ROOT / 'benchmarks' / 'gpu'}", *flags]
    command += [str(CUDA / name), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="module")
def host_model(tmp_path_factory):
    if CXX is None:
        pytest.skip("needs a C++ compiler: g++, clang++ or $CXX")
    folder = tmp_path_factory.mktemp("cuda")
    probe = folder / "probe.cc"
    probe.write_text("int main() {}\n")
    linked = subprocess.run(
        [*CXX.split(), "-fsanitize=thread", str(probe), "-o", str(folder / "probe")],
        capture_output=True,
    )
    if linked.returncode or subprocess.run([folder / "probe"], capture_output=True).returncode:
        pytest.skip("ThreadSanitizer does not work here")
    return compiled(folder, "host_model.cc", "-fsanitize=thread")


def differences(host_model, cases, find):
    cases = list(cases)
    results = ring_cases.run([str(host_model)], cases, DEADLINE_S)
    return [found for found in map(find, cases, results) if found]


def test_every_algorithm_and_dtype_equals_the_model_at_the_edges(host_model):
    assert not differences(host_model, ring_cases.small_cases(), ring_cases.difference)


def test_calls_follow_each_other_past_the_largest_message_number(host_model):
    assert not differences(host_model, ring_cases.repeated_cases(30), ring_cases.difference)


@pytest.mark.thorough
def test_a_large_leaf_takes_many_messages(host_model):
    assert not differences(host_model, ring_cases.large_cases(), ring_cases.difference)


def test_a_missing_rank_is_named_and_the_output_is_nan(host_model):
    cases = ring_cases.missing_cases(timeout_ms=100)
    assert not differences(host_model, cases, ring_cases.missing_difference)


def test_an_abort_by_one_host_ends_the_waits_of_all_ranks(host_model):
    assert not differences(host_model, ring_cases.aborted_cases(), ring_cases.aborted_difference)


def test_a_mismatched_bucket_is_named_and_nothing_is_summed(host_model):
    cases = ring_cases.mismatched_cases()
    assert not differences(host_model, cases, ring_cases.mismatched_difference)


@pytest.mark.parametrize("program", ["arena_test.cc", "host_side_test.cc"])
def test_arena_residency_barrier_and_plan_of_the_host(program, tmp_path):
    if CXX is None:
        pytest.skip("needs a C++ compiler: g++, clang++ or $CXX")
    plan = ROOT / "jdp" / "csrc" / "cuda" / "plan.cc"
    done = subprocess.run(
        [compiled(tmp_path, program, str(plan))], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr


def test_a_process_makes_no_context_on_a_gpu_that_it_does_not_drive(tmp_path):
    if CXX is None:
        pytest.skip("needs a C++ compiler: g++, clang++ or $CXX")
    driver = tmp_path / "libcuda.so.1"
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{driver.name}", "-o", str(driver)]
    subprocess.run([*CXX.split(), *flags, str(CUDA / "driver.cc")], check=True)
    linked = ["-Wl,--no-as-needed", str(driver), f"-Wl,-rpath,{tmp_path}", "-ldl"]
    program = compiled(tmp_path, "device_test.cc", f"-I{CUDA / 'stand_in'}", *linked)
    done = subprocess.run([program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr


def test_work_of_a_communicator_is_ordered_and_a_failed_call_leaves_nothing_behind(tmp_path):
    if CXX is None:
        pytest.skip("needs a C++ compiler: g++, clang++ or $CXX")
    names = ["communicator.cc", "peers.cc", "start_finish.cc", "plan.cc"]
    sources = [str(ROOT / "jdp" / "csrc" / "cuda" / name) for name in names]
    flags = [f"-I{CUDA}", f"-I{CUDA / 'stand_in'}", str(CUDA / "stand_in" / "runtime.cc"), "-ldl"]
    program = compiled(tmp_path, "communicator_test.cc", *sources, *flags)
    done = subprocess.run([program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_the_kernels_benchmark_detects_every_wrong_element(tmp_path):
    if CXX is None:
        pytest.skip("needs a C++ compiler: g++, clang++ or $CXX")
    program = compiled(tmp_path, "whole_numbers_test.cc")
    done = subprocess.run([program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
