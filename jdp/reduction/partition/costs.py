"""Estimates of a program's operations and bytes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from jdp.analysis import jaxprs
from jdp.reduction.partition.values import ROUNDS_OF_WHILE

# Operations in a sent byte's time: 1e14/s at 500 GB/s, or 1e12/s at 5 GB/s.
_FLOPS_PER_BYTE = 200
# For each m * n * min(m, n) of an (m, n) matrix: of eigenvalues, the most.
_FLOPS_OF_FACTORING = 10
_FACTORINGS = frozenset(
    "cholesky eig eigh geqrf householder_product lu qr schur svd triangular_solve".split()
)
# How often a rank sends the operand, without the share (n - 1) / n.
_SENDINGS = {"all_to_all": 1, "pmax": 2, "pmin": 2, "psum": 2, "psum_invariant": 2}


class Cost(NamedTuple):
    """A rank's sent bytes, and operations of matrix products and factorings."""

    flops: float = 0
    num_bytes: float = 0

    def times(self, count: float) -> Cost:
        """Return the cost of `count` repetitions."""
        return Cost(self.flops * count, self.num_bytes * count)

    def and_(self, other: Cost) -> Cost:
        """Return the cost of both."""
        return Cost(self.flops + other.flops, self.num_bytes + other.num_bytes)

    def time(self) -> float:
        """Return the time in units of one operation."""
        return self.flops + self.num_bytes * _FLOPS_PER_BYTE


def multiplies_matrices(eqn: Any) -> bool:
    """Whether an equation or its bodies multiply or factor matrices."""
    inside = (inner for body in jaxprs.bodies(eqn) for inner in jaxprs.equations(body))
    return any(_is_product(each) for each in (eqn, *inside))


def _is_product(eqn: Any) -> bool:
    if eqn.primitive.name != "dot_general":
        return eqn.primitive.name in _FACTORINGS
    contracted, batch = eqn.params["dimension_numbers"]
    return all(
        math.prod(n for i, n in enumerate(atom.aval.shape) if i not in (*own, *batched)) > 1
        for atom, own, batched in zip(eqn.invars, contracted, batch, strict=True)
    )


def cost_of(program: Any, num_ranks: int) -> Cost:
    """Return a program's cost on each rank."""
    total = Cost()
    for eqn in jaxprs.opened(program).eqns:
        bodies = [cost_of(body, num_ranks) for body in jaxprs.bodies(eqn)]
        if eqn.primitive.name == "cond":
            total = total.and_(max(bodies, key=Cost.time))
            continue
        for body in bodies:
            total = total.and_(body.times(_rounds(eqn)))
        total = total.and_(Cost(_flops(eqn), _sent(eqn) * (num_ranks - 1) / num_ranks))
    return total


def _rounds(eqn: Any) -> int:
    if eqn.primitive.name == "scan":
        return eqn.params["length"]
    return ROUNDS_OF_WHILE if eqn.primitive.name == "while" else 1


def _flops(eqn: Any) -> float:
    shape = eqn.invars[0].aval.shape if eqn.invars else ()
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * eqn.outvars[0].aval.size * math.prod(shape[i] for i in contracted)
    if eqn.primitive.name in _FACTORINGS:
        return _FLOPS_OF_FACTORING * math.prod(shape) * min(shape[-2:])
    return 0


def _sent(eqn: Any) -> float:
    if eqn.primitive.name in ("all_gather", "all_gather_invariant"):
        return sum(_num_bytes(variable) for variable in eqn.outvars)
    sendings = _SENDINGS.get(eqn.primitive.name, 0)
    return sendings * sum(_num_bytes(atom) for atom in eqn.invars) if sendings else 0


def _num_bytes(atom: Any) -> int:
    return atom.aval.size * atom.aval.dtype.itemsize
