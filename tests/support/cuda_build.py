"""The CUDA library as setup.py builds it, once for all tests of one state of its sources."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 900
# setup.py keeps a library that is of these sources, flags and headers.
BUILD = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("setup_of_jdp", sys.argv[1])
setup_of_jdp = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup_of_jdp)
setup_of_jdp.build_cuda(pathlib.Path(sys.argv[2]))
"""


def build(folder):
    """Give the path of the library in `folder`, built if it is not there; nvcc takes minutes."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    library = Path(folder) / "libjdp_cuda.so"
    with open(Path(folder) / "lock", "w") as lock:
        # The processes of pytest-xdist come here at the same time.
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [sys.executable, "-c", BUILD, str(ROOT / "setup.py"), str(library)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            # For one GPU: what is tested without one is the same for all.
            env={**os.environ, "JDP_CUDA": "on", "JDP_CUDA_ARCH": "90"},
        )
    assert done.returncode == 0, done.stderr
    return library
