"""The C++ tests of the native all-reduce, as they are and under sanitizers."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "jdp" / "csrc" / "cpu"
# The XLA custom call is tested through JAX.
LIBRARY = [
    path for path in SOURCES.glob("*.cc") if path.stem not in ("ffi_cpu", "ffi_copy", "c_api")
]
TESTS = sorted((ROOT / "tests" / "csrc" / "cpu").glob("*_test.cc"))
CXX = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or "c++"
# -g1: lines and functions for the stacks that sanitizers print, in two thirds of the time of -g.
FLAGS = ["-std=c++17", "-g1", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-pthread"]

# Compiler flags, and the number of small steps: sanitizers make them slow.
MODES = {
    "plain": (["-O3"], 30_000),
    "threads": (["-O1", "-fsanitize=thread"], 500),
    "memory": (["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"], 500),
}
# Through JAX, other tests run the library as it is; sanitizers find more in fewer steps.
MARKS = {
    "plain": [pytest.mark.thorough],
    "threads": [pytest.mark.slow],
    "memory": [pytest.mark.thorough],
}
SMALL_SLOTS = ["-DJDP_FUZZ_SLOT_BYTES=2048", "-O1"]

pytestmark = pytest.mark.skipif(shutil.which(CXX) is None, reason="there is no C++ compiler")


def run(command, timeout_s):
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr[-5000:]}"


def compile_all(files, flags, folder):
    def compiled(source):
        target = folder / f"{source.stem}.o"
        run([CXX, *FLAGS, *flags, f"-I{SOURCES}", "-c", str(source), "-o", str(target)], 300)
        return target

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compiled, files))


def linked(main, shared, flags):
    program = main.with_suffix("")
    run([CXX, *flags, "-pthread", str(main), *map(str, shared), "-o", str(program)], 60)
    return program


def require_sanitizers(flags, folder):
    probe = folder / "probe.cc"
    probe.write_text("int main() {}\n")
    command = [CXX, *flags, str(probe), "-o", str(folder / "probe")]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip(f"{CXX} has no {' '.join(flags)}")


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=MARKS[mode]) for mode in MODES])
def test_the_c_plus_plus_tests_pass(mode, tmp_path):
    names = {"sums_test", "shards_test", "processes_test", "own_threads_test", "copy_out_test"}
    assert names <= {path.stem for path in TESTS}
    flags, num_steps = MODES[mode]
    require_sanitizers(flags, tmp_path)
    objects = compile_all([*LIBRARY, *TESTS], flags, tmp_path)
    shared, mains = objects[: len(LIBRARY)], objects[len(LIBRARY) :]
    for main in mains:
        run([str(linked(main, shared, flags)), str(num_steps)], 200)


# Small slots give many rounds of few bytes, and so find more errors per second. The real size is
# the one that users run.
@pytest.mark.parametrize(
    "mode, slot, seconds",
    [
        pytest.param("plain", "real", 6, marks=pytest.mark.thorough),
        pytest.param("threads", "small", 10, marks=pytest.mark.slow),
        pytest.param("plain", "small", 6, marks=pytest.mark.thorough),
        pytest.param("threads", "real", 10, marks=pytest.mark.thorough),
    ],
)
def test_every_schedule_gives_exact_sums(mode, slot, seconds, tmp_path):
    """Set JDP_FUZZ_SEED to the seed that a failure shows, and JDP_FUZZ_SECONDS to run longer."""
    flags = [*MODES[mode][0], "-DJDP_FUZZ", *SMALL_SLOTS * (slot == "small")]
    require_sanitizers(flags, tmp_path)
    fuzzer, *shared = compile_all(
        [ROOT / "tests/csrc/cpu/schedule_fuzz.cc", *LIBRARY], flags, tmp_path
    )
    seconds = float(os.environ.get("JDP_FUZZ_SECONDS", seconds))
    seed = os.environ.get("JDP_FUZZ_SEED", "0")
    run([str(linked(fuzzer, shared, flags)), str(seconds), seed], 60 + 2 * seconds)
