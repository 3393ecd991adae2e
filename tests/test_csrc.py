"""The C++ tests of the native all-reduce, as they are and under sanitizers."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "jdp" / "csrc" / "cpu"
TESTS = sorted((ROOT / "tests" / "csrc").glob("*_test.cc"))
CXX = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or "c++"
FLAGS = ["-std=c++17", "-g", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-pthread"]

# Flags, and small steps in a row: sanitizers make them slow.
MODES = {
    "plain": (["-O3"], 100_000),
    "threads": (["-O1", "-fsanitize=thread"], 2000),
    "memory": (["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"], 2000),
}

pytestmark = pytest.mark.skipif(shutil.which(CXX) is None, reason="there is no C++ compiler")


def run(command, timeout_s):
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr[-5000:]}"


def compile_all(files, flags, folder):
    def compiled(source):
        target = folder / f"{source.stem}.o"
        run([CXX, *FLAGS, *flags, f"-I{SOURCES}", "-c", str(source), "-o", str(target)], 120)
        return target

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compiled, files))


def require_sanitizers(flags, folder):
    probe = folder / "probe.cc"
    probe.write_text("int main() {}\n")
    command = [CXX, *flags, str(probe), "-o", str(folder / "probe")]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip(f"{CXX} has no {' '.join(flags)}")


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=[pytest.mark.slow] if mode != "plain" else [], id=mode)
        for mode in MODES
    ],
)
def test_the_native_all_reduce_holds_what_its_own_tests_claim(mode, tmp_path):
    flags, num_steps = MODES[mode]
    require_sanitizers(flags, tmp_path)
    # XLA's side has tests of its own, through JAX.
    library = [path for path in SOURCES.glob("*.cc") if path.stem not in ("ffi_cpu", "c_api")]
    objects = compile_all([*library, *TESTS], flags, tmp_path)
    shared, mains = objects[: len(library)], objects[len(library) :]
    for main in mains:
        program = main.with_suffix("")
        run([CXX, *flags, "-pthread", str(main), *map(str, shared), "-o", str(program)], 60)
        run([str(program), str(num_steps)], 100)
