"""Values that are computed from parameters alone: cheaper to compute again than to keep."""

from collections.abc import Collection
from typing import Any, NamedTuple

import jax

from jdp.analysis import jaxprs
from jdp.reduction.flat_program import FlatOperation, FlatProgram, FlatValue

# A result that is this much smaller than its operands is kept, such as the norm of a matrix.
_REDUCTION = 16
# A value of more parameters than these is kept, as computing it again would gather all of them.
_MAX_SOURCES = 4
# Operations that cost more than reading their operands. Computed again once, never in a chain.
_HEAVY = frozenset(
    "cholesky conv_general_dilated dot_general eig eigh fft geqrf hessenberg householder_product "
    "lu lu_pivots_to_permutation qr ragged_dot ragged_dot_general schur sort svd triangular_solve "
    "tridiagonal tridiagonal_solve".split()
)
# The primitives of jdp that compute on this rank alone.
_LOCAL = frozenset("jdp_local jdp_mark jdp_tied jdp_together jdp_weigh".split())


class Derived(NamedTuple):
    """How a value is computed from parameters.

    Attributes:
      operation: that computes it.
      sources: the split parameters that it is computed from.
      is_heavy: whether computing it takes more than reading them.
    """

    operation: FlatOperation
    sources: tuple[FlatValue, ...]
    is_heavy: bool


def find_derived(
    program: FlatProgram, split: Collection[FlatValue], whole: Collection[FlatValue]
) -> dict[FlatValue, Derived]:
    """Return the values to compute again where they are used, in the order of the program."""
    derived: dict[FlatValue, Derived] = {}
    # Values that depend on nothing but parameters, derived or kept.
    known = [c for c in program.constants if not isinstance(c.constant, jax.core.Tracer)]
    pure = {*split, *whole, *known}
    results = {*program.outs}
    for operation in program.operations:
        if not pure.issuperset(operation.ins) or not _is_local(operation.eqn):
            continue
        pure.update(operation.outs)
        found = _derived(operation, derived, split)
        if found is not None and results.isdisjoint(operation.outs):
            derived.update(dict.fromkeys(operation.outs, found))
    return derived


def sources_of(
    values: Collection[FlatValue], derived: dict[FlatValue, Derived], split: Collection[FlatValue]
) -> tuple[FlatValue, ...]:
    """Return the split parameters that some values are computed from, in order."""
    found: dict[FlatValue, None] = {}
    for value in values:
        if value in split:
            found[value] = None
        elif value in derived:
            found.update(dict.fromkeys(derived[value].sources))
    return tuple(found)


def _derived(
    operation: FlatOperation, derived: dict[FlatValue, Derived], split: Collection[FlatValue]
) -> Derived | None:
    """Return how the results are computed, None if they are kept instead."""
    sources = sources_of(operation.ins, derived, split)
    if not 0 < len(sources) <= _MAX_SOURCES:
        return None
    read = [value for value in operation.ins if value in split or value in derived]
    if sum(v.num_bytes() for v in operation.outs) * _REDUCTION <= max(v.num_bytes() for v in read):
        return None
    was_heavy = any(value in derived and derived[value].is_heavy for value in read)
    is_heavy = operation.eqn.primitive.name in _HEAVY or bool(jaxprs.bodies(operation.eqn))
    if was_heavy and is_heavy:
        return None
    return Derived(operation, sources, was_heavy or is_heavy)


def _is_local(eqn: Any) -> bool:
    """Whether an equation only computes, on this rank, so that it may be run a second time."""
    inside = [inner for body in jaxprs.bodies(eqn) for inner in jaxprs.equations(body)]
    return not any(_acts(each) for each in (eqn, *inside))


def _acts(eqn: Any) -> bool:
    name = eqn.primitive.name
    is_foreign = name.startswith("jdp_") and name not in _LOCAL
    return bool(eqn.effects) or is_foreign or name.endswith(("_callback", "ffi_call"))
