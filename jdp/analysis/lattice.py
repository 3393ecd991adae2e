"""The lattice of classes."""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class AbstractValue(NamedTuple):
    """The facts about one value in every rank's program.

    The one-rank value is what one rank would compute from the whole batch. Over n ranks, a *mean*
    is the one-rank value, and a *total* n times it, as `psum` of the ranks' means is. The division
    by n is after the sum, or before it by a rank's share of the total weight. After another
    division the value is *unclear*: `psum(losses) / psum(counts)` is a mean,
    `psum(gradient) / 2` is not.

    Attributes:
      axes: mesh axes along which ranks may hold different values. Empty: uniform.
      reduced: those along which it is a sum or mean of values that differed, or consists of several
        of these, then only scaled by a uniform value, negated, cast, reshaped, sliced or copied.
      zero: whether it is known to be zero everywhere.
      total: the axes in `reduced` along which it is a total.
      unclear: the axes in `reduced` along which it may be a total or a mean; a mean along others.
      repeated: those along which equal values were summed, n times too large.
      even: those along which it depends on means of equal weights, and on no other exchange.
      undivided: those along which it may depend on a total that no number has scaled since.
      duplicated: the same for a sum of equal values.
    """

    axes: frozenset[str]
    reduced: frozenset[str]
    zero: bool
    total: frozenset[str] = frozenset()
    unclear: frozenset[str] = frozenset()
    repeated: frozenset[str] = frozenset()
    even: frozenset[str] = frozenset()
    undivided: frozenset[str] = frozenset()
    duplicated: frozenset[str] = frozenset()

    def either(self, other: "AbstractValue") -> "AbstractValue":
        """Join with another call's facts."""
        pairs: Any = zip(self, other, strict=True)
        joined = AbstractValue._make(mine | its for mine, its in pairs)
        return joined._replace(zero=self.zero and other.zero)


_KINDS = (
    "varying unsummed unrepeated single total divided even uneven averaging undivided duplicated"
).split()


class Bits:
    """Classes encoded as integers. `|` joins two classes: a set bit is the weaker claim.

    Each axis has eleven bits, and the value as a whole six. n is the number of ranks along the
    axis; the one-rank value is that of `AbstractValue`.

    - varying: ranks along the axis may hold different values;
    - unsummed: it may be something else than a scaled sum over the axis;
    - unrepeated: it may be something else than a sum of equal values;
    - single: it may be the one-rank value or, if varying, a part whose mean is that value;
    - total: it may be n times the one-rank value or, if varying, computed from such a value;
    - divided: it may be the one-rank value divided by n, so its sum is a mean;
    - even: it may depend on a mean with equal weights;
    - uneven: it may depend on another exchange between ranks, such as a weighted mean;
    - averaging: it is a constant divided by n, or by an equal number of elements;
    - undivided: it may depend, also through nonlinear operations, on an unscaled total;
    - duplicated: likewise on a sum of equal values;
    - data: it is not a constant of the program;
    - nonzero: it may differ from zero (two bits, of which the constants 1 and -1 have one);
    - bent: it may be a root, power or logarithm of a sum over ranks, a sum of its elements, or a
      sum over groups of ranks: a factor other than 1/n corrects a repeated sum;
    - by_ranks: it may have been multiplied by a number of ranks;
    - capped: it may be a constant in place of the computed value, as in `max(x, 1)`.
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
        # The constants 1 and -1 have only the first bit.
        self.nonzero = 6 * self.data
        self.other = 4 * self.data
        self.bent = 8 * self.data
        self.by_ranks = 16 * self.data
        self.capped = 32 * self.data
        # Added to data if an operation invalidates every claim.
        self.mixed = self.unsummed | self.unrepeated | self.single | self.data | self.nonzero
        self.imaged = self.mixed & ~self.unrepeated
        # An unknown value, equal on all ranks.
        self.anything = self.mixed | self.total | self.divided | self.uneven
        self._products = [
            (self.axes(chosen), math.prod(sizes[name] for name in chosen))
            for count in range(1, k + 1)
            for chosen in itertools.combinations(sizes, count)
        ]

    def axes(self, names: Iterable[Any]) -> int:
        """Return axes' varying bits; unknown names add none."""
        bits = 0
        for name in names:
            bits |= self._bit.get(name, 0)
        return bits

    def names(self, value: int) -> frozenset[str]:
        """Return the axes along which `value` varies."""
        return frozenset(name for name, bit in self._bit.items() if value & bit)

    def over(self, kind: str, axes: int) -> int:
        """Return the bits of one kind."""
        return axes << self._shift[kind]

    def at(self, value: int, kind: str) -> int:
        """Return the axes with a bit of one kind, as varying bits."""
        return value >> self._shift[kind] & self.varying

    def sums(self, single: int, total: int, divided: int) -> int:
        """Return the bits of three kinds."""
        return (
            self.over("single", single) | self.over("total", total) | self.over("divided", divided)
        )

    def is_constant(self, value: int) -> bool:
        """Whether a value is a program constant."""
        return not value & (self.data | self.varying)

    def is_data(self, value: int) -> bool:
        """Whether a value depends on data and may differ from zero."""
        return bool(value & self.data and value & self.nonzero)

    def decode(self, value: int) -> AbstractValue:
        """Return the class that `value` encodes."""
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
        """Return the axes with `size` ranks: all of `among`, else every subset that fits."""
        # In bfloat16, 1 / 3 is 0.2 % too large. A sum over one rank is already a mean.
        found = 0
        for axes, product in self._products:
            if not axes & ~among and (product > 1 or size == 1):
                if abs(size - product) <= 4e-3 * product:
                    if axes == among:
                        return axes
                    found |= axes
        return found


