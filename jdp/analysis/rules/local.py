"""Rules for primitives that a rank computes alone."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdp.analysis import jaxprs
from jdp.analysis.interpreter import Interpreter, Quotient, image, mix, move
from jdp.analysis.rules import collectives


def bend(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    """Join as image does, if a constant other than 1 / n may correct the result."""
    value = image(interp, eqn, ins)
    return value | interp.lattice.bent if value & interp.lattice.data else value


def _larger(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    # max(n x, 0) is n max(x, 0). With another bound it may be 1 if any rank has a 1.
    for i, atom in enumerate(eqn.invars):
        if jaxprs.number(atom) == 0:
            return image(interp, eqn, [ins[1 - i]])
    return _bound(interp, eqn, ins)


def _bound(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    lattice, value = interp.lattice, mix(interp, eqn, ins)
    constants = [x for x in ins if lattice.is_constant(x) and x & lattice.nonzero]
    if not constants:
        return value
    if not all(x & lattice.other for x in constants):
        # The result may be 1 if any rank has a 1.
        value &= ~lattice.over("duplicated", lattice.varying)
    return value | lattice.capped


def _invert(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    value = bend(interp, eqn, ins)
    return interp.lattice.invert(value) if value & interp.lattice.data else value


def _power(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    if "y" not in eqn.params:
        value, exponent = mix(interp, eqn, ins), interp.number(eqn.invars[1])
        is_inverse = exponent is not None and exponent < 0 and value & interp.lattice.data
        return interp.lattice.invert(value) if is_inverse else value
    return (bend if eqn.params["y"] > 0 else _invert)(interp, eqn, ins)


def _solve(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    lattice, (*matrix, vector) = interp.lattice, ins
    ratio = lattice.quotient(vector, functools.reduce(operator.or_, matrix))
    return lattice.without_scale(mix(interp, eqn, ins)) | ratio & lattice.scale


def _decompose(interp: Interpreter, eqn: Any, ins: list[int]) -> list[int]:
    value = mix(interp, eqn, ins)
    bases, scaled = interp.lattice.without_scale(value), _SCALED.get(eqn.primitive.name)
    return [value if i == scaled else bases for i in range(len(eqn.outvars))]


def _logarithm(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    # A factor n becomes an added term; an exponential may divide by it.
    return interp.lattice.without_scale(bend(interp, eqn, ins))


def _decide(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    return interp.lattice.without_scale(mix(interp, eqn, ins))


def _largest(interp: Interpreter, eqn: Any, ins: list[int]) -> list[int]:
    value = mix(interp, eqn, ins)
    return [value, interp.lattice.without_scale(value)]


# Another constant than 1 / n corrects these, such as the number of elements.
_BEND = "cbrt cumsum reduce_window_sum sqrt square"

# Booleans, signs and positions, not scaled by n.
_DECIDE = """
    and argmax argmin eq eq_to ge gt is_finite le le_to lt lt_to ne not or reduce_and reduce_or
    reduce_xor sign xor
"""

# Orthogonal decompositions, and the one result that n scales.
_SCALED = {"eig": 0, "eigh": 1, "qr": 1, "svd": 0}

NONLINEAR_RULES = {
    **dict.fromkeys(_BEND.split(), bend),
    **dict.fromkeys(_DECIDE.split(), _decide),
    **dict.fromkeys(("householder_product", *_SCALED), _decompose),
    **dict.fromkeys("approx_top_k top_k".split(), _largest),
    **dict.fromkeys("clamp min".split(), _bound),
    **dict.fromkeys("integer_pow pow".split(), _power),
    **dict.fromkeys("log log1p log2".split(), _logarithm),
    **dict.fromkeys("triangular_solve tridiagonal_solve".split(), _solve),
    "max": _larger,
    "rsqrt": _invert,
}


# Means over a rank's elements, or divisions by the number of ranks.
# A rank may have as many rows as there are ranks. `jnp.mean` sums before it divides, and its
# gradient copies the quotient as often. Otherwise such a number is that of ranks.


_ADD = frozenset({"add", "add_any"})
# The most divisors of one value; a longer chain restarts.
_MOST_DIVISORS = 8


def record_sum(interp: Interpreter, eqn: Any) -> None:
    """Record the sizes of summed dims, except in a gradient."""
    (atom,), (total,) = eqn.invars, eqn.outvars
    sizes = tuple(atom.aval.shape[i] for i in eqn.params["axes"])
    if math.prod(sizes) == 1 and not jaxprs.is_literal(atom) and atom in interp.quotients:
        interp.quotients[total] = interp.quotients[atom]
    elif not jaxprs.is_transposed(eqn):
        interp.sums[total] = sizes


def record_rounds(interp: Interpreter, eqn: Any) -> None:
    """Record a scan's number of added terms, except in a gradient."""
    if eqn.params["reverse"]:
        return
    body, num_constants, num_carry = jaxprs.scan_parts(eqn)
    sums = {each.outvars[0]: each.invars for each in body.eqns if each.primitive.name in _ADD}
    for i, total in enumerate(eqn.outvars[:num_carry]):
        atom, before = body.outvars[i], body.invars[num_constants + i]
        if not jaxprs.is_literal(atom) and before in sums.get(atom, ()):
            interp.sums[total] = (eqn.params["length"],)


