"""The lattice of classes: what each kind of operation makes of them."""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from jdp.analysis.classes import Class

_KINDS = (
    "varying unsummed unrepeated single total divided even uneven averaging undivided duplicated"
).split()


class Lattice:
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

    A constant has none of the bits of sums: chosen by a uniform predicate, or where a loop starts,
    it may stand beside a sum without ending a claim. `decode` claims a sum only of data.

    Args:
      sizes: of all axes of the mesh, by name.

    >>> lattice = Lattice({"data": 4})
    >>> rows = lattice.mixed | lattice.axes(["data"])
    >>> total = lattice.all_reduce(rows, lattice.axes(["data"]))
    >>> lattice.decode(rows).axes, lattice.decode(total).total
    (frozenset({'data'}), frozenset({'data'}))
    >>> lattice.decode(lattice.scale_by_number(total, 1 / 4)).total
    frozenset()
    """

    def __init__(self, sizes: Mapping[str, int]):
        self._bit: dict[Any, int] = {name: 1 << i for i, name in enumerate(sizes)}
        k = len(self._bit)
        self._shift = {kind: i * k for i, kind in enumerate(_KINDS)}
        self.varying = (1 << k) - 1
        self.unsummed = self.over("unsummed", self.varying)
        self._unrepeated = self.over("unrepeated", self.varying)
        self._single = self.over("single", self.varying)
        self._total = self.over("total", self.varying)
        self._divided = self.over("divided", self.varying)
        self._uneven = self.over("uneven", self.varying)
        self._averaging = self.over("averaging", self.varying)
        self._scale = self.over("undivided", self.varying) | self.over("duplicated", self.varying)
        self.data = 1 << len(_KINDS) * k
        # One, or minus one, has the first of these bits alone.
        self.nonzero = 6 * self.data
        self._other = 4 * self.data
        self._bent = 8 * self.data
        self._by_ranks = 16 * self.data
        self._capped = 32 * self.data
        # What an operation that ends every claim adds where data goes in.
        self.mixed = self.unsummed | self._unrepeated | self._single | self.data | self.nonzero
        # One that gives another number for n times its operand.
        self.imaged = self.mixed & ~self._unrepeated
        self._decoded: dict[int, Class] = {}
        self._products = [
            (sum(self._bit[name] for name in chosen), math.prod(sizes[name] for name in chosen))
            for count in range(1, k + 1)
            for chosen in itertools.combinations(sizes, count)
        ]

    def axes(self, names: Iterable[Any]) -> int:
        """Return the varying bits of axes; names that are not axes of the mesh have none."""
        bits = 0
        for name in names:
            bits |= self._bit.get(name, 0)
        return bits

    def over(self, kind: str, axes: int) -> int:
        """Return the bits of one kind, such as "divided", of axes given by their varying bits."""
        return axes << self._shift[kind]

    def is_constant(self, value: int) -> bool:
        """Whether a value is a constant of the program, the same on every rank."""
        return not value & (self.data | self.varying)

    def is_before_sums(self, value: int) -> bool:
        """Whether a value differs from rank to rank, and has met no sum over them."""
        return bool(value & self.varying and not value & self._total)

    def averaging(self, value: int, mean: int) -> int:
        """Return `mean` for a constant that is `value`, unless it averages elements: of a sum over
        ranks it may be either."""
        return mean | self.over("averaging", self._at(value, "divided"))

    def names(self, value: int) -> frozenset[str]:
        """Name the axes along which `value` varies."""
        return frozenset(name for name, bit in self._bit.items() if value & bit)

    def decode(self, value: int) -> Class:
        """Return the class that `value` stands for."""
        found = self._decoded.get(value)
        if found is None:
            uniform = 0
            if value & self.data and value & self.nonzero:
                uniform = self.varying & ~value
            summed = uniform & ~self._at(value, "unsummed")
            total = summed & self._at(value, "total")
            unclear = total & (self._at(value, "single") | self._at(value, "divided"))
            found = Class(
                self.names(value),
                self.names(summed),
                not value & self.nonzero,
                self.names(total & ~unclear),
                self.names(unclear),
                self.names(uniform & ~self._at(value, "unrepeated")),
                self.names(uniform & self._at(value, "even") & ~self._at(value, "uneven")),
                self.names(uniform & self._at(value, "undivided")),
                self.names(uniform & self._at(value, "duplicated")),
            )
            self._decoded[value] = found
        return found

    def without_scale(self, value: int) -> int:
        """Return the class of truth, a sign or a position: n times as much gives the same."""
        return value & ~self._scale

    def undivided_by_sum(self, value: int, axes: int) -> int:
        """Return the bits of what a sum of `value` over `axes` leaves undivided."""
        if not (value & self.data and value & self.nonzero):
            return 0
        axes &= ~self._at(value, "divided")
        differed = value & axes
        return self.over("undivided", differed & ~self._at(value, "total")) | self.over(
            "duplicated", axes & ~differed
        )

    def _rescaled(self, value: int, axes: int) -> int:
        """Return `value`, divided along `axes`."""
        return value & ~(self.over("undivided", axes) | self.over("duplicated", axes))

    def _at(self, value: int, kind: str) -> int:
        """Return one bit of each axis, in the places of the varying bits."""
        return value >> self._shift[kind] & self.varying

    def _sums(self, single: int, total: int, divided: int) -> int:
        """Put the bits of three sets of axes in their places."""
        return (
            self.over("single", single) | self.over("total", total) | self.over("divided", divided)
        )

    def _met(self, a: int, b: int) -> int:
        """Return the bits of means that a product or ratio has: of two it is not a mean itself.

        `pmean(w * x) / pmean(w)` is a weighted mean.
        """
        met = self.over("even", self._at(a | b, "even")) | (a | b) & self._uneven
        return met | self.over("uneven", self._at(a, "even") & self._at(b, "even"))

    def mix(self, value: int) -> int:
        """Return the class of a result of which nothing is known but the join of its operands."""
        return value | (self.mixed if value & self.data else self.nonzero)

    def bend(self, value: int) -> int:
        """Return the class of a root, a power, a logarithm or a sum of elements."""
        return value | self._bent

    def invert(self, value: int) -> int:
        """Return the class of one over a power of `value`."""
        total = self._at(value, "total")
        value = self.without_scale(value) & ~self._capped
        return self.bend(value) | self.over("divided", total)

    def cap(self, value: int, by: list[int]) -> int:
        """Return the class of a `value` that is bounded by the constants among `by`."""
        constants = [x for x in by if self.is_constant(x) and x & self.nonzero]
        if not constants:
            return value
        if not all(x & self._other for x in constants):
            # It may be 1 if any rank has one.
            value &= ~self.over("duplicated", self.varying)
        return value | self._capped

    def count_ranks(self, value: int, number: float) -> int:
        """Return the class of `value`, a product with a number, that may be one of ranks."""
        if value & self.data and self._axes_of_size(number, self.varying):
            return value | self._by_ranks
        return value

    def anything(self) -> int:
        """Return the class of a value of which nothing is known, but that ranks hold the same."""
        return self.mixed | self._total | self._divided | self._uneven

    def all_reduce(self, value: int, axes: int) -> int:
        """Return the class of the sum of `value` over `axes`."""
        differed = value & axes
        value &= ~differed
        if not value & self.nonzero:
            return value
        if not value & self.data:
            if not differed:
                # n times a constant; or the constant itself, if that was divided by n before, as
                # the transpose of pmean does.
                undone = self._at(value, "divided") & axes
                value &= ~self.over("divided", undone)
                return value | self.nonzero | self.over("divided", axes & ~undone)
            # A constant that a varying predicate chose is a sum over these axes alone.
            value |= self.mixed
        single, total, divided = (each & axes for each in self._parts(value))
        shares = divided & ~single & ~total
        met = (divided | total) & ~shares
        value = self._rescaled(value, divided) & ~self._sums(axes, axes, axes)
        value |= self._sums(shares | met, axes & ~shares, 0)
        # It may be weighed by that mean, or be a sum of sums.
        value |= self.over("uneven", self._at(value, "even") & differed | total & ~differed)
        repeats = axes & ~differed & ~divided
        if repeats:
            value &= ~self._bent  # what was done to its operand
        value = value & ~self.over("unrepeated", repeats) | self.over("unrepeated", differed)
        return value & ~self.over("unsummed", differed)

    def sum_in_groups(self, value: int, axes: int) -> int:
        """Return the class of the sums of `value` over groups of ranks along `axes`."""
        if not value & self.data:
            return value | self.nonzero if value & self.nonzero else value
        same = axes & ~value
        value |= self._sums(same, same, 0) | self._bent * bool(same)
        return value & ~self.over("unrepeated", same)

    def mean(self, value: int, axes: int) -> int:
        """Return the class of a mean over `axes`: what `value`, a sum over them, is divided to."""
        value = self._rescaled(value, axes)
        axes &= ~value
        value &= ~self._sums(0, axes, axes)
        return value | self._sums(axes, 0, 0) | self.over("unrepeated", axes)

    def share(self, value: int, axes: int) -> int:
        """Return the class of a rank's share of what all ranks along `axes` have."""
        value = self._rescaled(value | self.mixed, axes)
        value = value & ~self._sums(axes, axes, 0) | self._sums(0, 0, axes)
        return value | self.over("uneven", axes)

    def as_stated(self, value: int, axes: int) -> int:
        """Return the class of a sum over `axes` whose scale the author has chosen."""
        value = self._rescaled(value, axes)
        value |= self._sums(axes, axes, 0) | self.over("unrepeated", axes)
        return value | self.over("uneven", axes)

    def agree(self, value: int, axes: int) -> int:
        """Return the class of what ranks along `axes` exchange until they all hold the same."""
        differed = value & axes
        if differed:
            value = value & ~differed | self.data | self._sums(0, axes, axes)
            value |= self.over("uneven", differed)
        return self.mix(value)

    def scale(self, value: int, by: int) -> int:
        """Return the class of `value * by`, for a `by` that is a constant."""
        if not by & (self._other | self._divided | self._averaging):  # one
            return value | by & self.varying
        if value & self.nonzero and not value & self.data:
            return self.mix(value | by)
        divided = (
            self._at(by, "divided") | self._at(by, "averaging") & self._at(value, "total") & ~value
        )
        value = self.without_scale(value) & ~self._capped
        value |= by & self.varying | self._sums(self._at(value, "total"), 0, divided)
        return value | self._unrepeated * bool(divided or value & self._bent)

    def scale_by_number(self, value: int, number: float) -> int:
        """Return the class of `value * number`: a mean, if that divides a sum by n."""
        if not value & self.nonzero or not number:
            return value & self.varying
        if value & self._bent and abs(number) != 1:
            value |= self._unrepeated
        if value & self._scale:
            ranks = self._axes_of_size(1 / number, self.varying)
            value |= self.over("even", ranks & self._at(value, "undivided") & ~value)
            value = self._rescaled(value, ranks if abs(number) == 1 else self.varying)
        total = self._at(value, "total") & ~value
        if value & self.data and total:
            matched = self._axes_of_size(1 / number, total)
            if matched:
                # Of sums of what differed, known as such.
                sums = matched & ~self._at(value, "unsummed") & ~self._at(value, "single")
                return self.mean(value, matched) | self.over("even", sums)
            return value if abs(number) == 1 else value | self._sums(total, 0, 0)
        if abs(number) != 1:
            value |= self.nonzero
        return value | self.over("divided", self._axes_of_size(1 / number, self.varying))

    def counts_ranks(self, number: float) -> bool:
        """Whether a number is that of the ranks along some axes, or one over it."""
        sizes = (number, 1 / number) if number else ()
        return any(self._axes_of_size(size, self.varying) for size in sizes)

    def divisions(self, divisor: float) -> int:
        """Return how often a number divides by one of ranks: 1, 0, or -1 if it multiplies by it."""
        if divisor and self._axes_of_size(divisor, self.varying):
            return 1
        return -1 if divisor and self._axes_of_size(1 / divisor, self.varying) else 0

    def _axes_of_size(self, size: float, among: int) -> int:
        # 1 / 3 in bfloat16 is 0.2 % too large. Sums over one rank are means as they stand.
        found = 0
        for axes, product in self._products:
            if not axes & ~among and (product > 1 or size == 1):
                if abs(size - product) <= 4e-3 * product:
                    if axes == among:
                        return axes
                    found |= axes
        return found

    def total(self, a: int, b: int) -> int:
        """Return the class of `a + b` or `a - b`: two sums over ranks make one."""
        for term in (a, b):
            if not term & self.nonzero:
                return a | b
            if not term & self.data:
                return self.mix(a | b)
        # n times too large is the sum too, if one of its terms is.
        value = (a | b) & ~self._unrepeated | a & b & self._unrepeated
        return value | self._unrepeated * bool(value & self._bent)

    def product(self, a: int, b: int) -> int:
        """Return the class of `a * b`."""
        if not (a & self.nonzero and b & self.nonzero):
            return (a | b) & self.varying
        if not a & self.data:
            return self.scale(b, a)
        if not b & self.data:
            return self.scale(a, b)
        (single_a, total_a, divided_a), (single_b, total_b, divided_b) = map(self._parts, (a, b))
        a, b = self._scaled_by(a, b), self._scaled_by(b, a)
        total, divided = total_a | total_b, divided_a | divided_b
        single = single_a & single_b | total_a & total_b | total & divided
        claims = self.unsummed | self._unrepeated
        value = (a | b) & ~claims & ~self._single | self._sums(single, 0, 0)
        is_lost = total_a & total_b or divided or (a | b) & self._bent
        value |= a & b & claims | self._unrepeated * bool(is_lost)
        return value | self._met(a, b) | self.over("uneven", total_a & total_b)

    def _scaled_by(self, value: int, factor: int) -> int:
        """Return `value` as a factor leaves it that may be one over a sum."""
        return (
            value if factor & self._capped else self._rescaled(value, self._at(factor, "divided"))
        )

    def quotient(self, a: int, b: int) -> int:
        """Return the class of `a / b`."""
        b = self.without_scale(b) & ~self._capped
        if a & self.nonzero and not a & self.data:
            value = self.mix(a | b)
        else:
            value = a | b & self.varying
        if not b & self.data:
            return self._over_constant(value, b) if value & self.data else value
        (single, total, divided), (_, total_b, divided_b) = map(self._parts, (value, b))
        met = total_b | divided_b | (self.varying if b & self._by_ranks else 0)
        value = self._rescaled(value, met)
        value = value & ~self._sums(self.varying, 0, 0)
        value |= self._sums(single | total & met, 0, met)
        is_lost = met or (a | b) & self._bent
        return value | self._unrepeated * bool(is_lost) | self._met(a, b)

    def solve(self, matrix: int, vector: int) -> int:
        """Return the class of the solution of a linear system: a ratio of sums, if both are."""
        ratio = self.quotient(vector, matrix)
        return self.without_scale(self.mix(vector | matrix)) | ratio & self._scale

    def _over_constant(self, value: int, by: int) -> int:
        """Return the class of `value / by`. An array of ones may be the number of one rank."""
        quotient = self.scale(value, by)
        if by & self._other:
            return quotient
        ranks = self._axes_of_size(1, self.varying)
        return self._rescaled(quotient, ranks) | self._sums(self._at(value, "total") & ranks, 0, 0)

    def contract(self, a: int, b: int) -> int:
        """Return the class of sums of products."""
        if not (a & b & self.nonzero):
            return (a | b) & self.varying
        if not a & b & self.data:  # what a constant array holds is not known
            return self.without_scale(self.mix(a | b))
        scaled = self._scaled_by(a, b) | self._scaled_by(b, a)
        value = self.mix(scaled) | self.over("uneven", self._at(a, "total") & self._at(b, "total"))
        return self.bend(value & ~self._unrepeated | self.product(a, b) & self._unrepeated)

    def _parts(self, value: int) -> tuple[int, int, int]:
        return self._at(value, "single"), self._at(value, "total"), self._at(value, "divided")
