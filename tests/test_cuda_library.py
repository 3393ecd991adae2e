"""The CUDA library on a machine that need not have a GPU: it builds, and loads without a driver."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jaxlib
import pytest

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "jdp" / "csrc"
BUILT = ROOT / "jdp" / "lib" / "libjdp_cuda.so"
DEADLINE_S = 600

# Registers the handlers, as XLA's CUDA backend will find them, and starts the one there is. The
# driver, if there is one, is hidden.
CHILD = """
import ctypes, sys, jax
library = ctypes.CDLL(sys.argv[1])
library.jdp_cuda_last_error.restype = ctypes.c_char_p
assert library.jdp_cuda_num_devices() <= 0
assert library.jdp_cuda_last_error(), "no reason is given"
for name in ("jdp_ring_start", "jdp_ring_done"):
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="CUDA")
assert jax.devices()[0].platform == "cpu"
print(library.jdp_ffi_api_version())
"""


# The one that was installed, if it is of these sources; else one that is built for one kind of GPU.
@pytest.fixture(scope="module")
def library(tmp_path_factory):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    sources = sorted((CSRC / "cuda").iterdir())
    newest = max(path.stat().st_mtime for path in [*sources, *CSRC.glob("*.h")])
    if BUILT.exists() and BUILT.stat().st_mtime > newest:
        return BUILT
    path = tmp_path_factory.mktemp("cuda") / "libjdp_cuda.so"
    command = [nvcc, "-std=c++17", "-O3", "--shared", "-cudart", "static", "-arch=sm_90"]
    command += ["-Xcompiler", "-fPIC,-fvisibility=hidden", "-o", str(path)]
    command += ["-isystem", str(Path(jaxlib.__file__).parent / "include")]
    command += [str(source) for source in sources if source.suffix in (".cu", ".cc")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return path


def output_of(*command, **env):
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_it_exports_its_c_functions_and_handlers_and_nothing_else(library):
    names = {
        line.split()[2] for line in output_of("nm", "-DgC", library).splitlines() if " T " in line
    }
    header = (CSRC / "cuda" / "c_api.h").read_text()
    declared = {
        line.split("(")[0].split()[-1].lstrip("*")
        for line in header.splitlines()
        if line.startswith("JDP_EXPORT")
    }
    assert names == declared | {"jdp_ring_start", "jdp_ring_done"}


@pytest.mark.slow
def test_it_needs_neither_the_driver_nor_a_cuda_runtime(library):
    needed = [line for line in output_of("readelf", "-d", library).splitlines() if "NEEDED" in line]
    assert needed and not [line for line in needed if "cuda" in line]


@pytest.mark.slow
def test_it_loads_without_a_driver_and_its_handlers_register(library):
    version = output_of(sys.executable, "-c", CHILD, library, CUDA_VISIBLE_DEVICES="")
    # Of the FFI headers: a runtime that is older would refuse it.
    assert int(version) >= 3