# Frequent, with few different classes.
_REMEMBERED = (
    "add all_reduce contract decode divisions names product quotient scale_by_number".split()
)


class Lattice(Bits):
    """Operations on encoded classes, see `Bits`; `axes` are varying bits.

    A constant has no bits of sums, so a join with a sum keeps the claim, as in a loop that begins
    with it.

    >>> lattice = Lattice({"data": 4})
    >>> rows = lattice.mixed | lattice.axes(["data"])
    >>> total = lattice.all_reduce(rows, lattice.axes(["data"]))
    >>> lattice.decode(rows).axes, lattice.decode(total).total
    (frozenset({'data'}), frozenset({'data'}))
    >>> lattice.decode(lattice.scale_by_number(total, 1 / 4)).total
    frozenset()
    """

    def __init__(self, sizes: Mapping[str, int]):
        super().__init__(sizes)
        for name in _REMEMBERED:
            setattr(self, name, functools.cache(getattr(self, name)))

    def rescaled(self, value: int, axes: int) -> int:
        """Divide by the number of ranks along `axes`."""
        return value & ~(self.over("undivided", axes) | self.over("duplicated", axes))

    def without_scale(self, value: int) -> int:
        """Convert to a boolean, sign or position."""
        return value & ~self.scale

    def _met(self, a: int, b: int) -> int:
        """Return the bits of means: `pmean(w * x) / pmean(w)` is a weighted mean."""
        met = self.over("even", self.at(a | b, "even")) | (a | b) & self.uneven
        return met | self.over("uneven", self.at(a, "even") & self.at(b, "even"))

    def mix(self, value: int) -> int:
        """Drop the claims of the joined operands `value`."""
        return value | (self.mixed if value & self.data else self.nonzero)

    def invert(self, value: int) -> int:
        """Return the class of 1 over a power of `value`."""
        divided = self.over("divided", self.at(value, "total"))
        return self.without_scale(value) & ~self.capped | self.bent | divided

    def all_reduce(self, value: int, axes: int) -> int:
        """Sum over `axes`."""
        differed = value & axes
        value &= ~differed
        if not value & self.nonzero:
            return value
        if not value & self.data:
            if not differed:
                # The sum undoes a constant's division by n, as in the transpose of pmean.
                undone = self.at(value, "divided") & axes
                value &= ~self.over("divided", undone)
                return value | self.nonzero | self.over("divided", axes & ~undone)
            # A constant chosen by a varying predicate is a sum only over its axes.
            value |= self.mixed
        single, total, divided = (each & axes for each in self._parts(value))
        shares = divided & ~single & ~total
        met = (divided | total) & ~shares
        value = self.rescaled(value, divided) & ~self.sums(axes, axes, axes)
        value |= self.sums(shares | met, axes & ~shares, 0)
        # The operand may be weighted by that mean, or be a sum.
        value |= self.over("uneven", self.at(value, "even") & differed | total & ~differed)
        repeats = axes & ~differed & ~divided
        if repeats:
            value &= ~self.bent  # it was about the operand
        value = value & ~self.over("unrepeated", repeats) | self.over("unrepeated", differed)
        return value & ~self.over("unsummed", differed)

    def sum_in_groups(self, value: int, axes: int) -> int:
        """Sum over groups of ranks along `axes`."""
        if not value & self.data:
            return value | self.nonzero if value & self.nonzero else value
        same = axes & ~value
        value |= self.sums(same, same, 0) | self.bent * bool(same)
        return value & ~self.over("unrepeated", same)

    def mean(self, value: int, axes: int) -> int:
        """Divide a sum by n."""
        value = self.rescaled(value, axes)
        axes &= ~value
        value &= ~self.sums(0, axes, axes)
        return value | self.sums(axes, 0, 0) | self.over("unrepeated", axes)

    def agree(self, value: int, axes: int) -> int:
        """Exchange, so that `value` is equal along `axes`."""
        differed = value & axes
        if differed:
            value = value & ~differed | self.data | self.sums(0, axes, axes)
            value |= self.over("uneven", differed)
        return self.mix(value)

    def scale_by(self, value: int, by: int) -> int:
        """Multiply by a constant of class `by`."""
        if not by & (self.other | self.divided | self.averaging):  # by is 1
            return value | by & self.varying
        if value & self.nonzero and not value & self.data:
            return self.mix(value | by)
        divided = (
            self.at(by, "divided") | self.at(by, "averaging") & self.at(value, "total") & ~value
        )
        value = self.without_scale(value) & ~self.capped
        value |= by & self.varying | self.sums(self.at(value, "total"), 0, divided)
        return value | self.unrepeated * bool(divided or value & self.bent)

    def scale_by_number(self, value: int, number: float) -> int:
        """Multiply by a number; 1 / n makes a sum a mean."""
        if not value & self.nonzero or not number:
            return value & self.varying
        if value & self.bent and abs(number) != 1:
            value |= self.unrepeated
        if value & self.scale:
            ranks = self.axes_of_size(1 / number, self.varying)
            value |= self.over("even", ranks & self.at(value, "undivided") & ~value)
            value = self.rescaled(value, ranks if abs(number) == 1 else self.varying)
        total = self.at(value, "total") & ~value
        if value & self.data and total:
            matched = self.axes_of_size(1 / number, total)
            if matched:
                # Axes along which it is surely a sum of values that differed.
                sums = matched & ~self.at(value, "unsummed") & ~self.at(value, "single")
                return self.mean(value, matched) | self.over("even", sums)
            return value if abs(number) == 1 else value | self.sums(total, 0, 0)
        if abs(number) != 1:
            value |= self.nonzero
        return value | self.over("divided", self.axes_of_size(1 / number, self.varying))

    def divisions(self, divisor: float) -> int:
        """Return 1 for a number of ranks, -1 for its inverse, else 0."""
        if divisor and self.axes_of_size(divisor, self.varying):
            return 1
        return -1 if divisor and self.axes_of_size(1 / divisor, self.varying) else 0

    def add(self, a: int, b: int) -> int:
        """Add or subtract: two sums over ranks make one."""
        for term in (a, b):
            if not term & self.nonzero:
                return a | b
            if not term & self.data:
                return self.mix(a | b)
        # The result is n times too large if either term is.
        value = (a | b) & ~self.unrepeated | a & b & self.unrepeated
        return value | self.unrepeated * bool(value & self.bent)

    def product(self, a: int, b: int) -> int:
        """Multiply elementwise."""
        if not (a & self.nonzero and b & self.nonzero):
            return (a | b) & self.varying
        if not a & self.data:
            return self.scale_by(b, a)
        if not b & self.data:
            return self.scale_by(a, b)
        (single_a, total_a, divided_a), (single_b, total_b, divided_b) = map(self._parts, (a, b))
        a, b = self._scaled_by(a, b), self._scaled_by(b, a)
        total, divided = total_a | total_b, divided_a | divided_b
        single = single_a & single_b | total_a & total_b | total & divided
        claims = self.unsummed | self.unrepeated
        value = (a | b) & ~claims & ~self.single | self.sums(single, 0, 0)
        is_lost = total_a & total_b or divided or (a | b) & self.bent
        value |= a & b & claims | self.unrepeated * bool(is_lost)
        return value | self._met(a, b) | self.over("uneven", total_a & total_b)

    def _scaled_by(self, value: int, factor: int) -> int:
        """Multiply by `factor`, which may be 1 over a sum."""
        return value if factor & self.capped else self.rescaled(value, self.at(factor, "divided"))

    def quotient(self, a: int, b: int) -> int:
        """Divide elementwise."""
        b = self.without_scale(b) & ~self.capped
        if a & self.nonzero and not a & self.data:
            value = self.mix(a | b)
        else:
            value = a | b & self.varying
        if not b & self.data:
            return self._over_constant(value, b) if value & self.data else value
        (single, total, divided), (_, total_b, divided_b) = map(self._parts, (value, b))
        met = total_b | divided_b | (self.varying if b & self.by_ranks else 0)
        value = self.rescaled(value, met)
        value = value & ~self.sums(self.varying, 0, 0)
        value |= self.sums(single | total & met, 0, met)
        is_lost = met or (a | b) & self.bent
        return value | self.unrepeated * bool(is_lost) | self._met(a, b)

    def _over_constant(self, value: int, by: int) -> int:
        """Divide by a constant; a 1 may be the number of ranks."""
        quotient = self.scale_by(value, by)
        if by & self.other:
            return quotient
        ranks = self.axes_of_size(1, self.varying)
        return self.rescaled(quotient, ranks) | self.sums(self.at(value, "total") & ranks, 0, 0)

    def contract(self, a: int, b: int) -> int:
        """Contract `a` and `b`: sums of products."""
        if not (a & b & self.nonzero):
            return (a | b) & self.varying
        if not a & b & self.data:  # the elements of a constant array are unknown
            return self.without_scale(self.mix(a | b))
        scaled = self._scaled_by(a, b) | self._scaled_by(b, a)
        value = self.mix(scaled) | self.over("uneven", self.at(a, "total") & self.at(b, "total"))
        return value & ~self.unrepeated | self.product(a, b) & self.unrepeated | self.bent

    def _parts(self, value: int) -> tuple[int, int, int]:
        return self.at(value, "single"), self.at(value, "total"), self.at(value, "divided")
