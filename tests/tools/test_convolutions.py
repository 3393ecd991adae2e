"""A convolution has as many operations as XLA counts, with and without zeros between its inputs."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jdp.tools import costs
from jdp.tools.costs import Costs, _KernelWindow
from jdp.tools.hlo import HloProgram, Instruction

PLAIN = dict(window_strides=(1, 1), padding="SAME")
UNEVEN = dict(window_strides=(1, 2), padding=((1, 0), (3, 2)), rhs_dilation=(2, 1))


def convolved(x, k, options):
    return lax.conv_general_dilated(
        x, k, dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x.shape[3] // k.shape[2], **options,
    )  # fmt: skip


def counted(function, *arrays):
    """Return the operations of matmuls and convolutions that `explain` counts, and XLA's count."""
    compiled = jax.jit(function).lower(*arrays).compile()
    program, ours = HloProgram(compiled.as_text()), 0.0
    for body in program.computations.values():
        shapes = {one.name: one.shape for one in body}
        alone = [one for one in body if one.op in ("convolution", "dot", "custom-call")]
        ours += sum(sum(Costs({}).flops(one, shapes).values()) for one in alone)
    found = compiled.cost_analysis()
    return ours, (found[0] if isinstance(found, list) else found)["flops"]


@pytest.mark.parametrize(
    ("options", "num_inputs"),
    [(PLAIN, 8), (dict(window_strides=(2, 2), padding="SAME"), 8), (UNEVEN, 8), (PLAIN, 2),
     (dict(window_strides=(2, 1), padding=((0, 1), (2, 2)), lhs_dilation=(1, 2)), 8)],
)  # fmt: skip
def test_a_convolution_and_its_gradients_have_the_operations_that_xla_counts(options, num_inputs):
    x, k = jnp.ones((4, 15, 14, 8)), jnp.ones((3, 3, num_inputs, 16))
    forward = lambda x, k: convolved(x, k, options)  # noqa: E731
    y = jax.eval_shape(forward, x, k)
    for function, arrays in (
        (forward, (x, k)),
        # A convolution is linear in each operand, so its transpose is one convolution.
        (lambda y, k: jax.linear_transpose(lambda x: forward(x, k), x)(y), (y, k)),
        (lambda y, x: jax.linear_transpose(lambda k: forward(x, k), k)(y), (y, x)),
    ):
        ours, xlas = counted(function, *arrays)
        assert ours == xlas > 0


def test_places_between_and_beside_the_inputs_are_not_counted():
    numbers = itertools.product((1, 3), (1, 2, 3), (-1, 0, 2), (1, 2, 3), (1, 2), (1, 4), (1, 5))
    for size, stride, before, lhs_dilate, rhs_dilate, num_inputs, num_outputs in numbers:
        places = [
            o * stride + k * rhs_dilate - before for k in range(size) for o in range(num_outputs)
        ]
        inputs = range(0, (num_inputs - 1) * lhs_dilate + 1, lhs_dilate)
        window = _KernelWindow(size, stride, before, lhs_dilate, rhs_dilate)
        assert window.pairs(num_inputs, num_outputs) == sum(place in inputs for place in places)


# Of 5 x 6 numbers and a kernel of 3, stride 2: 2 x 6 numbers, 4 channels to 7, 9 rows.
ARRAYS = {"x": "f32[9,5,6,4]{3,2,1,0}", "k": "f32[3,1,4,7]{3,2,1,0}", "y": "f32[9,2,6,7]{3,2,1,0}"}
CALL = (
    '{}), custom_call_target="__cudnn$conv{}", window={{size=3x1 stride=2x1}}, '
    "dim_labels=b01f_01io->b01f"
)


@pytest.mark.parametrize(
    ("way", "operands", "result"),
    [
        ("Forward", "%x, %k", "y"),
        ("BackwardInput", "%y, %k", "x"),
        ("BackwardFilter", "%x, %y", "k"),
    ],
)
def test_a_library_does_the_operations_of_the_convolution_that_it_differentiates(
    way, operands, result
):
    one = Instruction(
        "c", f"({ARRAYS[result]}, u8[0]{{0}})", "custom-call", CALL.format(operands, way)
    )
    assert costs.convolution_flops(one, ARRAYS) == 2 * 9 * 4 * 7 * (3 * 2) * 6


# As a TPU multiplies 8 pairs of matrices, [8, 4, 5] [8, 5, 6].
def test_a_batch_of_products_that_is_a_convolution_counts_each_once():
    shapes = {"a": "f32[8,4,5]{2,1,0}", "b": "f32[8,5,6]{2,1,0}"}
    rest = "%a, %b), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf"
    one = Instruction("c", "f32[8,4,6]{2,1,0}", "convolution", rest)
    assert costs.convolution_flops(one, shapes) == 2 * 8 * 4 * 5 * 6
