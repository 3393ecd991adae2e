"""`num_gpus` counts the GPUs that CUDA finds, for each way to list them."""

import os
import subprocess
import sys

import pytest

from jdp.worker.local_devices import num_gpus

pytestmark = pytest.mark.gpu

_COUNT = """
import ctypes
driver, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
if driver.cuInit(0) == 0:
    assert driver.cuDeviceGetCount(ctypes.byref(number)) == 0
print(number.value)
"""
_NAMES = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]


def found_by_cuda(environment):
    done = subprocess.run(
        [sys.executable, "-c", _COUNT], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_gpus_are_counted_as_cuda_finds_them():
    hidden = {"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"}
    own = {name: value for name, value in os.environ.items() if name not in hidden}
    num = num_gpus(own)
    name = subprocess.check_output(_NAMES, text=True).splitlines()[0]
    wrong = {} if found_by_cuda(own) == num else {"none listed": num}
    listed = [
        "0",
        " 0",
        "0,",
        "00,0",
        "0,0",
        f"0,{num}",
        f"{num},0",
        "-1",
        "-1,0",
        "0,-1",
        "",
        "none",
    ]
    listed += [name, name[:12], f"{name},{name}", f"{name},0", f"0,{name}", f"{name}, {name}"]
    listed += ["0 ", "0 ,", "0 1", "0x0", "+0", "\t0", f" {name}", f"{name} ", f"{name} ,0"]
    for visible in listed:
        environment = own | {"CUDA_VISIBLE_DEVICES": visible}
        ours, theirs = num_gpus(environment), found_by_cuda(environment)
        if ours != theirs:
            wrong[visible] = f"{ours}, and CUDA finds {theirs}"
    assert not wrong
