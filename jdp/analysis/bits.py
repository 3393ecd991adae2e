"""The positions and meanings of the bits of a class."""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from jdp.analysis.classes import Class

_KINDS = (
    "varying unsummed unrepeated single total divided even uneven averaging undivided duplicated"
).split()


class Bits:
    """Classes as integers whose join is `|`: a bit that is set says the worse.

    There are eleven bits for each axis, and six for the value as a whole:

    - varying: ranks along the axis may hold different values;
    - unsummed: it is not certain to be a scaled sum over the axis;
    - unrepeated: it is not certain to be a sum of what was the same along the axis;
    - single: it may be what one rank would have, and, where it varies, a rank's own part of that:
      the mean over ranks would be what one rank has;
    - total: it may be n times that; where it varies, it has met something that is;
    - divided: it may be that divided by n, so that the sum over ranks would be a mean;
    - even: it may depend on a mean over ranks that count alike: a sum that was divided by n;
    - uneven: it may depend on what ranks exchanged in another way, such as a weighted mean;
    - averaging: a constant that was divided by n, or by a number of elements that is n, too;
    - undivided: it may depend on a total that no number has scaled since. The claim of a sum ends
      with the first operation that is not linear, and this does not;
    - duplicated: it may depend so on a sum of what was the same along the axis;
    - data: the value depends on data, it is not a constant of the program;
    - nonzero: it may be something else than zero. Two bits: a constant that is 1 or -1 has one;
    - bent: it may be a root, power or logarithm of a sum over ranks, a sum of its elements, or one
      over groups of ranks. Not n but another number then undoes that the same was summed;
    - by_ranks: it may have been multiplied by a number of ranks;
    - capped: it may be a constant in place of what else was computed.

    Args:
      sizes: of all axes of the mesh, by name.

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
        # One, or minus one, has the first of these bits alone.
        self.nonzero = 6 * self.data
        self.other = 4 * self.data
        self.bent = 8 * self.data
        self.by_ranks = 16 * self.data
        self.capped = 32 * self.data
        # The bits that an operation adds to data if it invalidates every claim.
        self.mixed = self.unsummed | self.unrepeated | self.single | self.data | self.nonzero
        # The same for an operation whose result changes if its operand is multiplied by n.
        self.imaged = self.mixed & ~self.unrepeated
        # An unknown value that is the same on all ranks.
        self.anything = self.mixed | self.total | self.divided | self.uneven
        self._products = [
            (self.axes(chosen), math.prod(sizes[name] for name in chosen))
            for count in range(1, k + 1)
            for chosen in itertools.combinations(sizes, count)
        ]

    def axes(self, names: Iterable[Any]) -> int:
        """Return the varying bits of axes; names that are not axes of the mesh have none."""
        bits = 0
        for name in names:
            bits |= self._bit.get(name, 0)
        return bits

    def names(self, value: int) -> frozenset[str]:
        """Return the names of the axes along which `value` varies."""
        return frozenset(name for name, bit in self._bit.items() if value & bit)

    def over(self, kind: str, axes: int) -> int:
        """Return the bits of one kind, such as "divided", of axes given by their varying bits."""
        return axes << self._shift[kind]

    def at(self, value: int, kind: str) -> int:
        """Return the bits of one kind, in the places of the varying bits."""
        return value >> self._shift[kind] & self.varying

    def sums(self, single: int, total: int, divided: int) -> int:
        """Return the bits of three sets of axes."""
        return (
            self.over("single", single) | self.over("total", total) | self.over("divided", divided)
        )

    def is_constant(self, value: int) -> bool:
        """Whether a value is a constant of the program, the same on every rank."""
        return not value & (self.data | self.varying)

    def is_data(self, value: int) -> bool:
        """Whether a value depends on data, and may be something else than zero."""
        return bool(value & self.data and value & self.nonzero)

    def decode(self, value: int) -> Class:
        """Return the class that `value` stands for."""
        uniform = self.varying & ~value if self.is_data(value) else 0
        summed = uniform & ~self.at(value, "unsummed")
        total = summed & self.at(value, "total")
        unclear = total & (self.at(value, "single") | self.at(value, "divided"))
        return Class(
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
        """Return axes that have together as many ranks as `size`: all of `among`, or some of it."""
        # 1 / 3 in bfloat16 is 0.2 % too large. Sums over one rank are means as they stand.
        found = 0
        for axes, product in self._products:
            if not axes & ~among and (product > 1 or size == 1):
                if abs(size - product) <= 4e-3 * product:
                    if axes == among:
                        return axes
                    found |= axes
        return found
