"""Classes: over which axes a value may differ, and whether it was summed over them."""

from collections.abc import Iterable
from typing import Any, NamedTuple


class Class(NamedTuple):
    """What is known of one value in a program that every rank runs.

    Attributes:
      axes: mesh axes along which ranks may hold different values. Empty: uniform.
      reduced: mesh axes along which it is a sum or mean of values that differed, or several of
        those added up, and since then was only scaled by something uniform, negated, cast,
        reshaped, sliced or copied.
      zero: it is zero everywhere, as far as that can be read off the program.
    """

    axes: frozenset[str]
    reduced: frozenset[str]
    zero: bool

    def either(self, other: "Class") -> "Class":
        """Return what is known of a function's value that is called in several places."""
        return Class(self.axes | other.axes, self.reduced | other.reduced, self.zero and other.zero)


class Lattice:
    """Classes as integers whose join is `|`: a bit that is set says the worse.

    There are two bits for each axis, and two for the value as a whole:

    - varying: ranks along the axis may hold different values;
    - unsummed: it is not certain to be a scaled sum over the axis;
    - data: the value depends on data, it is no constant of the program;
    - nonzero: it may be something else than zero.

    A constant has no unsummed bit: chosen by a uniform predicate, or where a loop starts, it may
    stand beside a sum without ending the claim. `decode` claims a sum only of data.

    Args:
      names: of all axes of the mesh.

    >>> lattice = Lattice(["data"])
    >>> rows, average = lattice.data | lattice.varying, lattice.data | lattice.nonzero
    >>> lattice.decode(rows | lattice.nonzero).axes, lattice.decode(average).reduced
    (frozenset({'data'}), frozenset({'data'}))
    """

    def __init__(self, names: Iterable[str]):
        self._bit: dict[Any, int] = {name: 1 << i for i, name in enumerate(names)}
        num_axes = len(self._bit)
        self.varying = (1 << num_axes) - 1
        self.unsummed = self.varying << num_axes
        self.data = 1 << 2 * num_axes
        self.nonzero = 2 << 2 * num_axes
        # What an operation that ends every claim adds where data goes in.
        self.mixed = self.unsummed | self.data | self.nonzero
        self._num_axes = num_axes
        self._decoded: dict[int, Class] = {}

    def axes(self, names: Iterable[Any]) -> int:
        """Give the varying bits of axes; names that are no axes of the mesh have none."""
        bits = 0
        for name in names:
            bits |= self._bit.get(name, 0)
        return bits

    def unsummed_over(self, axes: int) -> int:
        """Give the unsummed bits of the axes whose varying bits are `axes`."""
        return axes << self._num_axes

    def names(self, value: int) -> frozenset[str]:
        """Name the axes along which `value` varies."""
        return frozenset(name for name, bit in self._bit.items() if value & bit)

    def decode(self, value: int) -> Class:
        """Give the class that `value` stands for."""
        found = self._decoded.get(value)
        if found is None:
            summed = 0
            if value & self.data and value & self.nonzero:
                summed = self.varying & ~value & ~(value >> self._num_axes)
            found = Class(self.names(value), self.names(summed), not value & self.nonzero)
            self._decoded[value] = found
        return found

    def mix(self, value: int) -> int:
        """Give the class of a result of which nothing is known but the join of its operands."""
        return value | (self.mixed if value & self.data else self.nonzero)

    def all_reduce(self, value: int, axes: int) -> int:
        """Give the class of the sum of `value` over `axes`."""
        differed = value & axes
        if not differed:
            return value
        value &= ~differed
        if not value & self.nonzero:
            return value
        # A constant that differs (chosen by a varying predicate) is a sum over these axes alone.
        kept = value | (0 if value & self.data else self.unsummed)
        return kept & ~self.unsummed_over(differed) | self.data

    def agree(self, value: int, axes: int) -> int:
        """Give the class of what ranks along `axes` exchange until they all hold the same."""
        differed = value & axes
        return self.mix(value & ~differed | (self.data if differed else 0))

    def scale(self, value: int, by: int) -> int:
        """Give the class of `value / by`, or of `value * by` as far as `value` is what is scaled.

        Where `by` varies the result varies, and is no sum whatever its unsummed bits say.
        """
        if value & self.nonzero and not value & self.data:
            return self.mix(value | by)
        return value | by & self.varying

    def total(self, a: int, b: int) -> int:
        """Give the class of `a + b` or `a - b`: two sums over ranks make one."""
        for term in (a, b):
            if term & self.nonzero and not term & self.data:
                return self.mix(a | b)
        return a | b

    def product(self, a: int, b: int) -> int:
        """Give the class of `a * b`."""
        if not (a & self.nonzero and b & self.nonzero):
            return (a | b) & self.varying
        if not a & self.data:
            return self.scale(b, a)
        if not b & self.data:
            return self.scale(a, b)
        return (a | b) & ~self.unsummed | a & b & self.unsummed
