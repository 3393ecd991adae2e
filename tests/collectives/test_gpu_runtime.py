"""The CUDA library on a machine that need not have a GPU: it builds, and loads without a driver."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "jdp" / "csrc"
DEADLINE_S = 60

# Registers the handlers, as XLA's CUDA backend will find them, and starts the one there is. The
# driver, if there is one, is hidden.
CHILD = """
import ctypes, sys, jax
library = ctypes.CDLL(sys.argv[1])
library.jdp_cuda_last_error.restype = ctypes.c_char_p
assert library.jdp_cuda_num_devices() <= 0
assert library.jdp_cuda_last_error(), "no reason is given"
for name in ("jdp_ring_start", "jdp_ring_done"):
    stages = {"initialize": library.jdp_ring_initialize, "execute": getattr(library, name)}
    stages = {stage: jax.ffi.pycapsule(handler) for stage, handler in stages.items()}
    jax.ffi.register_ffi_target(name, stages, platform="CUDA")
assert jax.devices()[0].platform == "cpu"
print(library.jdp_ffi_api_version())
"""


def output_of(*command, **env):
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
def test_it_exports_its_c_functions_and_handlers_and_nothing_else(built_cuda_library):
    names = {
        line.split()[2]
        for line in output_of("nm", "-DgC", built_cuda_library).splitlines()
        if " T " in line
    }
    header = (CSRC / "cuda" / "c_api.h").read_text()
    declared = {
        line.split("(")[0].split()[-1].lstrip("*")
        for line in header.splitlines()
        if line.startswith("JDP_EXPORT")
    }
    assert names == declared | {"jdp_ring_initialize", "jdp_ring_start", "jdp_ring_done"}


@pytest.mark.thorough
@pytest.mark.xdist_group("cuda")
def test_the_benchmark_of_its_kernels_compiles(tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    root = CSRC.parents[1]
    done = subprocess.run(
        ["nvcc", "-std=c++17", "-c", "-Xcompiler", "-Wall,-Wextra", f"-I{CSRC}"]
        + [f"-I{root / 'tests' / 'csrc' / 'cuda'}", "-o", tmp_path / "bench_ring.o"]
        + [root / "benchmarks" / "gpu" / "bench_ring.cu"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.thorough
def test_it_needs_neither_the_driver_nor_a_cuda_runtime(built_cuda_library):
    needed = [
        line
        for line in output_of("readelf", "-d", built_cuda_library).splitlines()
        if "NEEDED" in line
    ]
    assert needed and not [line for line in needed if "cuda" in line]


@pytest.mark.thorough
def test_it_loads_without_a_driver_and_its_handlers_register(built_cuda_library):
    version = output_of(sys.executable, "-c", CHILD, built_cuda_library, CUDA_VISIBLE_DEVICES="")
    # Of the FFI headers: a runtime that is older would refuse it.
    assert int(version) >= 3