def divided(interp: Interpreter, eqn: Any, dividend: Any, value: int, divisor: float) -> int:
    """Divide: a sum over its number of terms is a mean."""
    is_literal = jaxprs.is_literal(dividend)
    if interp.lattice.is_constant(value):
        times = 0 if is_literal else interp.divisions.get(dividend, 0)
        more = interp.lattice.divisions(divisor)
        interp.divisions[eqn.outvars[0]] = times = times + more
        if more and not times:  # a product or a sum undoes it
            return value & ~interp.lattice.over("divided", interp.lattice.varying)
    before = None if is_literal else interp.quotients.get(dividend)
    if before is None or len(before.divisors) == _MOST_DIVISORS:
        before = Quotient(value, ())
    interp.quotients[eqn.outvars[0]] = Quotient(before.value, (*before.divisors, divisor))
    sizes = () if is_literal else interp.sums.get(dividend, ())
    mean = _without_mean(interp, Quotient(value, (divisor,)), sizes) if sizes else None
    return interp.lattice.scale_by_number(value, 1 / divisor) if mean is None else mean


def spread(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    """Copy: as often as the divisor in a mean's gradient."""
    (value, *_), (atom, *_), (copies,) = ins, eqn.invars, eqn.outvars
    if jaxprs.is_literal(atom):
        return value
    sizes = _copied(eqn)
    if not sizes and atom in interp.sums:
        interp.sums[copies] = interp.sums[atom]
    quotient = interp.quotients.get(atom)
    mean = None if quotient is None else _without_mean(interp, quotient, sizes)
    if mean is None:
        return value
    lattice = interp.lattice
    if not lattice.is_constant(value):
        return mean
    return mean | lattice.over("averaging", lattice.at(value, "divided"))


def _copied(eqn: Any) -> tuple[int, ...]:
    before, after = eqn.invars[0].aval.shape, eqn.params["shape"]
    kept = dict(zip(eqn.params["broadcast_dimensions"], before, strict=True))
    return tuple(size for i, size in enumerate(after) if size != kept.get(i, 1))


def _without_mean(interp: Interpreter, quotient: Quotient, sizes: tuple[int, ...]) -> int | None:
    """Undo a division by a number of elements, not of ranks, or return None."""
    lattice, value = interp.lattice, quotient.value
    is_before_sums = value & lattice.varying and not value & lattice.total
    if not lattice.is_constant(value) and not is_before_sums:
        return None
    counts = {
        math.prod(chosen)
        for num in range(1, len(sizes) + 1)
        for chosen in itertools.combinations(sizes, num)
    }
    matches = [
        (count, i)
        for i, divisor in enumerate(quotient.divisors)
        for count in counts
        if count > 1 and abs(divisor - count) <= 4e-3 * count
    ]
    if not matches:
        return None
    _, mean = max(matches)  # the most elements
    for i, divisor in enumerate(quotient.divisors):
        if i != mean:
            value = lattice.scale_by_number(value, 1 / divisor)
    return value


def cast(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    """Cast; a bool or integer has no scale."""
    (value,) = ins
    if jnp.issubdtype(eqn.params["new_dtype"], jnp.inexact):
        return value
    to_bool = eqn.params["new_dtype"] == np.bool_
    value = mix(interp, eqn, ins) if to_bool and value & interp.lattice.data else value
    return interp.lattice.without_scale(value)


def _multiply(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    for value, factor, atom in zip(ins[::-1], eqn.invars[::-1], eqn.invars, strict=True):
        number = interp.number(atom)
        if number and not (abs(number) == 1 and _is_seed(interp, eqn, factor, value)):
            value = divided(interp, eqn, factor, value, 1 / number)
            is_of_ranks = interp.lattice.divisions(number) > 0 and value & interp.lattice.data
            return value | interp.lattice.by_ranks if is_of_ranks else value
        if number is not None:
            return value if number else interp.lattice.scale_by_number(value, number)
    return interp.lattice.product(*ins)


def _is_seed(interp: Interpreter, eqn: Any, factor: Any, value: int) -> bool:
    """Whether a 1 is the first cotangent, and not (on one rank) the number of ranks."""
    lattice = interp.lattice
    if not value & lattice.data or lattice.scale_by_number(value, 1.0) == value:
        return False
    makers = (each for each in interp.record.jaxpr.eqns if factor in each.outvars)
    maker = next(makers, None)
    return jaxprs.is_transposed(eqn) and (maker is None or not jaxprs.is_transposed(maker))


def _sum(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    gathered = collectives.of_gathered(interp, eqn)
    if gathered is not None:
        return gathered
    record_sum(interp, eqn)
    return bend(interp, eqn, ins)


def _weigh(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    # The second factor multiplies only cotangents.
    return interp.lattice.product(ins[0], ins[1]) if eqn.params["has"][0] else ins[0]


def _mean(interp: Interpreter, eqn: Any, ins: list[int]) -> list[int]:
    # The means, then their summands.
    return ins[: len(ins) // 2]


def _divide(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    number = interp.number(eqn.invars[1])
    if number:
        return divided(interp, eqn, eqn.invars[0], ins[0], number)
    return interp.lattice.quotient(*ins)


def _put_together(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    """Several sums form one sum of more numbers."""
    return functools.reduce(operator.or_, ins, 0)


def _cut_out(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    value = ins[0]
    for index in ins[1:]:
        value |= index & interp.lattice.varying
    return value


def _cut_in(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    whole, part, *indices = ins
    return _cut_out(interp, eqn, [whole | part, *indices])


def _select(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    # A value selected by the rank's number is no part of a one-rank value.
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
    # Without declared side effects it depends on operands alone.
    return interp.anything() if eqn.params["has_side_effect"] else mix(interp, eqn, ins)


def _exported(interp: Interpreter, eqn: Any, ins: list[int]) -> int:
    # A program for several devices may communicate.
    program = eqn.params["exported"]
    effects = (*program.ordered_effects, *program.unordered_effects)
    return interp.anything() if effects or program.nr_devices > 1 else mix(interp, eqn, ins)


# empty2 replaces a residual of the branch not taken.
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
    igamma_grad_a igammac inspect_sharding iota iota_2x32_shape jdp_misfit lu
    lu_pivots_to_permutation mulhi nextafter one_minus_square ormqr pack_dtype philox2x32 philox4x32
    platform_index polygamma polynomial population_count pure_callback ragged_dot_general
    random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap
    random_wrap reduce_prod reduce_window_max reduce_window_min regularized_incomplete_beta rem
    rng_bit_generator rnn_bwd rnn_fwd round scaled_dot scaled_matmul scaled_matmul_wrapper
    scatter-add scatter-max scatter-min scatter-mul scatter-sub schur select_and_gather_add
    select_and_scatter_add shape_assertion shift_left shift_right_arithmetic shift_right_logical
    spsolve symmetric_product threefry2x32 threefry4x32 to_edtype todense tridiagonal unpack_dtype
    zeros_like zeta
"""

# Only a division by n where the operand is linear corrects their result.
_IMAGE = """
    abs acos acosh asin asinh atan atanh conj cos cosh cummax cummin digamma erf erf_inv erfc exp
    exp2 expm1 imag lgamma logistic real reduce_max reduce_min sin sinh tan tanh
"""

# Elements of the first operand, moved, cast or negated. JAX's casts between varying types keep
# values, and a `done` returns its start's operand.
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
        "device_put jdp_local jdp_tied jdp_together optimization_barrier".split(),
        lambda interp, eqn, ins: ins,
    ),
    **dict.fromkeys("add add_any sub".split(), lambda interp, eqn, ins: interp.lattice.add(*ins)),
    **dict.fromkeys("concatenate pad stack".split(), _put_together),
    **dict.fromkeys("dynamic_slice gather".split(), _cut_out),
    "dynamic_update_slice": _cut_in,
    **dict.fromkeys(
        "conv_general_dilated dot_general".split(),
        lambda interp, eqn, ins: interp.lattice.contract(*ins),
    ),
    **dict.fromkeys("buffer_callback ffi_call".split(), _foreign),
    "broadcast_in_dim": spread,
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
