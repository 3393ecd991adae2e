"""Find values that are a decay or a sum in the program of an optimizer's update."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jdp import jax_compat
from jdp.analysis import jaxprs


class Decay(NamedTuple):
    """A number that a leaf is multiplied by.

    Attributes:
      value: the number.
      is_rounded: whether it was computed from a number that the state holds in 16 bits.
      is_of_count: whether it was computed from the number of steps.
    """

    value: float
    is_rounded: bool = False
    is_of_count: bool = False


class Sum(NamedTuple):
    """A leaf to which something was added.

    Attributes:
      leaf: its position.
      part: how much of squares, or of the leaf's difference from something, was added or
        subtracted, 1 for all; None for what is neither.
      is_rounded: see `Decay`.
    """

    leaf: int
    part: float | None
    is_rounded: bool


class KnownValue(NamedTuple):
    """The facts that are known about a value of the update.

    Attributes:
      leaves: positions of leaves of the state; each of its elements is one of one of these, or of
        `sums`.
      sums: see `leaves`.
      number: the one number that all of it is, None if that is not known.
      is_rounded: see `Decay`.
      is_of_count: see `Decay`.
      factor: a number that it is a multiple of.
      is_multiple: whether it is a multiple of squares, or of a difference of a leaf and a value.
    """

    leaves: frozenset[int] = frozenset()
    sums: frozenset[Sum] = frozenset()
    number: Any = None
    is_rounded: bool = False
    is_of_count: bool = False
    factor: float = 1.0
    is_multiple: bool = False


UNKNOWN = KnownValue()


# Operations that keep the facts of their operand, or of one of their operands.
_SAME = frozenset(
    "broadcast_in_dim convert_element_type copy jdp_mark reduce_max reduce_min reshape "
    "squeeze".split()
)
_CHOOSING = frozenset("max min select_n".split())


class DecayWalk:
    """A pass over the program of an update.

    Attributes:
      decays: position of a leaf -> the value that it is multiplied by.
    """

    def __init__(self) -> None:
        self.decays: dict[int, set[Decay]] = {}

    def results(self, program: Any, values: Sequence[KnownValue]) -> list[KnownValue]:
        """Return the facts about a program's results."""
        body = jaxprs.opened(program)
        env = dict(zip(body.invars, values, strict=True))
        for variable, constant in jaxprs.constants(program):
            env[variable] = KnownValue(number=constant if np.ndim(constant) == 0 else None)

        def read(atom: Any) -> KnownValue:
            return KnownValue(number=atom.val) if jaxprs.is_literal(atom) else env[atom]

        for eqn in body.eqns:
            results = self._of(eqn, [*map(read, eqn.invars)])
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in body.outvars]

    def _of(self, eqn: Any, ins: list[KnownValue]) -> list[KnownValue]:
        name = eqn.primitive.name
        if name == "cond":
            branches = [self.results(branch, ins[1:]) for branch in eqn.params["branches"]]
            return [_chosen(values) for values in zip(*branches, strict=True)]
        if (called := jaxprs.called(eqn)) is not None:
            return self.results(called, ins)
        if name == "mul":
            same = [self._product(eqn, *ins)]
        elif name in ("add", "sub"):
            same = [KnownValue(sums=_added(*ins) | _added(*ins[::-1]))]
        elif name == "square" or (name == "integer_pow" and eqn.params["y"] == 2):
            same = [KnownValue(is_multiple=True)]
        elif name in _CHOOSING:
            same = [_chosen(ins[1:] if name == "select_n" else ins)]
        else:
            same = ins if name in _SAME and len(ins) == 1 else [UNKNOWN] * len(eqn.outvars)
        return [*_computed(eqn, ins, same)]

    def _product(self, eqn: Any, one: KnownValue, other: KnownValue) -> KnownValue:
        """Return the facts about a product, and record it as a decay if it is one."""
        if one.number is None:
            one, other = other, one
        if one.number is None:
            is_square = eqn.invars[0] is eqn.invars[1]
            is_multiple = is_square or one.is_multiple or other.is_multiple
            is_rounded = one.is_rounded or other.is_rounded
            factor = one.factor * other.factor
            return KnownValue(is_multiple=is_multiple, factor=factor, is_rounded=is_rounded)
        if np.iscomplexobj(one.number):
            return UNKNOWN
        number = float(one.number)
        decay = Decay(number, one.is_rounded, one.is_of_count)
        for leaf in other.leaves | {each.leaf for each in other.sums}:
            self.decays.setdefault(leaf, set()).add(decay)
        if number == 1:
            return other._replace(number=None)
        factor = other.factor * number
        is_rounded = one.is_rounded or other.is_rounded
        is_multiple = other.is_multiple or bool(other.sums)
        return KnownValue(factor=factor, is_multiple=is_multiple, is_rounded=is_rounded)


def _added(value: KnownValue, term: KnownValue) -> frozenset[Sum]:
    """Return the leaves in a sum of two values; the first may be a leaf."""
    part = abs(term.factor) if term.is_multiple else None
    return frozenset(Sum(leaf, part, term.is_rounded) for leaf in value.leaves)


def _computed(
    eqn: Any, ins: Sequence[KnownValue], same: Sequence[KnownValue]
) -> Sequence[KnownValue]:
    """Return the facts about the results of an operation, with their numbers if it has them."""
    are_numbers = all(value.number is not None for value in ins) and not jaxprs.acts(eqn)
    if not ins or not are_numbers or any(v.aval.shape != () for v in eqn.outvars):
        return same
    with jax.ensure_compile_time_eval():
        results = jax_compat.bind(eqn, [value.number for value in ins])
    is_rounded = any(value.is_rounded for value in ins)
    is_of_count = any(value.is_of_count for value in ins)
    return [
        value._replace(number=x, is_rounded=is_rounded, is_of_count=is_of_count)
        for value, x in zip(same, results, strict=True)
    ]


def _chosen(values: Sequence[KnownValue]) -> KnownValue:
    """Return the facts about a value whose elements each come from one of some values."""
    if not all(value.leaves or value.sums for value in values):
        return UNKNOWN
    leaves = frozenset().union(*(value.leaves for value in values))
    return KnownValue(leaves, frozenset().union(*(value.sums for value in values)))
