"""The positions and meanings of the bits of a class."""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from jdp.analysis.abstract_value import AbstractValue

_KINDS = (
    "varying unsummed unrepeated single total divided even uneven averaging undivided duplicated"
).split()


class Bits:
    """Classes encoded as integers. `|` joins two classes: a set bit is the weaker claim.

    There are eleven bits for each axis, and six for the value as a whole. Here n is the number of
    ranks along the axis, and the one-rank value is the one that a single rank would compute from
    the whole batch:

    - varying: ranks along the axis may hold different values;
    - unsummed: it may be something else than a scaled sum over the axis;
    - unrepeated: it may be something else than a sum of values that were equal along the axis;
    - single: it may be the one-rank value or, where it varies, the rank's own part of that, so that
      the mean over the ranks is the one-rank value;
    - total: it may be n times the one-rank value or, where it varies, computed from such a value;
    - divided: it may be the one-rank value divided by n, so that the sum over the ranks is a mean;
    - even: it may depend on a mean in which all ranks count the same: a sum that was divided by n;
    - uneven: it may depend on another exchange between ranks, such as a weighted mean;
    - averaging: it is a constant that was divided by n, or by a number of elements that equals n;
    - undivided: it may depend on a total that no number has scaled since. This bit stays set after
      an operation that is not linear, which ends the claim of being a sum;
    - duplicated: it may depend in this way on a sum of values that were equal along the axis;
    - data: the value depends on data and is not a constant of the program;
    - nonzero: it may differ from zero. This takes two bits: the constants 1 and -1 have only one;
    - bent: it may be a root, power or logarithm of a sum over ranks, a sum of the elements of such
      a sum, or a sum over groups of ranks. Then a factor other than 1/n corrects a repeated sum;
    - by_ranks: it may have been multiplied by a number of ranks;
    - capped: it may be a constant that replaces the computed value, as in `max(x, 1)`.

    Args:
      sizes: number of ranks along each axis of the mesh, by name.

    >>> bits = Bits({"data": 4, "model": 2})
    >>> bits.names(bits.axes(["model"]) | bits.over("total", 1))
    frozenset({'model'})
    """

    def __init__(self, sizes: Mapping[str, int]):
        self._bit: dict[Any, int] = {name: 1 << i for i, name in enumerate(sizes)}
        k = len(self._bit)
        self._shift = {kind: i * k for i, kind in enumerate(_KINDS)}
        self.varying = (1 << k) - 1
        self.unsummed = self.over("unsummed", self.varying)
        self.unrepeated = self.over("unrepeated", self.varying)
        self.single = self.over("single", self.varying)
        self.total = self.over("total", self.varying)
        self.divided = self.over("divided", self.varying)
        self.uneven = self.over("uneven", self.varying)
        self.averaging = self.over("averaging", self.varying)
        self.scale = self.over("undivided", self.varying) | self.over("duplicated", self.varying)
        self.data = 1 << len(_KINDS) * k
        # The constants 1 and -1 have only the first of these two bits.
        self.nonzero = 6 * self.data
        self.other = 4 * self.data
        self.bent = 8 * self.data
        self.by_ranks = 16 * self.data
        self.capped = 32 * self.data
        # The bits that an operation adds to a value of data if it invalidates every claim.
        self.mixed = self.unsummed | self.unrepeated | self.single | self.data | self.nonzero
        # The same where a sum that was n times too large stays a wrong number.
        self.imaged = self.mixed & ~self.unrepeated
        # An unknown value that is the same on all ranks.
        self.anything = self.mixed | self.total | self.divided | self.uneven
        self._products = [
            (self.axes(chosen), math.prod(sizes[name] for name in chosen))
            for count in range(1, k + 1)
            for chosen in itertools.combinations(sizes, count)
        ]

    def axes(self, names: Iterable[Any]) -> int:
        """Return the varying bits of axes. A name that is not an axis of the mesh adds none."""
        bits = 0
        for name in names:
            bits |= self._bit.get(name, 0)
        return bits

    def names(self, value: int) -> frozenset[str]:
        """Return the names of the axes along which `value` varies."""
        return frozenset(name for name, bit in self._bit.items() if value & bit)

    def over(self, kind: str, axes: int) -> int:
        """Return the bits of one kind for some axes."""
        return axes << self._shift[kind]

    def at(self, value: int, kind: str) -> int:
        """Return the axes for which the bits of one kind are set, as varying bits."""
        return value >> self._shift[kind] & self.varying

    def sums(self, single: int, total: int, divided: int) -> int:
        """Return the bits of three kinds together, each for the axes given as varying bits."""
        return (
            self.over("single", single) | self.over("total", total) | self.over("divided", divided)
        )

    def is_constant(self, value: int) -> bool:
        """Whether a value is a constant of the program, the same on every rank."""
        return not value & (self.data | self.varying)

    def is_data(self, value: int) -> bool:
        """Whether a value depends on data and may differ from zero."""
        return bool(value & self.data and value & self.nonzero)

    def decode(self, value: int) -> AbstractValue:
        """Return the class that `value` stands for."""
        uniform = self.varying & ~value if self.is_data(value) else 0
        summed = uniform & ~self.at(value, "unsummed")
        total = summed & self.at(value, "total")
        unclear = total & (self.at(value, "single") | self.at(value, "divided"))
        return AbstractValue(
            self.names(value),
            self.names(summed),
            not value & self.nonzero,
            self.names(total & ~unclear),
            self.names(unclear),
            self.names(uniform & ~self.at(value, "unrepeated")),
            self.names(uniform & self.at(value, "even") & ~self.at(value, "uneven")),
            self.names(uniform & self.at(value, "undivided")),
            self.names(uniform & self.at(value, "duplicated")),
        )

    def axes_of_size(self, size: float, among: int) -> int:
        """Return the axes that together have `size` ranks.

        These are all of `among` if they fit, else the axes of all its subsets that fit.
        """
        # In bfloat16, 1 / 3 is 0.2 % too large. A sum over one rank is already a mean.
        found = 0
        for axes, product in self._products:
            if not axes & ~among and (product > 1 or size == 1):
                if abs(size - product) <= 4e-3 * product:
                    if axes == among:
                        return axes
                    found |= axes
        return found
