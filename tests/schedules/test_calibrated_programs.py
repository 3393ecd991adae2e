"""The programs that `jdp bench --calibrate` times on GPUs have the kernels that it divides by."""

import os
from collections import Counter
from pathlib import Path

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.gpu import topology
from jdp.tools.bench import calibrate
from jdp.tools.hlo import HloProgram

DESCRIBED = os.environ.get("JDP_TARGET_CONFIG")
# These run no kernel.
FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}


@pytest.fixture
def kernels(monkeypatch):
    """kernels(fn): the kernels of the program that `fn(mesh)` would time, by operation."""
    try:
        mesh = topology.mesh_of_h200s(1, DESCRIBED and Path(DESCRIBED).read_text())
    except topology.UnavailableError as reason:
        pytest.skip(str(reason))
    found = []

    def seconds(run, x, other, right, what, num_calls=1):
        found.append(HloProgram(run.lower(x, other).compile().as_text()))
        return 1.0

    def placed(mesh, x):
        where = NamedSharding(mesh, P(mesh.axis_names[0]))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    monkeypatch.setattr(calibrate, "_seconds", seconds)
    monkeypatch.setattr(calibrate, "_placed", placed)

    def kernels(fn):
        fn(mesh)
        program = found.pop()
        return Counter(one.op for one in program.computations[program.entry] if one.op not in FREE)

    return kernels


def test_a_chain_over_an_array_is_a_kernel_for_each_addition_and_no_copy(kernels):
    assert kernels(calibrate.memory_bytes_per_s) == {"fusion": 64}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_matmul_is_one_kernel(dtype, kernels):
    found = kernels(lambda mesh: calibrate.matmul_flops_per_s(mesh, dtype))
    assert sum(found.values()) == 1
