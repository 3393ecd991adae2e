"""The native library's sums on 64-bit ARM, emulated by qemu-user."""

import os
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "jdp" / "csrc" / "cpu"
TESTS = ROOT / "tests" / "csrc" / "cpu"
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-pthread"]
NAMES = ("elements_test", "sums_test", "shards_test")
# Emulated, a sum takes some 20 times as long.
NUM_STEPS = 50

CXX = shlex.split(os.environ.get("JDP_AARCH64_CXX", "aarch64-linux-gnu-g++"))
QEMU = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")

pytestmark = [
    pytest.mark.skipif("JDP_DIST" not in os.environ, reason="runs by make release-check"),
    pytest.mark.skipif(QEMU is None, reason="needs qemu-aarch64: apt-get install qemu-user"),
    pytest.mark.skipif(shutil.which(CXX[0]) is None, reason=f"there is no {CXX[0]}"),
]


def run(*command, timeout_s=600):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr[-5000:]}"


def test_sums_are_exact_on_aarch64(tmp_path):
    library = [
        path for path in SOURCES.glob("*.cc") if path.stem not in ("ffi_cpu", "ffi_copy", "c_api")
    ]

    def compiled(source):
        target = tmp_path / f"{source.stem}.o"
        run(*CXX, *FLAGS, f"-I{SOURCES}", "-c", source, "-o", target)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, library))
        mains = list(pool.map(compiled, [TESTS / f"{name}.cc" for name in NAMES]))
    for main in mains:
        program = main.with_suffix("")
        run(*CXX, "-static", "-pthread", main, *objects, "-o", program)
        run(QEMU, program, NUM_STEPS)
