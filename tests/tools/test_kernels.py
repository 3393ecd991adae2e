"""The work of a Pallas kernel is that of its `cost_estimate`, found by its name and its results."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from jdp.tools import costs, timeline
from jdp.tools.costs import Kernel
from jdp.tools.hlo import HloProgram, Instruction
from jdp.training import communication_plan

SHAPE = jax.ShapeDtypeStruct((8, 128), jnp.float32)
COST = pl.CostEstimate(flops=1000, transcendentals=30, bytes_accessed=2000)


def called(name, cost):
    def double(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    kernel = pl.pallas_call(double, out_shape=SHAPE, name=name, cost_estimate=cost, interpret=True)
    traced = jax.jit(lambda x: kernel(x) + 1).trace(SHAPE)
    (found,) = map(costs.kernel_of, communication_plan.planned(traced.jaxpr, ["x"]).kernels)
    return found


def test_the_work_of_a_kernel_is_that_of_its_cost_estimate():
    assert called("double", COST) == Kernel("double", ((8, 128),), 1000.0, 2000.0)


def test_without_an_estimate_its_work_is_not_known_and_without_a_name_it_has_none():
    assert called("double", None) == Kernel("double", ((8, 128),), None, None)
    assert called(None, COST).name == ""


def call(op_name, shape="f32[8,128]{1,0}"):
    rest = f'%x), custom_call_target="tpu_custom_call", metadata={{op_name="{op_name}"}}'
    return Instruction("call", shape, "custom-call", rest)


ADD, ADD_ROWS, LARGE, UNNAMED = (
    Kernel("add", ((8, 128),), 1.0, 1.0),
    Kernel("add_rows", ((8, 128),), 2.0, 2.0),
    Kernel("add", ((16, 128), (8,)), 3.0, 3.0),
    Kernel("", ((8, 128),), 4.0, 4.0),
)
KERNELS = [UNNAMED, ADD, ADD_ROWS, LARGE]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("one", "kernel"),
    [
        (call("jit(f)/add/pallas_call"), ADD),
        (call("jit(f)/add_rows/pallas_call"), ADD_ROWS),
        (call("jit(f)/transpose(jvp(add))/pallas_call"), ADD),
        (call("jit(f)/vmap(add_rows)/pallas_call"), ADD_ROWS),
        (call("jit(f)/add/pallas_call", "(f32[16,128]{1,0}, f32[8]{0})"), LARGE),
        (call("jit(f)/pallas_call"), UNNAMED),
        (call("jit(f)/add/pallas_call", "f32[4,128]{1,0}"), None),
        (call("jit(f)/add/custom_call"), None),
        (call("jit(f)/add/pallas_call")._replace(op="fusion"), None),
    ],
)
def test_a_kernel_is_found_by_its_whole_name_and_the_shapes_of_its_results(one, kernel, order):
    assert costs.find_kernel(one, KERNELS[::order]) is kernel


PROGRAM = """HloModule it

ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0} parameter(0)
  ROOT %y = f32[8,128]{1,0} custom-call(%x), custom_call_target="t", metadata={op_name="jit(f)/add/pallas_call"}
}
"""  # noqa: E501


class Recorder:
    """Speeds that keep the work of each operation."""

    def __init__(self):
        self.works = []

    def compute_s(self, work):
        self.works.append((dict(work.flops), work.num_bytes))
        return 1.0

    def transfer_s(self, kind, algorithm, num_bytes, groups=()):
        raise AssertionError


@pytest.mark.parametrize(
    ("kernel", "work"),
    [
        (Kernel("add", ((8, 128),), 1000.0, 2000.0), ({"f32": 1000.0}, 2000)),
        (Kernel("add", ((8, 128),), 0.0, 2000.0), ({}, 2000)),
        # Only its operands and results are known.
        (Kernel("add", ((8, 128),), None, None), ({}, 2 * 8 * 128 * 4)),
    ],
)
def test_the_schedule_takes_the_work_of_a_kernel(kernel, work):
    recorder = Recorder()
    found = timeline.simulate(HloProgram(PROGRAM), recorder, [kernel])
    assert recorder.works == [work] and found.step_s == 1.0
    assert [text for text in found.unknown if "add" in text and "cost_estimate=" in text] == (
        found.unknown
    )
    assert len(found.unknown) == (kernel.flops is None)
