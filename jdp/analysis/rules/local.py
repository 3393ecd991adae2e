"""Rules for primitives that a rank computes without the others."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jdp.analysis import jaxprs
from jdp.analysis.interpreter import Interpreter, image, mix, move
from jdp.analysis.rules import averages, nonlinear, sums


def cast(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    """Return the operand's class, as move does. A cast to bool or integers has no scale."""
    (value,) = ins
    if jnp.issubdtype(eqn.params["new_dtype"], jnp.inexact):
        return value
    to_bool = eqn.params["new_dtype"] == np.bool_
    value = mix(interp, eqn, ins) if to_bool and value & interp.lattice.data else value
    return interp.lattice.without_scale(value)


def _move_each(interp: Interpreter, eqn: Any, ins: list[int]) -> list[int]:
    return ins


def _add(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    return interp.lattice.add(*ins)


def _multiply(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    for value, factor, atom in zip(ins[::-1], eqn.invars[::-1], eqn.invars, strict=True):
        number = interp.number(atom)
        if number and not (abs(number) == 1 and _is_seed(interp, eqn, factor, value)):
            value = averages.divided(interp, eqn, factor, value, 1 / number)
            is_of_ranks = interp.lattice.divisions(number) > 0 and value & interp.lattice.data
            return value | interp.lattice.by_ranks if is_of_ranks else value
        if number is not None:
            return value if number else interp.lattice.scale_by_number(value, number)
    return interp.lattice.product(*ins)


def _is_seed(interp: Interpreter, eqn: Any, factor: Any, value: int) -> bool:
    """Whether the 1 that multiplies a value is the cotangent with which a backward pass begins.

    On a mesh of one rank, a product with 1 may also be a division by the number of ranks. In that
    case the other factor was computed in the same backward pass.
    """
    lattice = interp.lattice
    if not value & lattice.data or lattice.scale_by_number(value, 1.0) == value:
        return False
    makers = (each for each in interp.record.jaxpr.eqns if factor in each.outvars)
    maker = next(makers, None)
    return jaxprs.is_transposed(eqn) and (maker is None or not jaxprs.is_transposed(maker))


def _sum(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    gathered = sums.of_gathered(interp, eqn)
    if gathered is not None:
        return gathered
    averages.record_sum(interp, eqn)
    return nonlinear.bend(interp, eqn, ins)


def _weigh(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    # The second factor multiplies only cotangents.
    return interp.lattice.product(ins[0], ins[1]) if eqn.params["has"][0] else ins[0]


def _mean(interp: Interpreter, eqn: Any, ins: list[int]) -> list[int]:
    # The first half of the operands are the means, the second half their summands.
    return ins[: len(ins) // 2]


def _divide(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    number = interp.number(eqn.invars[1])
    if number:
        return averages.divided(interp, eqn, eqn.invars[0], ins[0], number)
    return interp.lattice.quotient(*ins)


def _put_together(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    """Return the class of concatenated parts: several sums form one sum of more numbers."""
    value = 0
    for operand in ins:
        value |= operand
    return value


def _cut_out(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    """Return the class of some elements of the first operand, which the others choose."""
    value = ins[0]
    for index in ins[1:]:
        value |= index & interp.lattice.varying
    return value


def _cut_in(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    whole, part, *indices = ins
    return _cut_out(interp, eqn, [whole | part, *indices])


def _contract(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    return interp.lattice.contract(*ins)


def _select(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    # A value that the rank's number selects is not this rank's part of a one-rank value.
    value = ins[0] & (
        interp.lattice.varying | interp.lattice.over("divided", interp.lattice.varying)
    )
    for case in ins[1:]:
        value |= case
    return value


def _sort(interp: Interpreter, eqn: Any, ins: list[int]) -> list[int]:
    num_keys = eqn.params["num_keys"]
    keys = 0
    for key in ins[:num_keys]:
        keys |= key
    order = interp.lattice.without_scale(keys)
    return [interp.lattice.mix(keys if i < num_keys else order | x) for i, x in enumerate(ins)]


def _foreign(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    # The author of a foreign call promises that without side effects it depends on operands alone.
    return interp.anything() if eqn.params["has_side_effect"] else mix(interp, eqn, ins)


def _exported(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    # An exported program for several devices may communicate. One for a single device cannot.
    program = eqn.params["exported"]
    effects = (*program.ordered_effects, *program.unordered_effects)
    return interp.anything() if effects or program.nr_devices > 1 else mix(interp, eqn, ins)


# empty2 is a zero that replaces a residual of the branch that was not taken.
_MIX = """
    _copysign after_all atan2 bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense
    bcoo_sort_indices bcoo_spdot_general bcoo_sum_duplicates bcoo_todense bcoo_transpose
    bcsr_dot_general bcsr_extract bcsr_fromdense bcsr_todense bessel_i0e bessel_i1e
    bitcast_convert_type broadcast_to ceil check cholesky cholesky_update clz complex coo_fromdense
    coo_matmat coo_matvec coo_spmm coo_spmv coo_todense create_token csr_fromdense csr_matmat
    csr_matvec csr_spmm csr_spmv csr_todense cumlogsumexp cumprod dce_sink debug_callback
    debug_print dim_as_value dimension_size dot_product_attention_bwd
    dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd
    dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd
    dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd
    dot_product_attention_fwd_wrapper empty2 fft floor from_edtype geqp3 geqrf hessenberg igamma
    igamma_grad_a igammac inspect_sharding iota iota_2x32_shape lu lu_pivots_to_permutation mulhi
    nextafter one_minus_square ormqr pack_dtype philox2x32 philox4x32 platform_index polygamma
    polynomial population_count pure_callback ragged_dot_general random_bits random_clone
    random_fold_in random_gamma random_seed random_split random_unwrap random_wrap reduce_prod
    reduce_window_max reduce_window_min regularized_incomplete_beta rem rng_bit_generator rnn_bwd
    rnn_fwd round scaled_dot scaled_matmul scaled_matmul_wrapper scatter-add scatter-max scatter-min
    scatter-mul scatter-sub schur select_and_gather_add select_and_scatter_add shape_assertion
    shift_left shift_right_arithmetic shift_right_logical spsolve symmetric_product threefry2x32
    threefry4x32 to_edtype todense tridiagonal unpack_dtype zeros_like zeta
"""

# Functions of one operand whose result changes if the operand is n times too large. Only a
# division by n, where they are linear, corrects the result.
_IMAGE = """
    abs acos acosh asin asinh atan atanh conj cos cosh cummax cummin digamma erf erf_inv erfc exp
    exp2 expm1 imag lgamma logistic real reduce_max reduce_min sin sinh tan tanh
"""

# These move, cast or negate elements of the first operand. JAX's casts between types of varying
# values change nothing on a rank, and a `done` returns what its collective started with.
_MOVE = """
    accum_grad_in_ref add_dependency all_gather_done all_gather_reduced_done all_to_all_done
    assert_consumed_value consume copy copy_p expand_dims
    layout_constraint name neg pbroadcast_done ppermute_done preduced psum_done pvary
    reduce_precision reduce_scatter_done reduced_vary_cast reduced_vary_cast_p reshape reshard
    rev sharding_constraint slice split squeeze stop_gradient tile transpose unstack
    vary_unreduced_cast vary_unreduced_cast_p xla_metadata_value
"""

RULES = {
    **dict.fromkeys(_MIX.split(), mix),
    **dict.fromkeys(_IMAGE.split(), image),
    **dict.fromkeys(_MOVE.split(), move),
    **dict.fromkeys(
        "device_put jdp_local jdp_tied jdp_together optimization_barrier".split(), _move_each
    ),
    **dict.fromkeys("add add_any sub".split(), _add),
    **dict.fromkeys("concatenate pad stack".split(), _put_together),
    **dict.fromkeys("dynamic_slice gather".split(), _cut_out),
    "dynamic_update_slice": _cut_in,
    **dict.fromkeys("conv_general_dilated dot_general".split(), _contract),
    **dict.fromkeys("buffer_callback ffi_call".split(), _foreign),
    "broadcast_in_dim": averages.spread,
    "call_exported": _exported,
    "convert_element_type": cast,
    "div": _divide,
    "jdp_mean": _mean,
    "jdp_weigh": _weigh,
    "mul": _multiply,
    "reduce_sum": _sum,
    "select_n": _select,
    "sort": _sort,
}
